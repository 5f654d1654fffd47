"""Runs to export, and what their folders hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from mxref.cli import main
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import ModelConfig, RopeScaling, TrainConfig
from mxref_training.model.llama import Llama
from training_setup import CONFIG, VOCAB, change, newest, run

SCALED = ModelConfig(
    layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=VOCAB, max_seq=32, init_std=0.08, rope_theta=1000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
)  # fmt: skip
TIED = replace(SCALED, rope_scaling=None, tie_embeddings=True, layers=1)


def short(model: ModelConfig, **fields: Any) -> TrainConfig:
    """A run of two steps."""
    return replace(change(CONFIG, **{"steps": 2, "batch": 2, "micro_batch": 0, **fields}), model=model)


def trained(out: Path, model: ModelConfig = SCALED, recipe: str = "mxfp4", **options: Any) -> Path:
    run(out, recipe, short(model), **options)
    return out


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def exported(source: Path, out: Path, *options: object) -> Path:
    result = invoke("export", source, out, "--no-tokenizer", *options)
    assert result.exit_code == 0, result.output
    return out


def refused(*arguments: object) -> str:
    """The one line of an error of `mxref export`."""
    result = invoke("export", *arguments)
    assert result.exit_code == 2, result.output
    *_, line = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def weights(run: Path) -> dict[str, Tensor]:
    """The weights of a run's newest checkpoint."""
    return CheckpointStore(run / "checkpoints", 1).load(newest(run), ["model"]).tensors["model"]


def ours(run: Path, model: ModelConfig) -> Llama:
    """The run's model in float32."""
    found = Llama(model, compute_dtype=torch.float32)
    found.load_state_dict(weights(run), strict=False)
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}
