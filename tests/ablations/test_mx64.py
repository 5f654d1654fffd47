"""The registered experiment `mx64`: its rules and every number that the pages tell of it, from the raw records."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import pytest

from ablations import ladders, raw
from ablations.conclusions import signed
from ablations.ladders import results_of
from ablations.test_conclusions import APPENDIX, PAGE, README, RECIPES, T7
from bench.records import newest, read

FILES = {"mx64": 48, "mx64_50m": 9}
SIDES = {"h16": ("all-h16", "fp8"), "left": ("mx64", "fp8"), "helps": ("mx64", "all-h16")}

CONTRASTS = {"h16": "h16-left", "left": "left", "helps": "helps"}


def contrast(name: str, of: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in results_of(name)["contrasts"] if row["name"] == CONTRASTS[of])
    return found


def cell(name: str, of: str) -> str:
    loss = contrast(name, of)["loss"]
    return f"{signed(loss['nats'])} ± {(loss['high'] - loss['low']) / 2:.3f}"


def tokens(of: str) -> str:
    found = contrast("mx64", of)["tokens"]
    return "{percent:.1f} %@({low:.1f} to {high:.1f})".format(**found).replace("(-", "(−")


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
    assert [round((bounds[name][2] - bounds[name][0]) / 2, 3) for name in ("helps", "left")] == [0.008, 0.009]
    assert "The own pairs of `mx64` alone give its two differences at 20M at most ± 0.009." in APPENDIX
    # The protocol's spread is the pooled one, which no arm left.
    assert results_of("mx64")["spread"]["loss"]["outside"] == []
    helps, left = (contrast("mx64", name)["loss"] for name in ("helps", "left"))
    assert helps["nats"] == pytest.approx(bounds["helps"][1])
    assert helps["high"] < 0
    assert left["nats"] == pytest.approx(bounds["left"][1])
    assert left["high"] < 0.02
    assert "**At 20M it helps, and it is close to FP8**: both rules hold." in PAGE
    larger = raw.pairs(*SIDES["helps"], "mx64_50m")
    assert len(larger) == 3
    assert max(larger) < 0
    assert contrast("mx64_50m", "left")["loss"]["high"] > 0.02
    assert "At 50M it is below MXFP4 with H16 in 3 of 3 pairs; closeness is not shown." in PAGE


@pytest.mark.parametrize("name", FILES)
def test_every_result_file_is_a_run_of_its_arm(name: str) -> None:
    files = ladders.lines(name)
    assert len(files) == FILES[name]
    shown = {
        (arm["name"], run["pair"]): (arm["recipe"]["digest"], run["diverged"])
        for arm in results_of(name)["arms"]
        for run in arm["runs"]
    }
    for file in files:
        assert shown[file["record"]["arm"], file["record"]["pair"]] == (file["recipe"], False)


def test_the_table_and_its_sentences() -> None:
    assert f"and {sum(FILES.values())} times more to try MXFP6 in the forward one." in PAGE
    for name, sides in SIDES.items():
        cells = [part for size in FILES for part in (cell(size, name), signed(raw.in_bf16(*sides, size)))]
        assert "     - {}\n     - {}\n     - {}\n     - {}\n".format(*cells) in PAGE
    assert f"It needs {tokens('left')}.".replace("@", " more tokens than FP8 ") in PAGE
    needs = tokens("h16").replace("@", " ").replace(")", ") more tokens than FP8 on these seeds.")
    assert f"MXFP4 with H16 needs {needs}" in APPENDIX
    last = [-raw.in_bf16(*SIDES["helps"], "mx64"), raw.in_bf16(*SIDES["h16"], "mx64")]
    assert "Evaluated in BF16, {:.3f} of the {:.3f} that MXFP4 with H16 costs at 20M".format(*last) in PAGE
    assert f"(in BF16 {signed(raw.in_bf16('all-h16-tail', 'all-h16', 'mx64'))}; three seeds, 20M)." in RECIPES
    row = (cell(name, "left").replace(" ", "\N{NO-BREAK SPACE}") for name in FILES)
    assert "     - {}\n     - {}\n".format(*row) in RECIPES
    shown = cell("mx64", "left").removeprefix("+")
    assert f"ends {shown} above FP8's** with 8 seeds (" in " ".join(README.split())


def test_the_exploratory_arms() -> None:
    less = [raw.pairs(arm, "mx64", "mx64") for arm in ("mx64-e3m2", "w4a6", "mx64-plain")]
    assert [len(values) for values in less] == [3, 3, 3]
    e3m2, w4a6, plain = (signed(fmean(values)) for values in less)
    assert f"Less `mx64`: E3M2 in place of E2M3 {e3m2}, weights in MXFP4 {w4a6}, no H16 {plain}." in APPENDIX
    tail, d, dw, sr, rht16 = (
        signed(fmean(raw.pairs(arm, "fp8", "mx64")))
        for arm in ("all-h16-tail", "dgrad", "dgrad-wgrad", "all-sr-backward", "all-rht16-wgrad")
    )
    assert (
        f"Less FP8: MXFP4 with H16, last block in BF16 {tail}; plain D alone {d}, D+W {dw}; F+D+W with SR in D and W "
        f"{sr}, with RHT16 in W {rht16}."
    ) in APPENDIX


def test_the_projected_step() -> None:
    found = read(newest("projection"))["results"]["over_fp8"]
    low, nominal, high = found["mx64"]
    assert (
        f"computed <projection>` to be {nominal:.2f} times as fast as FP8's (bounds {low:.2f} to {high:.2f}), if MXFP6 "
        "multiplies as fast as MXFP4: no kernel here does yet."
    ) in PAGE
