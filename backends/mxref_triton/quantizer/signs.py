"""Signs of transforms that are too long for a thread, as a vector that kernels write, so that graphs can capture it."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref_triton.lane.random import philox
from mxref_triton.launch import launch, signed_word

_WORDS = 8
"""Words of the signs of the longest transform."""


@triton.jit
def _store_signs(out, i, word):
    minus = (word >> (i % 32).to(tl.uint32)) & 1
    tl.store(out + i, 1.0 - 2.0 * minus.to(tl.float32))


@triton.jit(do_not_specialize=["w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"])
def _given_signs(out, w0, w1, w2, w3, w4, w5, w6, w7, N: tl.constexpr):
    """Write N signs, +1 or -1, whose bits are in words."""
    i = tl.arange(0, N)
    which = i // 32
    low = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    high = tl.where(which < 6, tl.where(which == 4, w4, w5), tl.where(which == 6, w6, w7))
    _store_signs(out, i, tl.where(which < 4, low, high).to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream_low"])
def _drawn_signs(out, step, seed_low, seed_high, stream_low, N: tl.constexpr):
    """Write N signs, +1 or -1, drawn at the step in memory."""
    i = tl.arange(0, N)
    group = (i // 128).to(tl.int64)
    w0, w1, w2, w3 = philox(group, seed_low, seed_high, stream_low, tl.load(step).to(tl.int32))
    which = i // 32 % 4
    _store_signs(out, i, tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3)))


def given_signs(rotation: Rotation, device: torch.device) -> torch.Tensor:
    """Return the signs of a rotation, +1 and -1, float32 [n]."""
    out = torch.empty(rotation.n, dtype=torch.float32, device=device)
    words = (signed_word(rotation.signs >> 32 * i) for i in range(_WORDS))
    launch(_given_signs, (1,), out, *words, N=rotation.n)
    return out


def drawn_signs(n: int, stream: Stream, step: torch.Tensor) -> torch.Tensor:
    """Return n signs of a stream at the step that a tensor on the device holds, float32 [n]."""
    out = torch.empty(n, dtype=torch.float32, device=step.device)
    words = (signed_word(word) for word in (stream.seed, stream.seed >> 32, stream.word))
    launch(_drawn_signs, (1,), out, step, *words, N=n)
    return out
