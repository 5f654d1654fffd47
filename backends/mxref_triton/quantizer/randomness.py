"""Which random bits an operand gets, as arguments of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxref.errors import UnsupportedError
from mxref.plan import QuantPlan
from mxref.steps.hadamard import Rotation
from mxref.steps.random import elements_per_call
from mxref_triton.launch import signed_word


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
