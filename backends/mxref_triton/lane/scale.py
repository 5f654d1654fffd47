"""The shared scale of a block: amax, the code that follows from it, and the division of elements by the scale.

Of powers of two, the scale rule is one addition to the bits of amax: `carry` of `scale_code`. `Treatment.carry` in
`treatment` says how it is made from the rule's bound. A scale with a mantissa is a quotient, rounded once; so are the
elements under it.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref.steps.scale import INFINITY_BITS
from mxref_triton.lane.grid import to_even
from mxref_triton.lane.quotient import divisor, quotient
from mxref_triton.lane.registers import bits_of, float_of

_INFINITY = tl.constexpr(INFINITY_BITS)
_ONE_EXPONENT = tl.constexpr(1 << 23)
_SMALLEST_POWER = tl.constexpr(1 << 22)
"""Bits of 2^-127, which is subnormal."""


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
def over_tile(amax_bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest of every TILE rows; units lie row-major in ROWS x COLUMNS, uint32 [B]."""
    tiles = tl.reshape(amax_bits, [ROWS // TILE, TILE, COLUMNS])
    top = tl.max(tiles, axis=1)[:, None, :]
    return tl.reshape(tl.broadcast_to(top, [ROWS // TILE, TILE, COLUMNS]), [ROWS * COLUMNS])


@triton.jit
def scale_code(amax_bits, carry: tl.constexpr, top: tl.constexpr, last: tl.constexpr):
    """Return E8M0 codes 0 to `last` from finite amax bits, int32 [B]; `top` is the exponent of the largest element.

    From a top of 2 on, the last code does not occur.
    """
    code = tl.maximum(((amax_bits + carry) >> 23).to(tl.int32) - top, 0)
    if top < 1:
        code = tl.minimum(code, last)
        if carry == 1 << 23:  # the rule >=1 goes up at every mantissa, and zeros have none
            code = tl.where(amax_bits == 0, 0, code)
    return code


@triton.jit
def inverse_scale(code, top: tl.constexpr, last: tl.constexpr):
    """Return 2^(127 - code) for codes that `scale_code` returns, float32: a normal number but for the last."""
    bits = (last - code).to(tl.uint32) << 23
    if top < 2:
        bits = tl.where(code == last, _SMALLEST_POWER, bits).to(tl.uint32)
    return float_of(bits)


@triton.jit
def stored_code(code, amax_bits, ZERO: tl.constexpr, NAN: tl.constexpr):
    """Return the byte to store, by the policies for all-zero and for nonfinite blocks, uint8 [B]."""
    if ZERO:
        code = tl.where(amax_bits == 0, ZERO, code)
    return tl.where(amax_bits >= _INFINITY, NAN, code).to(tl.uint8)


@triton.jit
def is_finite(amax_bits):
    """Return whether a block has neither NaN nor Inf, from its amax bits."""
    return amax_bits < _INFINITY


@triton.jit
def amax_bits_of(values):
    """Return the bits of the amax of a tuple of elements, uint32 [B]."""
    return bits_of(amax_of(values)) & 0x7FFFFFFF


@triton.jit
def finite_amax(values, norm: tl.constexpr):
    """Return the bits of the largest finite magnitude of a tuple of elements times a power of two, uint32 [B]."""
    top = tl.zeros_like(bits_of(values[0])).to(tl.int32)
    for i in tl.static_range(len(values)):
        # Infinity and NaN become negative.
        top = tl.maximum(top, ((bits_of(values[i]) & 0x7FFFFFFF) + _ONE_EXPONENT).to(tl.int32, bitcast=True))
    bits = tl.maximum(top, _ONE_EXPONENT) - _ONE_EXPONENT
    return bits_of(float_of(bits.to(tl.uint32, bitcast=True)) * norm)


@triton.jit
def nearest_code(amax_bits, tensor, LARGEST: tl.constexpr, P: tl.constexpr):
    """Return the codes of scales with a mantissa, the nearest to amax / (m t), int32 [B].

    Args:
        amax_bits: uint32 [B].
        tensor: t.
        LARGEST: the largest magnitude m of a scaled block, in units of the element's last bit at its largest exponent.
        P: the treatment.
    """
    E: tl.constexpr = P.element
    S: tl.constexpr = P.scale
    largest = divisor(LARGEST, E.max_exponent - E.precision, tensor, S.max_value)
    return to_even(quotient(float_of(amax_bits), largest, True), S).to(tl.int32)


@triton.jit
def code_of_six(amax_bits, tensor, P: tl.constexpr):
    """Return the codes nearest to amax / (M t), int32 [B]."""
    E: tl.constexpr = P.element
    LARGEST: tl.constexpr = (1 << E.precision) + (E.max_code & ((1 << E.precision) - 1))
    return nearest_code(amax_bits, tensor, LARGEST, P)


@triton.jit
def parts_of(code, S: tl.constexpr):
    """Return the significand and the exponent of scales with a mantissa, int32 [B] each, from their codes."""
    M: tl.constexpr = S.mantissa_bits
    field = code >> M
    significand = (code & ((1 << M) - 1)) + tl.where(field == 0, 0, 1 << M)
    return significand, tl.maximum(field, 1) - (S.bias + M)


@triton.jit
def quotients(values, code, tensor, P: tl.constexpr, STICKY: tl.constexpr):
    """Return elements over the scale with a mantissa that has this code, and over that of the tensor."""
    S: tl.constexpr = P.scale  # Triton 3.6 does not pass attributes of a constant on
    significand, exponent = parts_of(code, S)
    factor, high, low, reciprocal, top = divisor(significand, exponent, tensor, P.element.max_value)
    by = factor * P.folded_norm, high, low, reciprocal, top
    out = ()
    for i in tl.static_range(len(values)):
        sign = bits_of(values[i]) & 0x80000000
        out = out + (float_of(bits_of(quotient(tl.abs(values[i]), by, STICKY)) | sign),)
    return out


@triton.jit
def scaling(amax_bits, tensor, P: tl.constexpr):
    """Return the factor of a block, the mask of its codes, and its scale byte.

    Args:
        amax_bits: bits of its amax but for a Hadamard norm that was not applied yet, uint32 [B].
        tensor: the scale of the tensor, read if the scales of blocks have a mantissa.
        P: the treatment.

    Returns:
        2^-e, times that norm, float32 [B], or the scale code where it has a mantissa, int32 [B]; all bits set for a
        block that is finite, none for one that is not, uint32 [B]; uint8 [B].
    """
    CARRY: tl.constexpr = P.carry
    ZERO: tl.constexpr = P.zero
    FOLDED_NORM: tl.constexpr = P.folded_norm
    if FOLDED_NORM != 1.0:
        amax_bits = bits_of(float_of(amax_bits) * FOLDED_NORM)
    if P.scale.powers:
        code = scale_code(amax_bits, CARRY, P.element.max_exponent, P.scale.max_code)
        factor = inverse_scale(code, P.element.max_exponent, P.scale.max_code)
        if FOLDED_NORM != 1.0:
            factor = factor * FOLDED_NORM
    else:
        code = code_of_six(amax_bits, tensor, P)
        factor = code
    keep = tl.where(is_finite(amax_bits), 0xFFFFFFFF, 0).to(tl.uint32)
    return factor, keep, stored_code(code, amax_bits, ZERO, P.scale.nan_code)


@triton.jit
def scaled(values, factor, tensor, P: tl.constexpr):
    """Return the elements of a block, and the factor that is left to multiply them with: under scales with a mantissa
    the elements are quotients, and the factor is 1. `factor` is what `scaling` returned.
    """
    if P.scale.powers:
        return values, factor
    else:
        STICKY: tl.constexpr = P.constant < 0
        return quotients(values, factor, tensor, P, STICKY), tl.full(factor.shape, 1.0, tl.float32)


@triton.jit
def value_of_scale(code, S: tl.constexpr):
    """Return the values of scale codes, int32 [B], or NaN: float32 [B]."""
    if S.powers:
        value = power_of_code(code)
    else:
        value = float_of(code.to(tl.uint32) << (23 - S.mantissa_bits)) * 2.0 ** (127 - S.bias)
    return tl.where(code > S.max_code, float("nan"), value)


@triton.jit
def power_of_code(code):
    """Return 2^(code - 127) for codes 0 to 254, float32; code 0 is a subnormal."""
    bits = tl.where(code == 0, _SMALLEST_POWER, code << 23)
    return float_of(bits.to(tl.uint32, bitcast=True))
