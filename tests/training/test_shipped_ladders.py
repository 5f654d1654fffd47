"""Every arm of the shipped ladders and every shipped recipe, cell by cell, against tables of the papers' words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_cells import differences

from ablation_fakes import FakeCorpus, FakeTrainer, run_ladder, tiny
from mxref import get_backend, load_recipe
from mxref.formats import BLOCK_FORMATS
from mxref.recipe import Fp8Scaling, GemmProfile
from mxref.recipe_files import shipped_recipes
from mxref.recipe_plan import RecipePlan
from mxref.roles import GemmRole
from mxref.steps.hadamard import SignPolicy, draw_rotation
from mxref.steps.random import Stream
from mxref_training.cli.ablate import ablate
from mxref_training.config_files import load_config
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.branches import moments
from mxref_training.lab.ladder import load_ladder, shipped

BF16, FP8, M = "bf16", "fp8", "mxfp4 even zero127"
SR, H, STEP = f"{M} sr", f"{M} h16", f"{M} h16 step"
EVEN_SIGNS = "+++-+++-+++----+"


def alike(words: str) -> list[str]:
    return [words] * 6


PAPER = {
    "fp8": alike(FP8),
    "fp8-seed2": alike(FP8),
    "bf16": alike(BF16),
    "wgrad": [FP8, FP8, FP8, FP8, M, M],
    "fprop": [M, M, FP8, FP8, FP8, FP8],
    "fprop-dgrad": [M, M, M, M, FP8, FP8],
    "all": alike(M),
    "all-sr-dy": [M, M, SR, M, SR, M],
    "all-sr": alike(SR),
    "all-rht16-fixed": alike(f"{H} fixed"),
    "all-rht16-redrawn": alike(STEP),
    "all-h16": alike(H),
    "all-h32": alike(f"{M} h32"),
    "mxfp8": alike("mxfp8_e4m3 rceil"),
}
# Each arm gives to (Fprop X, Fprop W, Dgrad dY, Dgrad W, Wgrad dY, Wgrad X):
READINGS = {
    "fp8": alike(FP8),
    "bf16": alike(BF16),
    "mxfp8": alike("mxfp8_e4m3 rceil"),
    "wgrad": [FP8, FP8, FP8, FP8, M, M],
    "fprop": [M, M, FP8, FP8, FP8, FP8],
    "fprop-sr": [SR, SR, FP8, FP8, FP8, FP8],
    "fprop-rht16": [STEP, STEP, FP8, FP8, FP8, FP8],
    "fprop-dgrad": [M, M, M, M, FP8, FP8],
    "fprop-dgrad-sr": [SR, SR, SR, SR, FP8, FP8],
    "fprop-dgrad-rht16": [STEP, STEP, STEP, STEP, FP8, FP8],
    "all": alike(M),
    # "both operands of all three GEMMs, along that GEMM's contraction axis"
    "all-h16": alike(H),
    "all-h32": alike(f"{M} h32"),
    "all-sr-dy": [M, M, SR, M, SR, M],
    "all-sr": alike(SR),
    "all-rht16-fixed": alike(f"{H} fixed"),
    "all-rht16-step": alike(STEP),
    "all-rht16-step-layer": alike(f"{H} step-layer"),
    "all-h16-wgrad": [M, M, M, M, H, H],
    "all-h16-even-signs": alike(f"{H} {EVEN_SIGNS}"),
    "all-sr-dy-prescale": [M, M, f"{SR} 3/4", M, f"{SR} 3/4", M],
    "all-sr-prescale": alike(f"{SR} 3/4"),
    "all-h16-sr-dy": [H, H, f"{H} sr", H, f"{H} sr", H],
    "all-rht16-step-sr-dy": [STEP, STEP, f"{STEP} sr", STEP, f"{STEP} sr", STEP],
    "all-floor": alike("mxfp4 floor zero127"),
    "all-rceil": alike("mxfp4 rceil zero127"),
    "all-w32": [M, f"{M} tile", M, f"{M} tile", M, M],
    "all-last-bf16": alike(M),  # and its last block in BF16, below
}
FIVE_SEEDS = {
    "fp8", "bf16", "fprop", "fprop-sr", "fprop-rht16", "fprop-dgrad", "fprop-dgrad-sr", "fprop-dgrad-rht16", "all",
    "all-h16", "all-h32", "all-sr-dy", "all-sr", "all-rht16-fixed", "all-rht16-step", "all-rht16-step-layer",
}  # fmt: skip
CLAIMS = {
    "8-9 %": {"fprop", "fprop-sr", "fprop-rht16", "all-h16", "all-h32"},
    "10-11 %": {"fprop-dgrad", "fprop-dgrad-sr", "fprop-dgrad-rht16"},
    "26-27 %": {"all"},
    "DNC": {"all-sr-dy", "all-sr", "all-rht16-fixed", "all-rht16-step", "all-rht16-step-layer"},
}

# "round half away" without SR; the prescale belongs to SR; signs redrawn in every step and layer, on both operands.
NEAREST, RHT64 = "mxfp4 floor rna", "mxfp4 floor rna h64 step-layer"
TSENG_SR, TSENG_BOTH = "mxfp4 floor sr 3/4", "mxfp4 floor sr 3/4 h64 step-layer"
TSENG = {
    "bf16": alike(BF16),
    "none": [BF16, BF16, *[NEAREST] * 4],
    "rht64": [BF16, BF16, *[RHT64] * 4],
    "sr": [BF16, BF16, *[TSENG_SR] * 4],
    "rht64-sr": [BF16, BF16, *[TSENG_BOTH] * 4],
}

# facts of the papers: forward, backward, Hadamard, scale
H32, RHT32 = "mxfp4 floor h32", "mxfp4 floor sr 3/4 h32 step-layer"
NV, NV_WGRAD, RHT16 = "mxfp4 rceil", "mxfp4 rceil h16 fixed", "h16 +++-+------+-+--"
RECIPES = {
    "bf16": alike(BF16),
    "fp8": alike(FP8),
    "mxfp4": alike(M),
    "mxfp4_h16": alike(H),
    "mxfp4_h32": alike(f"{M} h32"),
    "mxfp8": alike("mxfp8_e4m3 rceil"),
    "mxfp8_hybrid": [f"mxfp8_e{'5m2' if i in (2, 4) else '4m3'} rceil" for i in range(6)],
    "tseng": [BF16, BF16, *[TSENG_BOTH] * 4],
    "nvfp4_style": [NV, f"{NV} tile", f"{NV} sr", f"{NV} tile", f"{NV_WGRAD} sr", NV_WGRAD],
    "nvfp4_style_tail": [NV, f"{NV} tile", f"{NV} sr", f"{NV} tile", f"{NV_WGRAD} sr", NV_WGRAD],
    "nvfp4": ["nvfp4", "nvfp4 tile16", "nvfp4 sr", "nvfp4 tile16", f"nvfp4 sr {RHT16}", f"nvfp4 {RHT16}"],
    "nvfp4_4over6": [
        "nvfp4 4/6",
        "nvfp4 tile16 4/6",
        "nvfp4 sr",
        "nvfp4 tile16 4/6",
        f"nvfp4 sr {RHT16}",
        f"nvfp4 4/6 {RHT16}",
    ],
    "quartet_style": [H32, H32, *[RHT32] * 4],
    "tetrajet_style": ["mxfp4 rceil"] * 2 + ["mxfp4 rceil sr"] * 4,
    "primus_style": [M, f"{M} tile", M, f"{M} tile", H, H],
    "fprop_tail": alike(H),
    "qat": ["mxfp8_e4m3 rceil", "mxfp4 rceil", *[BF16] * 4],
    "mx64": [*["mxfp6_e2m3 even zero127"] * 2, *[H] * 4],
    "alto_style": [M, f"{M} tile", SR, f"{M} tile", f"{M} h32 step-layer sr", f"{M} h32 step-layer"],
}


@pytest.mark.parametrize(("name", "table"), [("paper", PAPER), ("readings", READINGS), ("tseng", TSENG)])
def test_every_arm_has_the_treatment_of_the_table(name: str, table: dict[str, list[str]]) -> None:
    ladder = load_ladder(name)
    assert [arm.name for arm in ladder.arm] == list(table)
    for arm in ladder.arm:
        recipe = ladder.resolve(arm)
        assert list(differences(recipe, table[arm.name])) == [], arm.name
        assert recipe.gemm is (GemmProfile.ORDERED if name == "paper" else GemmProfile.BOUNDED)
        assert recipe.fp8_scaling is Fp8Scaling.DELAYED
        assert recipe.keep_bf16 == ("lm_head",)
        assert isinstance(recipe, RecipePlan) is (arm.name == "all-last-bf16")


def test_the_last_block_of_one_arm_stays_in_bf16() -> None:
    ladder = load_ladder("readings")
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(5)]
    found = ladder.resolve(ladder.named("all-last-bf16")).by_layer([*names, "lm_head"])
    for name in names:
        assert list(differences(found[name], alike(BF16 if name[13] == "4" else M))) == [], name


def test_arms_with_rare_keys_run_and_every_arm_reaches_a_child_process(tmp_path: Path) -> None:
    readings = load_ladder("readings")
    # The reference backend has no `bounded` GEMMs.
    ladder = replace(readings, recipe=readings.recipe | {"gemm": "ordered"})
    options: dict[str, Any] = {"trainer": FakeTrainer(), "corpus": FakeCorpus, "seeds": 1}
    rare = ["fp8", "all-last-bf16", "all-h16-even-signs"]
    results = run_ladder(
        ladder,
        tiny(),
        tmp_path,
        backend=get_backend("reference"),
        arms=rare,
        say=lambda line: None,
        **options,
    )
    assert {arm["name"] for arm in results["arms"]} == set(rare)
    for arm in ladder.arm:
        run = ArmRun(tmp_path, arm, 0, tiny(), ladder.resolve(arm))
        assert ArmRun.from_table(json.loads(json.dumps(run.to_table()))) == run


def test_readings_claims_and_seeds() -> None:
    ladder = load_ladder("readings")
    assert {arm.name: arm.seeds for arm in ladder.arm} == {
        name: 5 if name in FIVE_SEEDS else 3 for name in READINGS
    }
    claims = {arm.name: arm.paper.overhead for arm in ladder.arm if arm.paper}
    assert claims == {name: claim for claim, names in CLAIMS.items() for name in names}
    assert all(arm.seeds == 3 for arm in load_ladder("tseng").arm)


def test_the_branches_of_readings_are_those_of_the_protocol() -> None:
    branch = load_ladder("readings").branch
    assert (branch.trunk, branch.moments, branch.updates, branch.seeds) == ("fp8", ("70%",), 200, 3)
    # The losses after 50, 100 and 200 updates are evaluated; 70 % of 3,680 steps is 2,576.
    assert branch.interval == 50
    assert moments(branch, 3680) == (2600,)


def test_the_ladder_at_50m_has_the_claims_of_the_other_and_its_treatments() -> None:
    larger, readings = load_ladder("paper_50m"), load_ladder("readings")
    # A third reading of random signs runs at 20M only.
    claims = {arm.name for arm in readings.arm if arm.paper} - {"all-rht16-step-layer"}
    assert [arm.name for arm in larger.arm] == [name for name in READINGS if name in claims | {"fp8", "bf16"}]
    for arm in larger.arm:
        assert larger.resolve(arm) == readings.resolve(readings.named(arm.name))
    assert {arm.seeds for arm in larger.arm} == {3}
    assert larger.train.preset == "lab_50m"
    assert larger.train.run == readings.train.run | {"steps": 4000}
    assert {"fprop", "dgrad", "wgrad", "h16", "h32", "sr-dy", "rht16-step"} <= {
        c.name for c in larger.contrast
    }


def test_the_ladder_at_8b_is_that_at_50m_with_the_benchmarks_model_and_target() -> None:
    full, small = load_ladder("paper_8b"), load_ladder("paper_50m")
    assert [(arm.name, arm.seeds, full.resolve(arm)) for arm in full.arm] == [
        (arm.name, arm.seeds, small.resolve(arm)) for arm in small.arm
    ]
    *shared, later = full.contrast
    assert tuple(shared) == small.contrast
    # What was seen at 50M before it was declared is declared at 8B.
    assert [(later.arm, later.against)] == [(one.arm, one.against) for one in small.exploratory]
    assert full.exploratory == ()
    assert full.target.loss == 3.3
    config = load_config(full.train.preset, [full.train.overlay()])
    preset = load_config("llama31_8b")
    assert (config.model, config.data) == (preset.model, preset.data)
    assert config.optim == replace(preset.optim, schedule="constant")
    assert config.run == replace(preset.run, steps=8000, deterministic=True)
    # 172,757 sequences of the public FP8 logs, and 27 % more, fit into the budget.
    assert 1.27 * 172_757 < config.run.steps * config.run.batch < 1.5 * 172_757


@pytest.mark.parametrize("name", ["readings", "tseng"])
def test_what_shipped_ladders_share_is_what_the_protocol_says(name: str) -> None:
    ladder = load_ladder(name)
    assert ladder.train.preset == "lab_20m"
    assert ladder.train.optim == {"schedule": "constant"}
    assert ladder.train.run == {"steps": 3680, "eval_every": 40, "deterministic": True}
    assert ladder.target.fraction == 0.7


def test_every_arm_is_in_a_contrast_and_every_question_ends_in_one_mark() -> None:
    for name in ("readings", "tseng"):
        ladder = load_ladder(name)
        asked = {side for contrast in ladder.contrast for side in (contrast.arm, contrast.against)}
        assert asked | {ladder.target.high_precision or "bf16"} == {arm.name for arm in ladder.arm}
        assert all(contrast.question.endswith("?") for contrast in ladder.contrast)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_shipped_recipe_has_the_treatment_of_the_table(name: str) -> None:
    assert list(differences(load_recipe(name), RECIPES[name])) == []


def test_the_arms_of_formats_are_the_block_formats_and_their_recipes() -> None:
    ladder = load_ladder("formats")
    plain = [ladder.resolve(arm) for arm in ladder.arm if arm.stage == "plain"]
    of_all = [{format for role in GemmRole for format in recipe.formats(role)} for recipe in plain]
    assert [len(formats) for formats in of_all] == [1] * len(plain)
    assert {str(*formats) for formats in of_all} == set(BLOCK_FORMATS) - {"mxfp8_e5m2", "mxfp4_e1m2"}
    asked = {side for contrast in ladder.contrast for side in (contrast.arm, contrast.against)}
    assert {arm.name for arm in ladder.arm} - asked == {
        "bf16",
        "mx64",
    }  # whose distance from FP8 is in the table of arms


def test_the_help_names_every_ladder() -> None:
    text = ablate.help or ""
    named = text[text.index("shipped: ") : text.index(". --set")].replace(" or ", ", ")
    assert sorted(re.findall(r"\w+", named)[1:]) == shipped()


def test_the_tables_name_all_that_is_shipped() -> None:
    assert set(RECIPES) == set(shipped_recipes())
    assert set(shipped()) == {
        "annealed",
        "demo",
        "formats",
        "mx64",
        "mx64_50m",
        "paper",
        "paper_50m",
        "paper_8b",
        "readings",
        "shrinkage",
        "tseng",
    }


def row_sums(signs: np.ndarray) -> list[int]:
    """Return the absolute sums of the rows of a Hadamard matrix whose columns have these signs."""
    matrix = np.array([[1.0]])
    while len(matrix) < len(signs):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return [int(total) for total in np.abs(matrix @ signs)]


def test_even_signs_spread_the_mean_and_fixed_signs_leave_no_row_constant() -> None:
    assert row_sums(draw_rotation(16, SignPolicy.NONE, None, EVEN_SIGNS).vector()) == [4] * 16
    assert row_sums(np.ones(16)) == [16] + [0] * 15
    for seed in range(5):
        for operand in (0, 2, 4):
            drawn = draw_rotation(16, SignPolicy.FIXED, Stream(seed, step=7, layer=3, operand=operand))
            assert max(row_sums(drawn.vector())) <= 10, (seed, operand)


def test_the_array_job_has_every_run_of_its_ladder() -> None:
    text = (Path(__file__).parents[2] / "docs/examples/ladder.sbatch").read_text(encoding="utf-8")
    arms = re.search(r"(?s)ARMS=\((.*?)\)", text)
    last = re.search(r"--array=0-(\d+)", text)
    assert arms
    assert last
    ladder = load_ladder("paper_8b")
    assert arms[1].split() == [arm.name for arm in ladder.arm]
    assert int(last[1]) + 1 == sum(arm.seeds for arm in ladder.arm)
