"""The registered experiment `mx64`: its rules and every number that the pages tell of it, from the raw records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

from ablations import ladders, raw
from ablations.conclusions import signed
from ablations.test_conclusions import PAGE, README, RECIPES, T7
from bench.records import RECORDS, newest, read

FILES = {"mx64": 47, "mx64_50m": 9}
SIDES = {"h16": ("all-h16", "fp8"), "left": ("mx64", "fp8"), "helps": ("mx64", "all-h16")}

CONTRASTS = {"h16": "h16-left", "left": "left", "helps": "helps"}


def in_bf16(arm: str, against: str) -> float:
    """Return the mean difference of the last checkpoints at 20M, both evaluated in BF16."""

    def last(name: str) -> dict[int, float]:
        found = {}
        for path in (RECORDS / "mx64").rglob("result.json"):
            record = json.loads(path.read_text(encoding="utf-8"))["record"]
            if record["arm"] == name:
                found[record["pair"]] = record["last"]["losses"]["bf16"]["validation"]
        return found

    one, other = last(arm), last(against)
    return fmean(one[seed] - other[seed] for seed in one.keys() & other.keys())


def results(name: str) -> ladders.Results:
    return ladders.results_of(name, RECORDS)


def contrast(name: str, of: str) -> dict[str, float]:
    found: dict[str, float] = next(row for row in results(name)["contrasts"] if row["name"] == CONTRASTS[of])[
        "loss"
    ]
    return found


def of_arm(name: str) -> float:
    return ladders.interval_of(results("mx64"), name)[0]  # type: ignore[index]


def cell(name: str, of: str) -> str:
    loss = contrast(name, of)
    return f"{signed(loss['nats'])} ± {(loss['high'] - loss['low']) / 2:.3f}"


def test_both_registered_rules_hold_by_plain_arithmetic() -> None:
    bounds = {}
    for name, sides in SIDES.items():
        values = raw.pairs(*sides, "mx64")
        assert len(values) == 8
        half = T7 * stdev(values) / math.sqrt(8)
        bounds[name] = fmean(values) - half, fmean(values), fmean(values) + half
    low, mean, high = bounds["helps"]
    assert low < high < 0
    assert mean <= -0.015
    assert bounds["left"][2] < 0.02
    # `mx64` left the pool of the spread, so its intervals are those of its own pairs.
    assert results("mx64")["spread"]["loss"]["outside"] == ["mx64"]
    for name in ("helps", "left"):
        loss = contrast("mx64", name)
        assert (loss["low"], loss["nats"], loss["high"]) == pytest.approx(bounds[name])
    assert "**It helps, and it is close to FP8**: both rules hold." in PAGE
    assert fmean(raw.pairs(*SIDES["helps"], "mx64_50m")) < 0
    assert "50M has the same sign." in PAGE


@pytest.mark.parametrize("name", FILES)
def test_every_result_file_is_a_run_of_its_arm(name: str) -> None:
    files = [json.loads(path.read_text()) for path in (RECORDS / name).rglob("result.json")]
    assert len(files) == FILES[name]
    shown = {
        (arm["name"], run["pair"]): (arm["recipe"]["digest"], run["diverged"])
        for arm in results(name)["arms"]
        for run in arm["runs"]
    }
    for file in files:
        assert shown[file["record"]["arm"], file["record"]["pair"]] == (file["recipe"], False)


def test_the_table_and_its_sentences() -> None:
    assert f"and {sum(FILES.values())} times more to try MXFP6 in the forward one." in PAGE
    for name, sides in SIDES.items():
        cells = cell("mx64", name), signed(in_bf16(*sides)), cell("mx64_50m", name)
        assert "     - {}\n     - {}\n     - {}\n".format(*cells) in PAGE
    tokens = {
        arm: "{percent:.1f} ± {half_width:.1f} %".format(**ladders.arm_of(results("mx64"), arm)["overhead"])
        for arm in ("mx64", "all-h16")
    }
    assert (
        f"`mx64` needs {tokens['mx64']} more tokens than FP8 at 20M, MXFP4 with H16 {tokens['all-h16']}."
        in PAGE
    )
    row = (cell(name, "left").replace(" ", "\N{NO-BREAK SPACE}") for name in FILES)
    assert "     - {}\n     - {}\n".format(*row) in RECIPES
    shown = cell("mx64", "left").removeprefix("+")
    assert f"ends {shown} above FP8's** at 20M (8 seeds, registered; not in the figure)." in " ".join(
        README.split()
    )


def test_the_exploratory_arms() -> None:
    e3m2, w4a6, plain, tail, d, dw = (
        signed(of_arm(name))
        for name in ("mx64-e3m2", "w4a6", "mx64-plain", "all-h16-tail", "dgrad", "dgrad-wgrad")
    )
    assert (
        f"less FP8 at 20M: E3M2 in place of E2M3 {e3m2}; weights in MXFP4, activations in MXFP6 {w4a6}; without H16 "
        f"{plain} (2 seeds of 3); MXFP4 with H16, last block in BF16 {tail}. With F in FP8, D costs {d} and D+W {dw}."
    ) in PAGE


def test_the_projected_step() -> None:
    found = read(newest("projection"))["results"]["over_fp8"]
    low, nominal, high = found["mx64"]
    assert (
        f"computed <projection>` to be {nominal:.2f} times as fast as FP8's (bounds {low:.2f} to {high:.2f}), "
        f"MXFP4 with H16 {found['h16'][1]:.2f}."
    ) in PAGE
    assert Path(newest("projection")).name >= "projection_2026-11-24.json"
