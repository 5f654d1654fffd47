"""Before a run reads data, it is checked that the device exists and that the memory suffices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from mxref.cli import main
from mxref.discovery import get_backend
from mxref.errors import MxrefError
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_training import device
from mxref_training.config import Compile, TrainConfig
from mxref_training.config_files import load_config
from mxref_training.device import memory_limit
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.failures import known_errors
from mxref_training.forecast import less_memory, memory, require_memory
from mxref_training.model.llama import Llama
from mxref_training.preflight import preflight
from training_setup import run

HALVES = {"format": "mxfp4", "hadamard": 64}

CPU = torch.device("cpu")
RECIPE = load_recipe("mxfp4")


@pytest.fixture(autouse=True)
def no_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(config: TrainConfig) -> Any:
        raise AssertionError("the corpus was built")

    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", made)


def command(*args: str) -> Result:
    return CliRunner().invoke(main, [*args, "--backend", "reference"])


@pytest.mark.parametrize("args", [("train", "tiny"), ("ablate", "paper"), ("ablate", "paper", "--jobs", "2")])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.device=cuda", "run.device = 'cuda', but backend 'reference' computes on cpu"),
        ("run.device=x", "run.device = 'x' is no device"),
        ("model.vocab=16000000", "a vocabulary of 16,000,000"),
        ("model.layers=256", "lower model.layers"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_its_corpus_is_built(
    args: tuple[str, ...], setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mxref_training.preflight.memory_limit", lambda _: 10**8)
    found = command(*args, "--set", setting, *(["--seeds", "2"] if args[0] == "ablate" else []))
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code == 2
    assert message in found.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="File name too long; .*choose another --out"):
        run(tmp_path / ("x" * 5000))


def test_from_python_too(tmp_path: Path) -> None:
    config = load_config("tiny", ["run.device=cuda"])
    with pytest.raises(ConfigError, match="computes on cpu"):
        run(tmp_path / "run", config=config, corpus=None)
    assert preflight(load_config("tiny"), RECIPE, get_backend("reference")) == CPU


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        (["model.vocab=16000000"], "lower model.layers, model.width, model.ffn or model.vocab"),
        (
            ["run.batch=100000", "run.micro_batch=0"],
            "set run.recompute = 'full', lower run.micro_batch, or take",
        ),
        (["run.batch=10000000", "run.micro_batch=1"], "lower run.batch or model.max_seq"),
        (["model.max_seq=16000000"], "lower run.batch or model.max_seq"),
    ],
)
def test_the_message_says_what_to_lower(settings: list[str], way_out: str) -> None:
    config = load_config("tiny", settings)
    need = memory(config, RECIPE).total
    require_memory(config, RECIPE, need)
    with pytest.raises(ConfigError, match=f"the run needs about .*B of memory and there are .*; {way_out}"):
        require_memory(config, RECIPE, 10**9)
    with pytest.raises(ConfigError, match=f"2 runs at a time need about .*; {way_out}"):
        require_memory(config, RECIPE, 10**9, runs=2)


def test_the_exact_parts_are_those_of_the_model() -> None:
    config = load_config("tiny")
    model, need = Llama(config.model), memory(config, RECIPE)
    assert need.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    rotary = sum(b.numel() * b.element_size() for b in model.model.rotary_emb.buffers())
    assert need.tables == rotary + 2 * 8 * config.run.batch * config.run.seq_len


def test_the_lowest_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    v2, v1 = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(device, "CGROUP_LIMITS", (v2, v1))
    whole = memory_limit(CPU)
    assert whole > 2**28
    v2.write_text("max\n")
    assert memory_limit(CPU) == whole
    v1.write_text("268435456\n")
    assert memory_limit(CPU) == 2**28
    monkeypatch.setattr(device.resource, "getrlimit", lambda _: (2**27, 2**30))
    assert memory_limit(CPU) == 2**27


@pytest.mark.parametrize(
    ("settings", "offer"),
    [
        ([], "set run.recompute = 'full', lower run.micro_batch, or take"),
        (["run.recompute=selective"], "set run.recompute = 'full', lower run.micro_batch, or take"),
        (["run.recompute=full"], "lower run.micro_batch, or take"),
        (["run.capture=true"], "set run.recompute = 'full' and run.capture = false, lower run.micro_batch"),
        (["run.compile=model"], "set run.recompute = 'full' and run.compile = 'block', lower"),
        (
            ["run.compile=model", "run.capture=true", "run.micro_batch=1"],
            "set run.recompute = 'full' and run.capture = false and run.compile = 'block', lower run.seq_len",
        ),
    ],
)
def test_what_is_offered_where_memory_runs_out_fits_the_other_settings(
    settings: list[str], offer: str
) -> None:
    settings = ["run.compile=none", "run.capture=false", *settings]
    text = less_memory(load_config("tiny", settings))
    assert text.startswith(offer)
    load_config("tiny", [*settings, *re.findall(r"(run\.\w+ = [\w']+)", text)])


class OwnError(MxrefError, MemoryError):
    """A typed error that is a MemoryError too."""


def test_memory_that_runs_out_is_a_message() -> None:
    with (
        pytest.raises(ConfigError, match=r"out of memory \(.*DefaultCPUAllocator.*: lower it"),
        known_errors("lower it"),
    ):
        torch.empty(2**60)
    with pytest.raises(ConfigError, match="out of memory"), known_errors("lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")
    with pytest.raises(ConfigError, match=r"out of memory \(no more memory\)"), known_errors("lower it"):
        raise MemoryError
    for error in (RuntimeError("another"), OwnError("said already"), KeyError("x")):
        with pytest.raises(type(error)), known_errors("lower it"):
            raise error


def test_the_memory_of_saved_operands_has_the_scales_of_their_blocks() -> None:
    """An element of X takes 1/2 + 1/32, 1/2 + 1/16 and 1 + 1/32 bytes."""
    mxfp4, nvfp4, mxint8 = (
        memory(load_config("tiny"), recipe_from_table({"all": {"format": name}})).activations
        for name in ("mxfp4", "nvfp4", "mxint8")
    )
    assert nvfp4 > mxfp4
    assert 16 * (nvfp4 - mxfp4) == pytest.approx(mxint8 - mxfp4, rel=1e-3)


def test_dry_run_asks_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxref_training.preflight.memory_limit", lambda _: 1)
    found = command("train", "llama31_8b", "--dry-run")
    assert found.exit_code == 0, found.output
    assert "tables             12.6 MB" in found.output
    assert memory(load_config("llama31_8b"), RECIPE)._replace(tables=0).total > 2**30


def test_compiled_code_holds_logits_in_bf16_alone() -> None:
    config = load_config("lab_20m")
    logits = config.run.step_tokens * config.model.vocab
    assert memory(config, RECIPE).logits == 4 * logits
    eager = replace(config, run=replace(config.run, compile=Compile.NONE))
    assert memory(eager, RECIPE).logits == 14 * logits


@pytest.mark.parametrize(
    ("recipe", "layer"),
    [
        ({"all": {"format": "bf16"}, "schedule": [{"start": "50%", "recipe": {"all": HALVES}}]}, 0),
        (
            {"schedule": [{"start": 1, "recipe": {"layers": [{"blocks": "-1", "recipe": {"all": HALVES}}]}}]},
            1,
        ),
    ],
    ids=["phase", "layer of a phase"],
)
def test_widths_are_checked_for_later_phases_too(recipe: dict[str, Any], layer: int) -> None:
    """The first phase fits any width, or groups of 32."""
    config = load_config("tiny", ["model.width=96", "model.heads=3", "model.kv_heads=3", "model.ffn=96"])
    with pytest.raises(MxrefError, match=rf"layers\.{layer}\..*in_features = 96 is not a multiple of 64"):
        preflight(config, recipe_from_table(recipe), get_backend("reference"))
