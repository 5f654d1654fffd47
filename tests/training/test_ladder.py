"""The file of a ladder: choosing arms, what one ladder takes from another, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ablation_fakes import ladder
from mxref.errors import FileFormatError, RecipeError
from mxref_training.errors import ConfigError
from mxref_training.lab.ladder import load_ladder


def test_arms_can_be_left_out() -> None:
    ladder = load_ladder("paper")
    assert ladder.names(["-mxfp8"]) == [arm.name for arm in ladder.arm if arm.name != "mxfp8"]
    assert ladder.names(["all", "wgrad", "-wgrad"]) == ["fp8", "all"]
    with pytest.raises(ConfigError, match="no arm is named 'mxfp4'"):
        ladder.names(["-mxfp4"])
    with pytest.raises(ConfigError, match="fp8 is the reference"):
        ladder.names(["-fp8"])


def test_paper_ladder_claims() -> None:
    claims = {arm.name: arm.paper.overhead for arm in load_ladder("paper").arm if arm.paper}
    assert claims == {
        "fprop": "8-9 %",
        "fprop-dgrad": "10-11 %",
        "all": "26-27 %",
        "all-sr-dy": "DNC",
        "all-sr": "DNC",
        "all-rht16-fixed": "DNC",
        "all-rht16-redrawn": "DNC",
        "all-h16": "8-9 %",
        "all-h32": "8-9 %",
    }


def test_a_wrong_key_of_the_run_is_one_of_the_ladder(tmp_path: Path) -> None:
    """Not of the preset, over which the table is laid."""
    path = tmp_path / "mine.toml"
    for line, message in (
        ("run.stesp = 3", r"^mine.toml: train: unknown key 'stesp' in \[run\] \(did you mean 'steps'\?\)$"),
        ("run.steps = 'x'", r"^mine.toml: train: run.steps: expected int, got 'x' \(str\)$"),
    ):
        path.write_text(f'extends = "paper"\ntrain.{line}\n')
        with pytest.raises(ConfigError, match=message):
            load_ladder(path)


FP8_ARM = {"name": "fp8", "label": "FP8"}
OTHER = {"name": "b", "label": "b"}
CONTRAST = {"name": "c", "arm": "h16", "against": "bad", "question": "Does H16 help?"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, r"unknown key 'titel' \(did you mean 'title'\?\)"),
        ({"arm": [{**FP8_ARM, "lable": "x"}]}, r"arm\[0\]: unknown key 'lable' \(did you mean 'label'\?\)"),
        ({"target": {"referense": "fp8"}}, r"unknown key 'referense' \(did you mean 'reference'\?\)"),
        ({"target": {"reference": "fp9"}}, r"target.reference = 'fp9' is no arm .*did you mean 'fp8'"),
        ({"target": {"fraction": 1.5, "high_precision": ""}}, r"target.fraction = 1.5 is outside 0 .. 1"),
        ({"arm": [FP8_ARM, FP8_ARM]}, "two arms are named 'fp8'"),
        ({"arm": [{**FP8_ARM, "name": "../fp8"}]}, "'../fp8' is not made of lower-case letters"),
        (
            {"arm": [{**FP8_ARM, "recipe": {"all": {"roundign": "sr"}}}]},
            r"'fp8'.*'roundign' \(did you mean 'rounding'\?\)",
        ),
        (
            {"arm": [{**FP8_ARM, "paper": {"overhead": "much", "source": "s"}}]},
            "'much' is neither a percentage",
        ),
        ({"arm": [{**FP8_ARM, "seed_offset": 1}]}, "target.reference = 'fp8' has a seed_offset"),
        (
            {
                "arm": [
                    FP8_ARM,
                    {"name": "b", "label": "b", "seed_offset": 1, "recipe": {"all": {"format": "bf16"}}},
                ]
            },
            "arm 'b' has seed_offset = 1 and another recipe",
        ),
        ({"arm": [{**FP8_ARM, "seeds": 0}]}, "arm 'fp8': seeds = 0 is outside 1 .. 1000"),
        (
            {"arm": [FP8_ARM, {**OTHER, "seeds": 3}]},
            "arm 'b' has seeds = 3, and the reference arm 'fp8' only 1",
        ),
        (
            {"arm": [{**FP8_ARM, "seeds": 2}, {**OTHER, "seeds": 2, "seed_offset": 9}]},
            "arm 'b' has a seed_offset and so runs once; leave seeds = 2 out",
        ),
        (
            {"contrast": [{**CONTRAST, "arm": "h15"}]},
            "contrast 'c': arm = 'h15' is no arm .*did you mean 'h16'",
        ),
        ({"contrast": [{**CONTRAST, "against": "fp8-seed2"}]}, "against = 'fp8-seed2' has a seed_offset"),
        ({"contrast": [{**CONTRAST, "against": "h16"}]}, "contrast 'c' compares 'h16' with itself"),
        ({"contrast": [CONTRAST, CONTRAST]}, "two contrasts are named 'c'"),
        (
            {"contrast": [{**CONTRAST, "prediction": [{"says": "better", "source": "s"}]}]},
            r"contrast\[0\].prediction\[0\].says = 'better' is not one of lower, higher, equal, diverges",
        ),
    ],
)
def test_ladder_errors_name_the_key_and_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, ConfigError), match=message) as caught:
        ladder(**changes)
    assert "\n" not in str(caught.value)


def test_an_arm_says_how_often_it_runs_and_a_call_may_say_otherwise() -> None:
    found = ladder(
        arm=[{**FP8_ARM, "seeds": 5}, {**OTHER, "seeds": 3}, {**OTHER, "name": "c", "seed_offset": 9}]
    )
    assert [found.repetitions(arm) for arm in found.arm] == [5, 3, 1]
    assert [found.repetitions(arm, 2) for arm in found.arm] == [2, 2, 1]


BASE = """
title = "base"
description = "all"
train = { preset = "tiny", run.steps = 10 }
arm = [
    { name = "fp8", label = "FP8", seeds = 5, recipe.all.format = "fp8" },
    { name = "again", label = "FP8", seed_offset = 9, recipe.all.format = "fp8" },
    { name = "bf16", label = "BF16", seeds = 5, recipe.all.format = "bf16" },
    { name = "h16", label = "H16", seeds = 3, recipe.all.hadamard = 16 },
]
contrast = [
    { name = "a", arm = "h16", against = "fp8", question = "?" },
    { name = "b", arm = "h16", against = "bf16", question = "?" },
]
"""


def test_a_ladder_takes_arms_of_another_and_their_contrasts(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    head = 'title = "larger"\nextends = "base.toml"\nseeds = 2\n'
    own = '[[arm]]\nname = "new"\nlabel = "n"\n[[contrast]]\nname = "c"\narm = "new"\nagainst = "h16"\nquestion = "?"\n'
    (tmp_path / "l.toml").write_text(
        f'{head}arms = ["h16", "fp8", "again"]\n[train]\npreset = "demo"\n[target]\nhigh_precision = ""\n{own}'
    )
    found = load_ladder(tmp_path / "l.toml")
    assert (found.title, found.description) == ("larger", "all")
    assert (found.train.preset, found.train.run) == ("demo", {"steps": 10})
    assert [(arm.name, arm.seeds) for arm in found.arm] == [("fp8", 2), ("again", 1), ("h16", 2), ("new", 1)]
    assert [contrast.name for contrast in found.contrast] == ["a", "c"]
    base = load_ladder(tmp_path / "base.toml")
    assert found.resolve(found.named("h16")) == base.resolve(base.named("h16"))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            'extends = "base.toml"\narms = ["h61"]',
            r"l.toml: arms: 'h61' is no arm of base.toml.*did you mean 'h16'",
        ),
        ('extends = "basis.toml"', "cannot read .*basis.toml"),
        ('extends = "l.toml"', "l.toml extends another ladder itself"),
        ('extends = "base.toml"\nseeds = "many"', "l.toml.seeds: expected int, got 'many'"),
        ('title = "x"\narms = ["h16"]', "l.toml: unknown key 'arms'"),
    ],
)
def test_errors_of_a_ladder_that_extends_another(tmp_path: Path, head: str, message: str) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "l.toml").write_text(head)
    with pytest.raises((RecipeError, ConfigError, FileFormatError), match=message):
        load_ladder(tmp_path / "l.toml")


def test_unknown_ladder_and_arm_name_the_nearest() -> None:
    with pytest.raises(FileFormatError, match="no ladder is named 'papper'.*did you mean 'paper'"):
        load_ladder("papper")
    with pytest.raises(ConfigError, match="no arm is named 'h61'.*did you mean 'h16'"):
        ladder().select(["h61"])
