"""The page of the ablations: its numbers are those of the result files, and each file is of the arm it names."""

from __future__ import annotations

from itertools import permutations
from statistics import fmean, median
from typing import Any

import pytest

from ablations import branches, ladders, probes, raw
from ablations.ladders import results_of as results
from ablations.sentences import TEXT
from mxref_training.probe.results import rows
from mxref_training.report.ladder.tables import gaps

pytestmark = pytest.mark.study

RUNS = {"readings": 116, "tseng": 15, "paper_50m": 45}


@pytest.mark.parametrize("name", ladders.LADDERS)
def test_every_result_file_is_a_run_of_its_arm(name: str) -> None:
    files = ladders.lines(name)
    shown = {
        (arm["name"], run["pair"]): arm["recipe"]["digest"]
        for arm in results(name)["arms"]
        for run in arm["runs"]
    }
    assert len(files) == len(shown) == RUNS[name]
    for file in files:
        record = file["record"]
        assert shown[record["arm"], record["pair"]] == file["recipe"]


def test_numbers_in_the_text_are_those_of_the_results() -> None:
    arms = {arm["name"]: arm for arm in results("readings")["arms"]}
    runs = sum(len(arm["runs"]) for arm in arms.values())
    assert f"`readings` ({runs} runs, 20M)" in TEXT


def test_numbers_of_the_smaller_ladders_are_those_of_their_results() -> None:
    outcomes = {
        row["name"]: (row["outcome"], row["pairs_to_decide"]) for row in results("tseng")["contrasts"]
    }
    assert outcomes == {
        "none": ("higher", None), "rht64": ("lower", None), "sr": ("lower", None), "rht64-sr-left": ("higher", None),
        "rht64-sr": ("underpowered", 10), "sr-rht64": ("underpowered", 10),
    }  # fmt: skip
    (p,) = (row["loss"]["corrected_p"] for row in results("tseng")["contrasts"] if row["name"] == "sr")
    assert f"corrected p-value is {p:.3f}" in TEXT
    verdicts = [one["verdict"] for row in results("tseng")["contrasts"] for one in row["predictions"]]
    assert sorted(verdicts) == ["reproduced"] * 3 + ["underpowered"] * 2


def test_what_the_text_says_of_the_last_evaluations() -> None:
    shown = results("paper_50m")
    arms = {arm["name"]: arm for arm in shown["arms"]}

    def gap(of: dict[str, Any], name: str, recipe: str, text: str = "validation") -> float:
        arm = next(arm for arm in of["arms"] if arm["name"] == name)
        return fmean(gaps(arm, ladders.reference_of(of), recipe, text))

    pairs = [
        f"{gap(shown, name, recipe):+.3f}"
        for name in ("fprop", "all", "all-h16")
        for recipe in ("own", "bf16")
    ]
    assert (
        "is {} above FP8's when each is evaluated as it was trained, and {} when".format(*pairs[:2]) in TEXT
    )
    assert "All three GEMMs: {} and {}, with H16 {} and {}.".format(*pairs[2:]) in TEXT
    length = arms["fp8"]["runs"][0]["last"]["texts"]["validation"]["tokens"]
    assert f"read all {length:,} tokens of the validation text" in TEXT
    moved = [
        abs(gap(shown, name, "own") - arm["gap_reference"]) for name, arm in arms.items() if name != "fp8"
    ]
    assert f"differs from them by up to {max(moved):.3f}." in TEXT
    taken = [gap(shown, name, "own") - gap(shown, name, "bf16") for name in arms.keys() - {"fp8", "bf16"}]
    assert f"takes {min(taken):.3f} to {max(taken):.3f} off them" in TEXT
    for name in ("tseng", "paper_50m"):
        of = results(name)
        names = [arm["name"] for arm in of["arms"]]
        texts = list(of["arms"][0]["runs"][0]["last"]["texts"])
        assert len(texts) == 7
        if name == "tseng":
            moved = [
                abs(gap(of, arm, "own") - gap(of, arm, recipe)) for arm in names for recipe in ("bf16", "fp8")
            ]
            assert max(moved) < 0.001
        for worse, better in permutations(names, 2):
            if gap(of, worse, "own") > gap(of, better, "own") + 0.02:
                assert all(gap(of, worse, "own", text) > gap(of, better, "own", text) for text in texts)


def test_what_the_text_calls_shown_is_shown() -> None:
    outcomes = {row["name"]: row["outcome"] for row in results("readings")["contrasts"]}
    assert {name for name, seen in outcomes.items() if seen == "higher"} == {
        "fprop", "h16-left", "fprop-sr", "fprop-dgrad-sr", "sr-all", "sr-all-prescale",
    }  # fmt: skip
    assert {name for name, seen in outcomes.items() if seen == "lower"} == {
        "h16", "h32", "sr-where", "rht16-fixed", "rht16-step", "fprop-rht16", "last-bf16",
    }  # fmt: skip
    rest = [row for row in results("readings")["contrasts"] if row["outcome"] == "underpowered"]
    assert f"{len(rest)} of the {len(outcomes)} contrasts of `readings` are underpowered" in TEXT
    seeds = [row["pairs_to_decide"] for row in rest]
    assert f"The table names the seeds that would decide each, {min(seeds)} to {max(seeds)}." in TEXT
    smallest = set(results("readings")["power"]["smallest_nats"].values())
    assert f"find differences of {max(smallest):.3f} or {min(smallest):.3f} nats" in TEXT


def test_who_reached_the_target_is_as_the_text_says() -> None:
    assert all(run["diverged"] is False for arm in results("readings")["arms"] for run in arm["runs"])
    missed = {
        arm["name"]: (sum(run["crossing"]["reach"] != "crossed" for run in arm["runs"]), len(arm["runs"]))
        for arm in results("readings")["arms"]
    }
    everywhere = {"fprop-sr": (5, 5), "fprop-dgrad-sr": (5, 5), "all-sr": (5, 5), "all-sr-prescale": (3, 3)}
    assert {name: of for name, of in missed.items() if of[0]} == everywhere | {
        "all-floor": (2, 3), "all-rceil": (2, 3), "all-w32": (1, 3),
    }  # fmt: skip
    assert f"None of the {sum(n for n, _ in everywhere.values())} runs with SR of every operand" in TEXT


def test_what_the_text_says_of_the_branches() -> None:
    (moment,) = branches.branches_of("readings")["moments"]
    arms = {arm["name"]: arm for arm in moment["arms"]}
    assert (len(arms), sum(len(arm["runs"]) for arm in arms.values())) == (28, 84)
    assert "All 84 branches" in TEXT

    last = {name: fmean(branches.after(moment, name, 200)) for name in arms}
    on_top = (last["fprop-dgrad"] - last["fprop"], last["all"] - last["fprop-dgrad"])
    assert "on top of Fprop change the loss by −0.002 and +0.001." in TEXT
    assert [round(one, 3) for one in on_top] == [-0.002, 0.001]
    early = fmean(branches.after(moment, "all", 50))
    assert (
        f"After 50 updates plain rounding in all three is {early:+.3f}, after 200 {last['all']:+.3f}." in TEXT
    )
    (fp8,) = (arm["runs"] for arm in results("readings")["arms"] if arm["name"] == "fp8")
    for pair in range(3):
        branch = dict(raw.curves(branches.ARCHIVE)["fp8"][pair])
        run = dict(map(tuple, fp8[pair]["curve"]))
        tokens = 2800 * 16384
        assert branch[2800] == run[tokens]


def test_what_the_text_says_of_the_probe() -> None:
    record = probes.record()
    assert record is not None
    assert [moment["step"] for moment in record["moments"]] == [368, 1472, 2576]
    assert f"compared {len(record['recipes'])} recipes" in TEXT
    medians = {
        (row["moment"], row["recipe"], row["role"]): row
        for row in rows(record, "products")
        if row["layer"] == probes.QUARTILES[1]
    }
    last = record["moments"][-1]["name"]

    def snr(recipe: str, moment: str = last) -> list[float]:
        return [medians[moment, recipe, role]["snr"] for role in ("fprop", "dgrad", "wgrad")]

    def listed(values: list[float]) -> str:
        return "{:.1f}, {:.1f} and {:.1f}".format(*values)

    plain = snr("all")
    assert f"Plain MXFP4 has {listed(plain)} dB in Fprop, Dgrad and Wgrad, FP8 {listed(snr('fp8'))}." in TEXT
    given = [h16 - one for h16, one in zip(snr("all-h16"), plain, strict=True)]
    taken = [one - sr for sr, one in zip(snr("all-sr"), plain, strict=True)]
    assert f"H16 gives {listed(given)} dB. SR of every operand takes {listed(taken)} dB." in TEXT
    assert (
        f"H16 takes {given[0]:.1f} dB of error off Fprop's products, SR of every operand adds {taken[0]:.1f} dB"
        in TEXT
    )
    (moment,) = branches.branches_of("readings")["moments"]
    order = ("all-h32", "all-h16", "all", "all-rceil", "all-sr", "all-sr-prescale")
    losses = [fmean(branches.after(moment, name, 200)) for name in order]
    errors = [snr(name)[0] for name in order]
    assert losses == sorted(losses)
    assert errors == sorted(errors, reverse=True)
    assert f"FLOOR is the exception: {snr('all-floor')[0]:.1f} dB" in TEXT
    assert "dead zone: {:.1f} % of its energy without, {:.1f} % with".format(
        *(100 * _operand(record, name, "fprop", "x")["noise"] for name in ("all", "all-h16"))
    ) in TEXT  # fmt: skip
    trend = [snr("all", one["name"])[2] for one in record["moments"]]
    assert f"plain rounding in Wgrad has {listed(trend)} dB at the three moments" in TEXT
    bias = {name: [100 * medians[last, name, role]["bias"] for role in ("fprop", "dgrad", "wgrad")]
            for name in ("all", "all-floor", "all-sr", "all-sr-prescale")}  # fmt: skip
    assert all(-2.5 < one < -2 for one in bias["all"])
    assert [round(one) for one in bias["all-floor"]] == [-5, -4, -6]
    assert [round(one) for one in bias["all-sr"]] == [-1, -1, -1]
    assert all(abs(one) < 0.1 for one in bias["all-sr-prescale"])
    more = [a - b for a, b in zip(snr("all-sr"), snr("all-sr-prescale"), strict=True)]
    assert f"at the price of {min(more):.1f} to {max(more):.1f} dB more noise" in TEXT


def _operand(record: dict[str, Any], recipe: str, role: str, operand: str) -> dict[str, Any]:
    return next(
        row
        for row in rows(record, "operands")
        if (row["moment"], row["recipe"], row["role"], row["operand"])
        == (record["moments"][-1]["name"], recipe, role, operand)
    )


def test_what_the_text_says_of_the_theorem() -> None:
    record = probes.record()
    assert record is not None
    growth = rows(record, "growth")
    least = {key: min(row[f"{key}_bound"] / row[key] for row in growth) for key in ("plain", "rotated")}
    assert (
        f"of at least {least['rotated']:.0f} with RHT64 and of at least {least['plain']:.0f} without" in TEXT
    )
    share = median(row["rotated"] / row["plain"] for row in growth)
    assert f"RHT64 multiplies the measured variance by {share:.2f}," in TEXT
