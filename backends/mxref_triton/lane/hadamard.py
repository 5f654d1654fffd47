"""The Hadamard transform in a thread's registers: stages of sums and differences between tensors of a tuple."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of, float_of


@triton.jit
def flip_signs(values, signs_low, signs_high, COUNT: tl.constexpr, N: tl.constexpr):
    """Negate element i of every group of N <= 64 if bit i of the two words of signs is set."""
    out = ()
    for i in tl.static_range(COUNT):
        word = signs_low if i % N < 32 else signs_high
        flip = (word.to(tl.uint32, bitcast=True) >> (i % 32 % N)) << 31
        out = out + (float_of(bits_of(values[i]) ^ flip),)
    return out


@triton.jit
def butterflies(values, COUNT: tl.constexpr, N: tl.constexpr, H: tl.constexpr = 1):
    """Return the stages h = H, 2H, .. N / 2 done to COUNT values in groups of N, without the norm."""
    if H == N:
        return values
    else:
        out = ()
        for i in tl.static_range(COUNT):
            if i & H:
                out = out + (values[i - H] - values[i],)
            else:
                out = out + (values[i] + values[i + H],)
        return butterflies(out, COUNT, N, 2 * H)


@triton.jit
def multiplied(values, norm: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT values times a constant."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[i] * norm,)
    return out
