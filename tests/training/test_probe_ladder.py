"""The recipes of a probe, and the probe at the end of a ladder."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from data_files import make_texts, write
from mxref.cli import main
from mxref_training.lab.ladder import load_ladder, shipped
from mxref_training.probe.arms import chosen_arms
from mxref_training.probe.results import load

pytestmark = pytest.mark.usefixtures("warm_children")


def test_without_a_choice_all_shipped_recipes_are_probed() -> None:
    names = [arm.name for arm in chosen_arms([], {})]
    assert names[0] == "bf16"
    assert len(names) == len(set(names))
    assert {"fp8", "mxfp4", "mxfp4_h16", "tseng"} <= set(names)


def test_a_ladder_gives_each_of_its_recipes_once() -> None:
    arms = chosen_arms(["mxfp4_h16"], {"paper": load_ladder("paper")})
    digests = [arm.recipe.digest for arm in arms]
    assert len(digests) == len(set(digests))
    assert [arm.name for arm in arms].count("bf16") == 1
    assert "fp8-seed2" not in {arm.name for arm in arms}
    labels = [arm.label for arm in arms]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_ladder_can_be_probed(name: str) -> None:
    arms = chosen_arms([], {name: load_ladder(name)})
    assert len({arm.name for arm in arms}) == len({arm.label for arm in arms}) == len(arms) > 3


def test_equal_names_of_two_sources_are_told_apart(tmp_path: Path) -> None:
    own = tmp_path / "other.toml"
    own.write_text(
        'title = "t"\ntrain.preset = "tiny"\ntarget.high_precision = ""\n'
        '[[arm]]\nname = "fp8"\nlabel = "FP8"\nrecipe.all = { format = "fp8" }\n'
        '[[arm]]\nname = "all"\nlabel = "own"\nrecipe.all = { format = "mxfp4", rounding = "rtz" }\n'
    )
    names = [arm.name for arm in chosen_arms([], {"paper": load_ladder("paper"), "other": load_ladder(own)})]
    assert {"all", "other/all"} <= set(names)


LADDER = """
title = "two arms"
[train]
preset = "tiny"
optim.schedule = "constant"
model = { layers = 1, width = 64, heads = 2, ffn = 64, vocab = 384, max_seq = 32 }
run = { steps = 4, batch = 2, micro_batch = 2, seq_len = 32, eval_every = 1, eval_tokens = 64, threads = 1 }
[recipe]
all.format = "fp8"
[target]
high_precision = ""
[[arm]]
name = "fp8"
label = "FP8"
[[arm]]
name = "all"
label = "MXFP4"
recipe.all.format = "mxfp4"
[[arm]]
name = "h16"
label = "MXFP4 with H16"
recipe.all = { format = "mxfp4", hadamard = 16 }
"""


def test_a_ladder_ends_with_the_probe_of_its_reference_unless_it_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ladder, out = tmp_path / "two.toml", tmp_path / "out"
    ladder.write_text(LADDER)
    data = (
        write(tmp_path / "train.jsonl", make_texts(60)),
        write(tmp_path / "val.jsonl", make_texts(6, seed=1)),
    )
    given = ["ablate", str(ladder), "--out", str(out), "--backend", "reference", "--set", "last.probe=true"]
    given += ["--set", f"data.train={data[0]}", "--set", f"data.val={data[1]}"]

    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    assert "In dW, against MXFP4 (" in done.output
    assert [recipe["name"] for recipe in load(out)["recipes"]] == ["bf16", "fp8", "all", "h16"]
    for name in ("report.html", "report.md"):
        text = (out / name).read_text(encoding="utf-8")
        assert "One step without training noise" in text
        assert "In dW, against MXFP4 (" in text
        assert text.count("MXFP4 with H16") >= 3
        assert text.index("In dW, against") < text.index("Noise unknown")
    for name in ("probe.html", "probe.csv"):
        assert (out / name).exists()


def test_a_ladder_whose_reference_loses_its_checkpoint_is_refused(tmp_path: Path) -> None:
    ladder = tmp_path / "two.toml"
    ladder.write_text(LADDER)
    done = CliRunner().invoke(
        main, ["ablate", str(ladder), "--set", "last.probe=true", "--set", 'last.keep=["all"]']
    )
    assert done.exit_code == 2
    assert "last.probe reads the checkpoint of fp8, which last.keep deletes" in done.output
