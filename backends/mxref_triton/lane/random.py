"""Philox4x32-10 for stochastic rounding: one call per 8 consecutive elements of a block, or per 4; and signs."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide_product(a, multiplier: tl.constexpr):
    # One wide multiplication instead of one for each half.
    product = a.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(group, seed_low, seed_high, stream_low, stream_high):
    """Return the four random words, each uint32 [B], of group indices [B] of type int64, uint64 or uint32."""
    c0 = group.to(tl.uint32)
    c1 = tl.zeros_like(c0)
    # From 2^63 on a number is uint64.
    if group.dtype != tl.uint32:
        c1 = (group >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream_low.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + stream_high.to(tl.uint32, bitcast=True)
    k0 = seed_low.to(tl.uint32, bitcast=True)
    k1 = seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        high0, low0 = _wide_product(c0, 0xD2511F53)
        high1, low1 = _wide_product(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def given(
    signs_low, signs_high, seed_low, seed_high, stream_low, stream_high, tensor, P: tl.constexpr
):  # fmt: skip
    """Return what the units of a program share, a tuple: the two words of signs, the key of Philox, four words, and the
    scale of the tensor, 1 if there is none.

    Args:
        signs_low: bits 0 to 31 of the signs; if P.drawn the low word of their stream.
        signs_high: bits 32 to 63.
        seed_low: low word of the seed.
        seed_high: its high word.
        stream_low: low word of the stream: layer and operand.
        stream_high: its high word, the step; if P.late an int64 pointer to it.
        tensor: float32 pointer to the scale of the tensor, read if P.tensor_scale and something is quantized.
        P: the treatment.
    """
    scale = tl.full([], 1.0, tl.float32)
    if P.tensor_scale and P.quantizes:
        scale = tl.load(tensor)
    if P.late:
        step = tl.load(stream_high).to(tl.int32)
        if P.drawn:
            words = philox(step.to(tl.int64) * 0, seed_low, seed_high, signs_low, step)
            signs_low = words[0].to(tl.int32, bitcast=True)
            signs_high = words[1].to(tl.int32, bitcast=True)
        return signs_low, signs_high, seed_low, seed_high, stream_low, step, scale
    else:
        return signs_low, signs_high, seed_low, seed_high, stream_low, stream_high, scale


@triton.jit
def first_call(row, unit, group, groups, P: tl.constexpr):
    """Return the numbers of the first Philox calls of units, int64 [B]; uint32 if P.narrow.

    Args:
        row: of the matrix, int64 [B].
        unit: of the row, int64 [B].
        group: number of the first call of row 0.
        groups: calls per row.
        P: the treatment.
    """
    if P.narrow:
        return row.to(tl.uint32) * groups.to(tl.uint32) + unit.to(tl.uint32) * P.calls + group.to(tl.uint32)
    else:
        return row * groups + unit * P.calls + group


@triton.jit
def random_fraction(words, i: tl.constexpr, BITS: tl.constexpr):
    """Return the integer r of element i of eight, in the top BITS of 22 bits, uint32 [B].

    `words` are those of one call for BITS <= 16, else of the two calls that the eight elements have.
    """
    mask: tl.constexpr = ((1 << BITS) - 1) << (22 - BITS)
    if BITS > 16:
        return (words[i] >> 10) & mask
    elif i % 2 == 0:
        return (words[i // 2] << 6) & mask
    else:
        return (words[i // 2] >> 10) & mask
