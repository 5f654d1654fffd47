"""Blocks along the tokens that would lie in two micro-batches or on two ranks are refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from mxref.cli import main
from mxref.discovery import get_backend
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref_training.config import Axes
from mxref_training.config_files import load_config
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from mxref_training.preflight import converted_shape, preflight
from training_setup import SR, change, run

TWO = Ranks(0, 2, 0, 2)
SR_H64 = recipe_from_table({"dialect": "amd", "all": {"rounding": "sr", "hadamard": 64}})
TILES = recipe_from_table({"dialect": "amd", "all": {"block": "32x32"}})


def settings(batch: int, micro_batch: int, length: int) -> list[str]:
    sizes = {"batch": batch, "micro_batch": micro_batch, "seq_len": length, "eval_tokens": 64}
    return [f"run.{key}={value}" for key, value in sizes.items()]


@pytest.mark.parametrize(
    ("recipe", "sizes", "ranks", "message"),
    [
        (SR, (2, 2, 24), TWO, "1 sequence on a rank has 24 tokens, not a multiple of 32, but under stochastic"),
        (SR, (2, 1, 24), SOLE, "take a multiple of 32 for run.seq_len, or 4 sequences or a multiple of them"),
        (SR, (4, 2, 24), SOLE, "2 sequences on a rank has 48 tokens.* multiple of 16 for run.seq_len, or 4 sequences"),
        (SR_H64, (4, 2, 32), TWO, "32 tokens, not a multiple of 64.* blocks of 32 and Hadamard groups of 64"),
        (TILES, (4, 4, 24), SOLE, "forward pass of 2 sequences .* tiles of 32 x 32 elements.*run.eval_tokens"),
        (TILES, (2, 2, 24), SOLE, "48 tokens, not a multiple of 32, but fprop reads tiles of 32 x 32 elements"),
    ],
)  # fmt: skip
def test_what_would_straddle_is_refused(
    recipe: Recipe, sizes: tuple[int, int, int], ranks: Ranks, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load_config("tiny", settings(*sizes)), recipe, get_backend("reference"), ranks=ranks)


@pytest.mark.parametrize(
    ("recipe", "sizes", "axes"),
    [
        (SR, (1, 1, 24), Axes(1, 1, 1)),  # the end of the step alone is filled up
        (SR, (2, 2, 24), Axes(1, 1, 2)),  # both ranks have all tokens
        (SR, (8, 8, 24), Axes(1, 2, 1)),  # 96 tokens each
        (recipe_from_table({"dialect": "amd"}), (2, 1, 24), Axes(1, 1, 1)),  # nothing is drawn
    ],
)
def test_what_fits_is_taken(recipe: Recipe, sizes: tuple[int, int, int], axes: Axes) -> None:
    config = load_config("tiny", settings(*sizes))
    assert converted_shape(config, recipe, get_backend("reference"), axes).config == config.model


def test_the_loop_refuses_it_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a multiple of 32"):
        run(tmp_path / "run", SR, change(seq_len=24, batch=2, micro_batch=1))
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "run", SR, change(seq_len=24, batch=1, micro_batch=1, steps=1)).tokens == 24


@pytest.mark.parametrize("more", [["--dry-run", "--ranks", "2"], ["--dry-run"], []])
def test_the_command_refuses_it_before_it_reads_data(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(config: Any) -> Any:
        raise AssertionError("the corpus was built")

    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sr.toml").write_text('dialect = "amd"\nall.rounding = "sr"\n')
    words = [word for size in settings(4, 2, 24) for word in ("--set", size)]
    found = CliRunner().invoke(
        main, ["train", "tiny", "--recipe", "sr.toml", "--backend", "reference", *words, *more]
    )
    assert found.exit_code == 2, found.output
    assert "run.seq_len = 24" in found.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["sr.toml"]
