"""The shared scale of a block: amax, and the scale rule as one addition to its bits.

`carry` of `scale_code` is the rule: `Treatment.carry` in `treatment` says how it is made from the rule's bound.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref.steps.scale import INFINITY_BITS
from mxref_triton.lane.registers import bits_of, float_of

_INFINITY = tl.constexpr(INFINITY_BITS)
_NAN_CODE = tl.constexpr(255)


@triton.jit
def amax_of(values):
    """Return the largest magnitude of a tuple of elements, float32 [B]; NaN if there is one."""
    HALF: tl.constexpr = len(values) // 2
    if HALF == 0:
        return tl.abs(values[0])
    else:
        low = amax_of(values[:HALF])
        high = amax_of(values[HALF:])
        return tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over_square(amax_bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest of every 32 rows; units lie row-major in ROWS x COLUMNS, uint32 [B]."""
    tiles = tl.reshape(amax_bits, [ROWS // 32, 32, COLUMNS])
    top = tl.max(tiles, axis=1)[:, None, :]
    return tl.reshape(tl.broadcast_to(top, [ROWS // 32, 32, COLUMNS]), [ROWS * COLUMNS])


@triton.jit
def scale_code(amax_bits, carry: tl.constexpr, top: tl.constexpr):
    """Return E8M0 codes 0 to 254 from finite amax bits, int32 [B]; `top` is the exponent of the largest element.

    From a top of 2 on, the largest code is 253.
    """
    code = tl.maximum(((amax_bits + carry) >> 23).to(tl.int32) - top, 0)
    if top < 1:
        code = tl.minimum(code, 254)
        if carry == 1 << 23:  # the rule >=1 goes up at every mantissa, and zeros have none
            code = tl.where(amax_bits == 0, 0, code)
    return code


@triton.jit
def inverse_scale(code, top: tl.constexpr):
    """Return 2^(127 - code) for codes that `scale_code` returns, float32: a normal number but for 254."""
    bits = (254 - code).to(tl.uint32) << 23
    if top < 2:
        bits = tl.where(code == 254, 0x00400000, bits).to(tl.uint32)
    return float_of(bits)


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
def amax_bits_of(values):
    """Return the bits of the amax of a tuple of elements, uint32 [B]."""
    return bits_of(amax_of(values)) & 0x7FFFFFFF


@triton.jit
def scaling(amax_bits, P: tl.constexpr):
    """Return the factor of a block, the mask of its codes, and its scale byte.

    Args:
        amax_bits: bits of its amax but for a Hadamard norm that was not applied yet, uint32 [B].
        P: the treatment.

    Returns:
        2^-e, times that norm, float32 [B]; all bits set for a block that is finite,
        none for one that is not, uint32 [B]; uint8 [B].
    """
    CARRY: tl.constexpr = P.carry
    ZERO: tl.constexpr = P.zero
    FOLDED_NORM: tl.constexpr = P.folded_norm
    if FOLDED_NORM != 1.0:
        amax_bits = bits_of(float_of(amax_bits) * FOLDED_NORM)
    code = scale_code(amax_bits, CARRY, P.element.max_exponent)
    factor = inverse_scale(code, P.element.max_exponent)
    if FOLDED_NORM != 1.0:
        factor = factor * FOLDED_NORM
    keep = tl.where(is_finite(amax_bits), 0xFFFFFFFF, 0).to(tl.uint32)
    return factor, keep, stored_code(code, amax_bits, ZERO)
