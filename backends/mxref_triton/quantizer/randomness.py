"""Which random bits an operand gets: the arguments of kernels, and the signs of transforms too long for a thread."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mxref.errors import UnsupportedError
from mxref.plan import QuantPlan
from mxref.steps.hadamard import Rotation
from mxref.steps.random import elements_per_call
from mxref_triton.lane.random import philox
from mxref_triton.launch import launch, signed_word


@dataclass(frozen=True)
class Randomness:
    """Arguments of kernels that say which signs and random integers an operand gets."""

    signs: tuple[int, int]
    """Bits 0 to 31 and 32 to 63 of the Hadamard signs, as int32; or the low word of their stream, and 0."""
    first: int
    """Number of the Philox call of the first element of the input."""
    groups: int
    """Philox calls per row of the global tensor."""
    key: tuple[int, int, int, Any]
    """Seed and stream, as int32; the last is the step, or the tensor on the device that holds it."""

    def from_row(self, row: int) -> tuple[Any, ...]:
        """Return the arguments for a kernel whose first row is `row`."""
        return (*self.signs, self.first + row * self.groups, self.groups, *self.key)


def randomness(plan: QuantPlan, rotation: Rotation | None) -> Randomness:
    """Return the random bits of a plan whose kernel does a rotation, or none."""
    drawn = plan.signs if rotation else None
    signs = drawn.word & 0xFFFFFFFF if drawn else rotation.signs if rotation else 0
    words = signed_word(signs), signed_word(signs >> 32)
    stream = plan.stream or drawn
    if stream is None:
        return Randomness(words, 0, 0, (0, 0, 0, 0))
    seed = signed_word(stream.seed), signed_word(stream.seed >> 32)
    step = signed_word(stream.word >> 32) if plan.step is None else plan.step
    key = (*seed, signed_word(stream.word), step)
    if plan.stream is None:
        return Randomness(words, 0, 0, key)
    per_call = elements_per_call(plan.spec.sr_bits)
    return Randomness(words, plan.first // per_call, plan.global_length // per_call, key)


def check_step(plan: QuantPlan, device: torch.device) -> None:
    """Raise UnsupportedError unless the step of a plan, if kernels read it, lies on the device of the input."""
    if plan.step is None:
        return
    found = plan.step.device if isinstance(plan.step, torch.Tensor) else "the host"
    if found != device:
        raise UnsupportedError(
            f"backend 'triton' reads placement.step where the input lies, got a step on {found} for an input on "
            f"{device}; move it: step.to({str(device)!r})"
        )


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream_low"])
def _draw_signs(out, step, seed_low, seed_high, stream_low, N: tl.constexpr):
    """Write N signs, +1 or -1."""
    i = tl.arange(0, N)
    group = (i // 128).to(tl.int64)
    w0, w1, w2, w3 = philox(group, seed_low, seed_high, stream_low, tl.load(step).to(tl.int32))
    which = i // 32 % 4
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    minus = (word >> (i % 32).to(tl.uint32)) & 1
    tl.store(out + i, 1.0 - 2.0 * minus.to(tl.float32))


def drawn_signs(plan: QuantPlan, n: int) -> torch.Tensor | None:
    """Return the signs that a plan leaves to the device, float32 [n]; None if it has drawn them, or has none."""
    if plan.signs is None:
        return None
    stream, step = plan.signs, plan.step
    out = torch.empty(n, dtype=torch.float32, device=step.device)
    words = (signed_word(word) for word in (stream.seed, stream.seed >> 32, stream.word))
    launch(_draw_signs, (1,), out, step, *words, N=n)
    return out
