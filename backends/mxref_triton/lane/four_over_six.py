"""Which of two scales of a block errs less, exactly, by integers of 32 bits.

The unit is half of the last bit of X t, where X is the first candidate and t is a float32 whose significand T has 24
bits. Values under both candidates are c T in it, with c below 2^10. A value of 0 under both adds the same to both
errors, and may be cut off; every other magnitude is an integer, because it is at least a quarter of X t. So errors are
differences of integers. Where the candidates differ, an error is at most 30 * 2^24 units, also of a block that
saturates under a subnormal scale: differences modulo 2^32 are right, and 32 differences of squares have less than 63
bits. A subnormal X has fewer bits than others: its unit is halved once more, for magnitudes to be integers still.

Where the candidates are equal both errors are the same, whatever they overflow to.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref.steps.four_over_six import FourOverSix
from mxref_triton.lane.registers import bits_of, float_of
from mxref_triton.lane.scale import code_of_six, is_finite, nearest_code, parts_of, quotients, stored_code

_ABSOLUTE = tl.constexpr(FourOverSix.ABSOLUTE.value)
_LARGEST = tl.constexpr(FourOverSix.LARGEST.value)

_EXPONENT = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(1 << 23)
_COUNTS = tl.constexpr(2.0**23)
"""From here to 2^24 the bits of a float32 count ones."""
_COUNTS_BITS = tl.constexpr(0x4B000000)
_MOST = tl.constexpr(2.0**32 - 2.0**8)
"""The largest float32 that is a uint32."""


@triton.jit
def _rounded(v, E: tl.constexpr):
    """Return magnitudes up to the largest rounded to nearest even on the grid of E, float32 [B].

    The adder rounds, as in `grid`.
    """
    exponent = tl.maximum(bits_of(v) & _EXPONENT, (128 - E.bias) << 23)
    power = float_of(exponent + ((23 - E.mantissa_bits) << 23))
    return (v + power) - power


@triton.jit
def _unit(first, t, P: tl.constexpr):
    """Return what errors are counted in.

    Args:
        first: codes of the first candidates, int32 [B].
        t: the scale of the tensor.
        P: the treatment.

    Returns:
        Two powers of two whose product with a magnitude counts units, float32 [B]; and T, twice T where the first
        candidate is subnormal, uint32 [B].
    """
    S: tl.constexpr = P.scale
    ELEMENT: tl.constexpr = P.element.unit_exponent
    subnormal = bits_of(t) < _SMALLEST_NORMAL
    bits = bits_of(tl.where(subnormal, t * 2.0**24, t))
    halves = (first < (1 << S.mantissa_bits)).to(tl.int32)
    whole = ((bits & (_SMALLEST_NORMAL - 1)) | _SMALLEST_NORMAL) << halves.to(tl.uint32)
    exponent = (bits >> 23).to(tl.int32) - 150 - tl.where(subnormal, 24, 0)
    _, own = parts_of(first, S)
    counts = halves - (exponent + own + ELEMENT)
    near = tl.minimum(counts, 100)
    one = ((near + 127) << 23).to(tl.float32, bitcast=True) * P.folded_norm
    other = ((counts - near + 127) << 23).to(tl.float32, bitcast=True)
    return one, other, whole


@triton.jit
def _errors(magnitude, six, four, by6, by4, unit, E: tl.constexpr):
    """Return the errors of an element under both candidates in units, with a sign, int32 [B] each."""
    one, other, whole = unit
    counted = tl.minimum(magnitude * one * other, _MOST).to(tl.uint32) + whole * _COUNTS_BITS
    count6 = bits_of(tl.fma(_rounded(six, E), by6, tl.full(by6.shape, _COUNTS, tl.float32)))
    count4 = bits_of(tl.fma(_rounded(four, E), by4, tl.full(by4.shape, _COUNTS, tl.float32)))
    error6 = (counted - count6 * whole).to(tl.int32, bitcast=True)
    error4 = (counted - count4 * whole).to(tl.int32, bitcast=True)
    return error6, error4


@triton.jit
def _over_tile(sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr):
    """Return of every P.tile rows the largest, or the sum; units lie row-major in ROWS x COLUMNS, [B]."""
    TILE: tl.constexpr = P.tile
    tiles = tl.reshape(sums, [ROWS // TILE, TILE, COLUMNS])
    if P.four_over_six == _LARGEST:
        joined = tl.max(tiles, axis=1)
    else:
        joined = tl.sum(tiles, axis=1)
    return tl.reshape(tl.broadcast_to(joined[:, None, :], [ROWS // TILE, TILE, COLUMNS]), [ROWS * COLUMNS])


@triton.jit
def _second_errs_less(
    values, sixes, fours, six, four, tensor, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return whether the error of the second candidate is smaller, int1 [B].

    Args:
        values: elements of a block, a tuple of float32 [B].
        sixes: their quotients by the first candidate, for a rounding to nearest.
        fours: those by the second.
        six: code of the first, int32 [B].
        four: code of the second.
        tensor: the scale of the tensor.
        P: the treatment.
        ROWS: as in `encode_unit`.
        COLUMNS: see ROWS.
    """
    E: tl.constexpr = P.element
    UNITS: tl.constexpr = 2.0**-E.unit_exponent
    unit = _unit(six, tensor, P)
    S: tl.constexpr = P.scale  # Triton 3.6 does not pass attributes of a constant on
    significand6, exponent6 = parts_of(six, S)
    significand4, exponent4 = parts_of(four, S)
    # Equal candidates aside, the exponents differ by one at most.
    by6 = significand6.to(tl.float32) * UNITS
    by4 = (significand4 << (exponent4 - exponent6)).to(tl.float32) * UNITS
    top6 = tl.zeros_like(six)
    top4 = top6
    less = top6.to(tl.int64)
    for i in tl.static_range(len(values)):
        error6, error4 = _errors(tl.abs(values[i]), tl.abs(sixes[i]), tl.abs(fours[i]), by6, by4, unit, E)
        if P.four_over_six == _LARGEST:
            top6 = tl.maximum(top6, tl.abs(error6))
            top4 = tl.maximum(top4, tl.abs(error4))
        elif P.four_over_six == _ABSOLUTE:
            less = less + (tl.abs(error6) - tl.abs(error4))
        else:
            less = less + (error6 - error4).to(tl.int64) * (error6 + error4).to(tl.int64)
    if P.four_over_six == _LARGEST:
        if P.tile:
            top6 = _over_tile(top6, ROWS, COLUMNS, P)
            top4 = _over_tile(top4, ROWS, COLUMNS, P)
        return top4 < top6
    elif P.tile:
        # Of two parts, whose sums hold.
        high = _over_tile(less >> 32, ROWS, COLUMNS, P)
        low = _over_tile(less & 0xFFFFFFFF, ROWS, COLUMNS, P)
        less = high + (low >> 32)
        return (less > 0) | ((less == 0) & ((low & 0xFFFFFFFF) > 0))
    else:
        return less > 0


@triton.jit
def chosen(values, amax_bits, tensor, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the elements of a block over the scale that errs less, and what `scaled` and `scaling` return for it.

    Args:
        values: a tuple of float32 [B].
        amax_bits: as in `scaling`.
        tensor: the scale of the tensor.
        P: the treatment.
        ROWS: as in `encode_unit`.
        COLUMNS: see ROWS.

    Returns:
        Quotients, a tuple of float32 [B]; the factor that is left, 1; the mask of the codes; the scale byte.
    """
    tl.static_assert(P.is_e2m1, "integers of 32 bits hold the errors of E2M1 alone")
    tl.static_assert(
        P.scale.mantissa_bits <= 3 and P.k <= 32, "of scales with 3 bits, and the sums of 32 elements"
    )
    NORM: tl.constexpr = P.folded_norm
    RNE: tl.constexpr = P.constant < 0
    E: tl.constexpr = P.element
    if NORM != 1.0:
        amax_bits = bits_of(float_of(amax_bits) * NORM)
    six = code_of_six(amax_bits, tensor, P)
    four = nearest_code(amax_bits, tensor, 1 << E.precision, P)
    sixes = quotients(values, six, tensor, P, True)
    fours = quotients(values, four, tensor, P, True)
    second = _second_errs_less(values, sixes, fours, six, four, tensor, P, ROWS, COLUMNS)
    code = tl.where(second, four, six)
    out = ()
    if RNE:
        for i in tl.static_range(len(values)):
            out = out + (tl.where(second, fours[i], sixes[i]),)
    else:
        out = quotients(values, code, tensor, P, False)
    stored = stored_code(code, amax_bits, P.zero, P.scale.nan_code)
    keep = tl.where(is_finite(amax_bits), 0xFFFFFFFF, 0).to(tl.uint32)
    return out, tl.full(six.shape, 1.0, tl.float32), keep, stored
