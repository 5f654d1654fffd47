"""An optimizer step as training runs it, timed by phase and by kind of work, for benchmarks of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

import mxref
import mxref_torch
from bench.peers import make_linear
from mxref_torch import CapturedStep, StepContext
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.operators import blocks, dense
from mxref_training.config import Compile, TrainConfig
from mxref_training.config_files import load_config
from mxref_training.errors import DivergedError
from mxref_training.evaluate import cross_entropy
from mxref_training.model.llama import Llama
from mxref_training.model.loss import compiled_loss
from mxref_training.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate

PHASES = ("forward", "backward", "optimizer")
TIMED = {"quantize": ("quantize", "prepare"), "gemm": ("scaled_gemm", "dense_gemm")}
"""Operators of the parts of a step. `quantize` is all that makes an operand of a GEMM in MXFP4 or FP8, layouts too."""
PARTS = tuple(TIMED)

Function = Callable[..., Any]

_WIDE = {"width": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "layers": 4}
_RATE = {"lr": 3e-4, "warmup": 128}
_LLAMA = {
    "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "layers": 16, "vocab": 4096, "max_seq": 2048,
}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("demo", {"model": _WIDE}),
    "llama-1b": (
        "tiny",
        {
            "model": _LLAMA,
            "optim": _RATE,
            "run": {"seq_len": 2048, "batch": 8, "micro_batch": 8, "eval_tokens": 2048},
        },
    ),
    "llama-50m": (
        "tiny",
        {
            "model": _WIDE | {"layers": 16, "vocab": 4096, "max_seq": 1024},
            "optim": _RATE,
            "run": {"seq_len": 1024, "batch": 16, "micro_batch": 16, "eval_tokens": 1024},
        },
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
    found = [
        (dense if name == "dense_gemm" else blocks, name, part)
        for part, names in TIMED.items()
        for name in names
    ]
    places: list[tuple[Any, str, str]] = [*found, (Fp8Scales, "quantize", "quantize")]
    plain = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), function in zip(places, plain, strict=True):
        setattr(owner, name, timed(part, function))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, plain, strict=True):
            setattr(owner, name, function)


class Mode(StrEnum):
    """How a step is run."""

    EAGER = "eager"
    COMPILED = "compiled"
    """Each block by `torch.compile`."""
    WHOLE = "whole"
    """The whole model by `torch.compile`."""
    CAPTURED = "captured"
    """Each block by `torch.compile`, and the whole step as one CUDA graph."""
    CAPTURED_WHOLE = "captured-whole"
    """The whole model by `torch.compile`, and the whole step as one CUDA graph."""
    CAPTURED_EAGER = "captured-eager"
    """The whole step as one CUDA graph of what eager mode runs."""


class Steps:
    """The optimizer steps of a model under a recipe, or of a peer's model, on tokens drawn at random."""

    def __init__(
        self,
        model: Llama,
        recipe: mxref.Recipe | str,
        config: TrainConfig,
        backend: mxref.Backend,
        mode: Mode = Mode.EAGER,
    ) -> None:
        """Convert the model, which another recipe may have had before; the name of a peer in place of a recipe."""
        self.model, self.recipe, self.config, self.backend, self.mode = model, recipe, config, backend, mode
        self.device = next(model.parameters()).device
        self.context = StepContext(backend, config.run.seed)
        make_linear(model, recipe if isinstance(recipe, str) else "")
        if not isinstance(recipe, str):
            self.context = mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed).context
        by = {Mode.WHOLE: Compile.MODEL, Mode.CAPTURED_WHOLE: Compile.MODEL}
        by |= {Mode.COMPILED: Compile.BLOCK, Mode.CAPTURED: Compile.BLOCK}
        torch._dynamo.reset()
        for block in model.model.layers:
            block._compiled_call_impl = None
        model.zero_grad(set_to_none=True)  # what another recipe's graph has left
        compiled = compiled_loss(model, by.get(mode, Compile.NONE))
        self.loss: Callable[..., torch.Tensor] = compiled or self._eager_loss
        self.optimizer = make_optimizer(model, config.optim)
        self.captured: CapturedStep | None = None
        if mode in (Mode.CAPTURED, Mode.CAPTURED_WHOLE, Mode.CAPTURED_EAGER):
            self.captured = CapturedStep(
                model, self.context, lambda _, *batch: self.loss(*batch), self.optimizer, tokens=config.run.step_tokens,
                micro_batches=config.run.micro_batches, clip=config.optim.clip,
            )  # fmt: skip
        self.saved_bytes = 0
        """What a forward pass leaves on the device for the backward pass: activations, and the loss."""
        self.checked = torch.zeros(1)
        """The losses and the norm of the last step."""
        self.generator = torch.Generator().manual_seed(0)
        self.number = 0
        self.repeated = 0
        """Steps that training would have done over, because they left the range of the backend's fast GEMM."""

    def _set_rate(self) -> None:
        """Warm up as training does: at a full rate the first steps would leave weights and gradients of no real run."""
        run = self.config.run
        set_learning_rate(self.optimizer, learning_rate(self.config.optim, self.number, run.steps))

    def take(self, enter: Callable[[str], None], reads: bool = True) -> None:
        """Take a step, calling `enter` with the name of each phase as it begins and with `""` after the last.

        It asks of the GPU what training asks in each step: losses, the norm, and whether a range was left. Without
        `reads` it asks nothing, so that Python runs ahead of the GPU; `require_finite` asks later.

        Raises:
            DivergedError: a loss or the norm is not finite.
            LayerError: the GEMMs of the first step are not the recipe's.
        """
        run, vocab = self.config.run, self.config.model.vocab
        self._set_rate()
        tokens = torch.randint(vocab, (run.batch, run.seq_len + 1), generator=self.generator)
        if self.captured is not None:
            self._take_captured(self.captured, tokens)
            return
        tokens = tokens.to(self.device)
        self.context.step, self.context.global_tokens = self.number, run.step_tokens
        self.context.reset_census()
        losses: list[torch.Tensor] = []
        enter("forward")
        # Eager training holds the quantized weights of a step.
        with mxref_torch.weights_held(self.model) if self.mode is Mode.EAGER else nullcontext():
            for number, part in enumerate(tokens.split(run.sequences)):
                if number:
                    enter("forward")
                self.context.token_origin = number * run.sequences * run.seq_len
                before = self._allocated()
                loss = self.loss(part[:, :-1], part[:, 1:]) / run.micro_batches
                self.saved_bytes = self._allocated() - before
                losses.append(loss.detach())
                if reads:
                    loss.item()
                enter("backward")
                loss.backward()  # type: ignore[no-untyped-call]
        if not self.number and not isinstance(self.recipe, str):
            mxref_torch.check_census(self.context, self.model, self.recipe, run.micro_batches)
        enter("optimizer")
        norm = clip_gradients(self.model.parameters(), self.config.optim.clip)
        self.checked = torch.stack([*losses, norm])
        if reads:
            self.repeated += self.backend.range_exceeded()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mxref_torch.advance(self.model)
        enter("")
        if reads:
            self.require_finite()
        self.number += 1

    def require_finite(self) -> None:
        """Raise DivergedError if a loss or the norm of the last step is not finite."""
        *losses, norm = self.checked.tolist()
        if not math.isfinite(sum(losses) + norm):
            raise DivergedError(
                f"step {self.number}: loss {sum(losses)}, gradient norm {norm}; lower optim.lr"
            )

    def _take_captured(self, take: CapturedStep, tokens: torch.Tensor) -> None:
        """Start a step, and look at the outcome of the one before it, as a loop would."""
        self.context.reset_census()
        outcome = take(tokens[:, :-1], tokens[:, 1:], step=self.number)
        if not self.number and not isinstance(self.recipe, str):
            mxref_torch.check_census(self.context, self.model, self.recipe, self.config.run.micro_batches)
        self.number += 1
        if outcome is not None:
            self.repeated += outcome.widened
            if not outcome.updated:
                raise DivergedError(
                    f"step {outcome.step}: loss {outcome.loss}, gradient norm {outcome.norm}; lower optim.lr"
                )

    def held_bytes(self) -> int:
        """Return the bytes of weights, moments and gradients, which take the same under every recipe."""
        tensors = [p for p in self.model.parameters() if p.requires_grad]
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in (*tensors, *tensors, *moments))

    def _eager_loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model(inputs), targets)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def with_run(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Return a configuration with other settings of its run; settings that are None stay."""
    return replace(config, run=replace(config.run, **{k: v for k, v in changes.items() if v is not None}))
