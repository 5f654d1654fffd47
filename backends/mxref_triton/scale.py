"""Shared scales: amax over a unit's own elements, and E8M0 codes from its bits."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref.scale import INFINITY_BITS, MANTISSA_MASK, ScaleRule
from mxref_triton.registers import bits_of, float_of

CARRIES = {
    ScaleRule.FLOOR: 0,
    ScaleRule.CEIL: MANTISSA_MASK,
    ScaleRule.RCEIL: MANTISSA_MASK - 0x400000,
    ScaleRule.EVEN: MANTISSA_MASK - 0x5FFFFF,
}
"""What is added to amax's bits so that a mantissa above the rule's bound carries into the exponent."""

_INFINITY = tl.constexpr(INFINITY_BITS)
_NAN_CODE = tl.constexpr(255)


@triton.jit
def amax_of(values, START: tl.constexpr, COUNT: tl.constexpr):
    """Return the largest magnitude of COUNT elements of a tuple from START, float32 [B]; NaN if there is one."""
    if COUNT == 1:
        return tl.abs(values[START])
    else:
        low = amax_of(values, START, COUNT // 2)
        high = amax_of(values, START + COUNT // 2, COUNT // 2)
        return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over_tile(amax_bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest of every 32 rows; units lie row-major in ROWS x COLUMNS, uint32 [B]."""
    tiles = tl.reshape(amax_bits, [ROWS // 32, 32, COLUMNS])
    top = tl.max(tiles, axis=1)[:, None, :]
    return tl.reshape(tl.broadcast_to(top, [ROWS // 32, 32, COLUMNS]), [ROWS * COLUMNS])


@triton.jit
def scale_code(amax_bits, carry: tl.constexpr):
    """Return E8M0 codes 0 to 253 from finite amax bits, int32 [B]."""
    return tl.maximum(((amax_bits + carry) >> 23).to(tl.int32) - 2, 0)


@triton.jit
def inverse_scale(code):
    """Return 2^(127 - code) for codes 0 to 253, float32: a normal number."""
    return float_of((254 - code).to(tl.uint32) << 23)


@triton.jit
def stored_code(code, amax_bits, ZERO: tl.constexpr):
    """Return the byte to store, by the policies for all-zero and for nonfinite blocks, uint8 [B]."""
    if ZERO:
        code = tl.where(amax_bits == 0, ZERO, code)
    return tl.where(amax_bits >= _INFINITY, _NAN_CODE, code).to(tl.uint8)


@triton.jit
def is_finite(amax_bits):
    """Return whether a block has neither NaN nor Inf, from its amax bits."""
    return amax_bits < _INFINITY


@triton.jit
def amax_bits_of(values, START: tl.constexpr, norm: tl.constexpr):
    """Return the bits of the amax of the block of 32 elements from START, times `norm`, uint32 [B]."""
    amax = amax_of(values, START, 32)
    if norm != 1.0:
        amax = amax * norm
    return bits_of(amax) & 0x7FFFFFFF
