"""An optimizer step as training runs it, timed by phase and by kind of work, for benchmarks of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import mxref
import mxref_torch
from mxref_torch import operators
from mxref_torch.fp8 import Fp8Scales
from mxref_training.config import TrainConfig, load_config
from mxref_training.errors import DivergedError
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import cross_entropy
from mxref_training.run.optim import clip_gradients, make_optimizer

PHASES = ("forward", "backward", "optimizer")
TIMED = {"quantize": ("quantize", "quantize_dual", "prepare"), "gemm": ("scaled_gemm", "dense_gemm")}
"""Operators of the parts of a step. `quantize` is all that makes an operand of a GEMM in MXFP4 or FP8, layouts too."""
PARTS = tuple(TIMED)

Function = Callable[..., Any]

_WIDE = {"width": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "layers": 4}
_LLAMA = {
    "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "layers": 16, "vocab": 4096, "max_seq": 2048,
}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("demo", {"model": _WIDE}),
    "llama-1b": (
        "tiny",
        {"model": _LLAMA, "run": {"seq_len": 2048, "batch": 8, "micro_batch": 8, "eval_tokens": 2048}},
    ),
    "llama-8b-slice": (
        "llama31_8b",
        {
            "model": {"layers": 4, "vocab": 4096},
            "run": {"seq_len": 2048, "batch": 8, "micro_batch": 8, "eval_tokens": 2048},
        },
    ),
}
"""Models that are no preset: the preset that they change, and how."""


def config_of(name: str) -> TrainConfig:
    """Return a preset, or one that `SIZES` makes: `wide` is the demo's steps with a model four times as wide."""
    preset, *changes = SIZES.get(name, (name,))
    return load_config(preset, changes)


@contextmanager
def timed_parts(timed: Callable[[str, Function], Function]) -> Iterator[None]:
    """Within the block, training finds `timed(part, function)` where it looks up what makes a part of its time."""
    found = [(operators, name, part) for part, names in TIMED.items() for name in names]
    places: list[tuple[Any, str, str]] = [*found, (Fp8Scales, "quantize", "quantize")]
    plain = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), function in zip(places, plain, strict=True):
        setattr(owner, name, timed(part, function))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, plain, strict=True):
            setattr(owner, name, function)


class Steps:
    """The optimizer steps of a model under a recipe, on tokens drawn at random."""

    def __init__(
        self, model: Llama, recipe: mxref.Recipe, config: TrainConfig, backend: mxref.Backend
    ) -> None:
        """Convert the model, which another recipe may have had before."""
        self.model, self.recipe, self.config, self.backend = model, recipe, config, backend
        self.device = next(model.parameters()).device
        self.context = mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed)
        self.optimizer = make_optimizer(model, config.optim)
        self.generator = torch.Generator().manual_seed(0)
        self.number = 0
        self.repeated = 0
        """Steps that training would have done over, because they left the range of the backend's fast GEMM."""

    def take(self, enter: Callable[[str], None]) -> None:
        """Take a step, calling `enter` with the name of each phase as it begins and with `""` after the last.

        It asks of the GPU what training asks in each step: losses, the norm, and whether a range was left.

        Raises:
            DivergedError: a loss or the norm is not finite.
            LayerError: the GEMMs of the first step are not the recipe's.
        """
        run, vocab = self.config.run, self.config.model.vocab
        tokens = torch.randint(vocab, (run.batch, run.seq_len + 1), generator=self.generator).to(self.device)
        self.context.step, self.context.global_tokens = self.number, run.step_tokens
        self.context.reset_census()
        total = 0.0
        for number, part in enumerate(tokens.split(run.sequences)):
            enter("forward")
            self.context.token_origin = number * run.sequences * run.seq_len
            loss = cross_entropy(self.model(part[:, :-1]), part[:, 1:]) / run.micro_batches
            total += loss.item()
            enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
        if not self.number:
            mxref_torch.check_census(self.context, self.model, self.recipe, run.micro_batches)
        enter("optimizer")
        norm = float(clip_gradients(self.model.parameters(), self.config.optim.clip))
        self.repeated += self.backend.range_exceeded()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mxref_torch.advance(self.model)
        enter("")
        if not math.isfinite(total + norm):
            raise DivergedError(f"step {self.number}: loss {total}, gradient norm {norm}; lower optim.lr")
        self.number += 1


def with_run(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Return a configuration with other settings of its run; settings that are None stay."""
    return replace(config, run=replace(config.run, **{k: v for k, v in changes.items() if v is not None}))
