"""The short page of results and the page of recipes: each number is that of the raw records."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest

from ablations import conclusions, front, ladders, raw
from ablations.conclusions import signed, verdict, within
from ablations.sentences import contrasts
from mxref_training.config_files import load_config
from mxref_training.lab.ladder import load_ladder

DOCS = Path(__file__).parents[2] / "docs"
PAGE, APPENDIX, RECIPES, README = (
    (DOCS.parent / path).read_text(encoding="utf-8")
    for path in (
        "docs/explanation/ablation-results.rst",
        "docs/explanation/ablation-appendix.rst",
        "docs/how-to/which-recipe.rst",
        "README.md",
    )
)
T7, T4, T2 = 2.3646242515927844, 2.7764451051977987, 4.302652729911275
"""Points of Student's t with 7, 4 and 2 degrees of freedom at 95 %, from a table."""
SHARED = {
    row["name"]: (row["arm"], row["against"])
    for row in ladders.results_of("paper_50m")["exploratory"]["contrasts"]
}


def mean(arm: str, against: str, *names: str) -> float:
    return fmean(raw.pairs(arm, against, *names))


def last_gap(arm: str, recipe: str) -> float:
    """Return the loss of an arm's last checkpoint at 50M less FP8's, both evaluated with a recipe or their own."""
    found = {}
    for name in (arm, "fp8"):
        found[name] = fmean(
            record["last"]["losses"][recipe]["validation"]
            for record in raw.records("paper_50m")
            if record["arm"] == name
        )
    return found[arm] - found["fp8"]


def words(text: str) -> int:
    """Return the words that a reader sees: no directives, options and marks of tables."""
    shown = re.sub(r"(?m)^ *(\.\. |:[\w-]+:).*$", "", text)
    return sum(bool(re.search(r"\w", word)) for word in shown.split())


def test_the_pages_are_short() -> None:
    assert words(PAGE) <= 900
    assert len(re.findall("(?:list|csv)-table::", PAGE)) == 3
    assert words(RECIPES) <= 220
    assert len(re.findall("list-table::", RECIPES)) == 1


def test_the_table_of_both_sizes_is_that_of_the_raw_records() -> None:
    sizes = {name: ladders.results_of(name) for name in front.SIZES}
    _, *body = conclusions.table(sizes)
    assert len(SHARED) == 18
    assert "corrected for 18 contrasts" in PAGE
    corrected = raw.holm({name: raw.two_sided(raw.pairs(*sides)) for name, sides in SHARED.items()})
    for (name, label), row in zip(conclusions.SHOWN.items(), body, strict=True):
        values = raw.pairs(*SHARED[name])
        half = T7 * stdev(values) / math.sqrt(8)
        estimate = fmean(values)
        p = "<\N{NO-BREAK SPACE}0.001" if corrected[name] < 0.001 else f"{corrected[name]:.3f}"
        assert (row[0], *row[6:]) == (
            label,
            within(estimate, estimate - half, estimate + half),
            p,
        )
        for ladder, cell in zip(raw.SIZES, (row[3], row[5]), strict=True):
            assert cell.startswith(f"{signed(mean(*SHARED[name], ladder))} ± ")
        assert row[1] == ", ".join(verdict(results, name) for results in sizes.values())
    # The registered intervals stand in the table as they are in the appendix.
    for name in ("fprop", "dgrad", "wgrad", "h16", "rht16-step", "sr-all"):
        for ladder, column in (("readings", 3), ("paper_50m", 5)):
            found = contrasts(ladder)[name]["loss"]
            row = body[list(conclusions.SHOWN).index(name)]
            assert row[column] == within(found["nats"], found["low"], found["high"])


def test_pairs_of_one_seed_at_two_sizes_are_taken_as_one() -> None:
    def by_seed(arm: str, against: str) -> list[float]:
        found: dict[int, list[float]] = {}
        for name in raw.SIZES:
            curves = raw.curves(name)
            for seed in sorted(curves[arm].keys() & curves[against].keys()):
                found.setdefault(seed, []).append(
                    raw.loss(curves[arm][seed]) - raw.loss(curves[against][seed])
                )
        return [fmean(values) for values in found.values()]

    corrected = raw.holm({name: raw.two_sided(by_seed(*sides)) for name, sides in SHARED.items()})
    assert (
        "The 8 pairs of both sizes share 5 seeds and count as independent; averaged by seed, W and H16 less RHT16 have "
        f"p = {corrected['wgrad']:.2f} and {corrected['h16-or-rht16']:.2f}."
    ) in PAGE


def test_claims_in_nats_are_at_the_slope_of_fp8() -> None:
    slopes = [fmean(map(raw.slope, raw.curves(name)["fp8"].values())) for name in raw.SIZES]
    assert f"({signed(slopes[0])} and {signed(slopes[1])} nats per e-fold of tokens)" in PAGE
    steps = [-slope * math.log(1.265 / 1.105) for slope in slopes]
    for ladder, step in zip(raw.SIZES, steps, strict=True):
        assert contrasts(ladder)["wgrad"]["loss"]["high"] < step
    found = ladders.results_of("readings")
    band = front.lines({"readings": found})[0].sizes["readings"].claim
    assert band == pytest.approx([-slopes[0] * math.log(1 + percent / 100) for percent in (8, 9)])
    # What the branches cannot see: 14.5 % of their 200 updates, at this slope.
    assert f"14.5 % of 200 steps is {-slopes[0] * math.log1p(0.145 * 200 / 2800):.3f} nats" in APPENDIX


def test_what_the_page_finds() -> None:
    h16 = raw.pairs("all-h16", "all-rht16-step")
    assert max(h16) < 0
    fixed = raw.pairs("all-h16", "all-rht16-fixed")
    assert (
        f"Exploratory: H16 is {signed(fmean(h16))} from RHT16 with signs drawn at each step, in 8 of 8 pairs, but not "
        "shown at either size alone."
    ) in PAGE
    for name in raw.SIZES:
        alone = ladders.results_of(name)["exploratory"]["contrasts"]
        assert next(row for row in alone if row["name"] == "h16-or-rht16")["loss"]["corrected_p"] > 0.05
    same = sum(value < 0 for value in fixed)
    assert (
        f"H16 is {signed(fmean(fixed))} from RHT16 with fixed signs, in {same} of 8 pairs: not shown."
        in APPENDIX
    )
    assert len(SHARED) * raw.two_sided(fixed) > 0.05
    wgrad = raw.pairs("all", "fprop-dgrad")
    assert min(wgrad) > 0
    small, large = (contrasts(name)["wgrad"]["loss"]["corrected_p"] for name in raw.SIZES)
    assert (
        f"**W adds {signed(fmean(wgrad))}**, exploratory: 8 of 8 pairs. "
        f"Registered: underpowered (p = {small:.2f} and {large:.2f})."
    ) in PAGE
    assert [contrasts(name)["wgrad"]["outcome"] for name in raw.SIZES] == ["underpowered"] * 2
    rht16 = [contrasts(name)["rht16-step"] for name in raw.SIZES]
    assert [row["outcome"] for row in rht16] == ["lower", "underpowered"]
    assert "RHT16 too, against it** (shown at 20M)." in PAGE

    def both(*sides: str) -> str:
        return " and ".join(signed(mean(*sides, name)) for name in raw.SIZES)

    assert f"**F costs most**: {both('fprop', 'fp8')}, evaluated in the arm's own arithmetic." in PAGE
    corrected = raw.holm({name: raw.two_sided(raw.pairs(*sides)) for name, sides in SHARED.items()})
    assert (
        corrected["dgrad"] > 0.05 > max(corrected[name] for name in ("wgrad", "h16-or-rht16", "rht16-step"))
    )
    worst = max(SHARED, key=lambda name: mean(*SHARED[name]))
    assert SHARED[worst] == ("all-sr", "all")
    assert f"**SR everywhere is worst**, and F alone has {both('fprop-sr', 'fprop')} of it." in PAGE


def test_evaluation_in_bf16_is_that_of_the_last_checkpoints() -> None:
    h16 = [signed(last_gap("all-h16", recipe)) for recipe in ("own", "bf16")]
    assert f"at 50M H16's last {h16[0]} becomes {h16[1]} (exploratory)." in RECIPES


def test_cells_and_divergences_are_counted_as_the_page_says() -> None:
    sizes = {name: ladders.results_of(name) for name in front.SIZES}
    runs = [run for results in sizes.values() for run in ladders.arm_of(results, "all-sr")["runs"]]
    assert not any(run["diverged"] for run in runs)
    most = 1 - 0.05 ** (1 / len(runs))
    assert f"0 of {len(runs)} still allows a rate of {100 * most:.0f} % (one-sided)." in PAGE
    whole = [
        run for name in ladders.LADDERS for arm in ladders.results_of(name)["arms"] for run in arm["runs"]
    ]
    assert f"were trained {len(whole)} times" in PAGE
    assert not any(run["diverged"] for run in whole)
    assert all(ladders.results_of(name)["flagged"] == [] for name in ladders.LADDERS)


def test_what_the_page_of_recipes_says_of_rht64() -> None:
    alone, half = ladders.interval_of(ladders.results_of("tseng"), "rht64") or (math.nan, math.nan)
    assert alone == pytest.approx(mean("rht64", "bf16", "tseng"))
    assert f"RHT64 alone has {signed(alone)} ± {half:.3f}\n" in RECIPES


def test_what_to_run_and_why_it_may_differ() -> None:
    overheads = [ladders.arm_of(ladders.results_of(name), "all-h16")["overhead"] for name in raw.SIZES]
    tokens = [f"{found['percent']:.0f} ± {found['half_width']:.0f} %" for found in overheads]
    assert f"needs {tokens[0]} (20M) and {tokens[1]} (50M) more tokens." in PAGE
    small, large, full = (load_config(name) for name in ("lab_20m", "lab_50m", "llama31_8b"))
    assert (
        f"The 8B model has {full.model.layers} layers, not {small.model.layers} and {large.model.layers}; "
        f"{full.run.step_tokens:,} tokens a step, not {small.run.step_tokens:,}; "
        "and about 1.4 billion tokens, not 60M and 66M."
    ) in PAGE
    assert [round(config.run.steps * config.run.step_tokens / 1e6) for config in (small, large)] == [60, 66]
    assert [config.model.tie_embeddings for config in (small, large, full)] == [True, True, False]
    assert small.run.step_tokens == large.run.step_tokens == raw.STEP
    assert "h16-or-rht16" in {contrast.name for contrast in load_ladder("paper_8b").contrast}


def test_the_page_of_recipes_has_our_intervals() -> None:
    results = {name: ladders.results_of(name) for name in ladders.LADDERS}

    def cell(ladder: str, arm: str) -> str:
        nats, half = ladders.interval_of(results[ladder], arm) or (math.nan, math.nan)
        return f"{signed(nats)} ± {half:.3f}".replace(" ", "\N{NO-BREAK SPACE}")

    for arm in ("bf16", "all-h16", "all"):
        small, large = (cell(ladder, arm) for ladder in raw.SIZES)
        assert f"     - {small}\n     - {large}\n" in RECIPES, (arm, small, large)
    assert f"     - {cell('tseng', 'rht64-sr')}\n     - –\n" in RECIPES
    # The arms with SR in Fprop scatter more than the pool says.
    own = [raw.pairs("all-sr", "fp8", name) for name in raw.SIZES]
    halves = [t * stdev(row) / math.sqrt(len(row)) for t, row in zip((T4, T2), own, strict=True)]
    rows = [
        f"     - {signed(fmean(row))} ± {half:.3f}*\n".replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
        for row, half in zip(own, halves, strict=True)
    ]
    assert "".join(rows) in RECIPES
    figure = " ".join(front.figure({name: results[name] for name in raw.SIZES}).get_supxlabel().split())
    assert f"from their own pairs in all three ± {halves[0]:.3f} and ± {halves[1]:.3f}" in figure
    last = mean("all-last-bf16", "all", "readings"), mean("all-h16-tail", "all-h16", "mx64")
    assert (
        f"The last block in BF16 takes {signed(last[0])} from plain MXFP4 and {signed(last[1])} from H16 (in BF16"
    ) in RECIPES
    tokens = [ladders.arm_of(results[name], "all-h16")["overhead"] for name in raw.SIZES]
    said = [
        f"{one['percent']:.0f} ± {one['half_width']:.0f} % ({front.SHORT[name]})"
        for name, one in zip(raw.SIZES, tokens, strict=True)
    ]
    assert f"extra tokens cost: {', '.join(said)}\n" in RECIPES
    record = json.loads(
        (DOCS / "records" / "step_gpu_nvidia-h100-80gb-hbm3_2026-11-24.json").read_text(encoding="utf-8")
    )
    fastest = {step["recipe"]: step["ms"] for step in record["steps"] if "captured" in step["mode"]}
    times = [fastest["plain"] / fastest[name] for name in ("mxfp4_h16:bounded", "fp8")]
    assert f"{times[0]:.2f} times the speed of plain BF16, FP8 {times[1]:.2f} (" in RECIPES


def test_the_second_analysis_in_the_appendix() -> None:
    small, large = (ladders.results_of(name)["exploratory"] for name in raw.SIZES)
    noisy, rest = small["pools"][1], small["pools"][0]
    registered = ladders.results_of("readings")["spread"]["loss"]["nats"]
    assert len(small["noisy"]) == 4
    ratio = (noisy["nats"] / rest["nats"]) ** 2
    for text in (
        f"the four arms with SR of every operand is {ratio:.1f} times that of the others "
        f"(F test, p = {1e4 * small['noisy_p']:.1f}e-4)",
        f"is {noisy['nats']:.4f} nats there ({noisy['freedom']} degrees of freedom), and {rest['nats']:.4f} of the "
        f"other arms ({rest['freedom']}) in place of {registered:.4f}",
        f"At 50M the test does not part them (p = {large['noisy_p']:.2f})",
    ):
        assert text in APPENDIX, text
    assert len(large["pools"]) == 1
    at = [{row["name"]: row["loss"]["corrected_p"] for row in one["contrasts"]} for one in (small, large)]
    assert len(at[0]) == 33
    assert f"the p-value is {at[0]['wgrad']:.3f} after Holm's correction" in APPENDIX
    assert f"(p = {at[0]['h16-or-rht16']:.2f} and {at[1]['h16-or-rht16']:.2f})" in APPENDIX


def test_readings_without_stochastic_rounding_of_fprop_are_counted_as_the_appendix_says() -> None:
    sizes = {name: ladders.results_of(name) for name in front.SIZES}
    counts = [
        Counter(
            line.sizes[name].verdict
            for line in front.lines(sizes)
            if name in line.sizes and line.name not in sizes[name]["exploratory"]["noisy"]
        )
        for name in sizes
    ]
    assert counts == [{"not reproduced": 11}, {"not reproduced": 6, "underpowered": 4}]
    assert "Without them 11 of 11 readings are not reproduced at 20M, and of 10 at 50M 6 are not" in APPENDIX
