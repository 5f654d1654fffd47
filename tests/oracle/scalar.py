"""A scalar, exact MXFP4 in integers and fractions: the second opinion that the reference is held to.

Written from the text of the OCP MX v1.0 standard and the specification's prose, one number at a time, for
clarity and independence: it shares no code with the package under test and uses no floating-point arithmetic.
Where the package computes a shared scale from bit fields, this file compares exact magnitudes; where the
package uses thresholds, it compares exact distances on the element grid.

Everything is a Python int (float32 or bfloat16 bit pattern, element code, E8M0 byte, random integer), a list
of them, or a Fraction. Inside, a finite float32 is an integer count of 2^-149, the smallest subnormal.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

Rule = Literal["floor", "ceil", "rceil", "even"]
Rounding = Literal["rne", "rna", "rtz", "sr"]
Block = tuple[int, Sequence[int]]  # an E8M0 byte and the 32 element codes it scales

NAN32, INF32, SIGN32 = 0x7FC00000, 0x7F800000, 0x80000000
NAN16, INF16, SIGN16 = 0x7FC0, 0x7F80, 0x8000
UNIT = 1 << 149  # units of 2^-149 in 1.0
NAN_BYTE = 255


# ---- float32 and bfloat16 ----


def is_nonfinite(bits: int) -> bool:
    """NaN or infinity: the exponent field is all ones."""
    return bits & INF32 == INF32


def _is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INF32


def _units(magnitude: int) -> int:
    """A finite float32 without its sign, counted in units of 2^-149: m, or (2^23 + m) 2^(E-1) if E > 0."""
    exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    return (mantissa | 1 << 23) << (exponent - 1) if exponent else mantissa


def _signed_units(bits: int) -> int:
    return -_units(bits & 0x7FFFFFFF) if bits & SIGN32 else _units(bits)


def f32_value(bits: int) -> Fraction:
    """The real number that a finite float32 holds; both zeros give 0.

    Raises:
        ValueError: for NaN and infinities, which are not numbers on the real line.
    """
    if is_nonfinite(bits):
        raise ValueError(f"float32 bits {bits:#010x} hold no real number")
    return Fraction(_signed_units(bits), UNIT)


def _floor_log2(num: int, den: int) -> int:
    """The largest e with 2^e <= num / den, for positive integers, by exact comparison."""
    e = num.bit_length() - den.bit_length()
    fits = num >= den << e if e >= 0 else num << -e >= den
    return e if fits else e - 1


def _round_magnitude(num: int, den: int, precision: int, least: int = -126) -> int:
    """num / den >= 0 rounded once, ties to even, to a float of `precision` - 1 mantissa bits.

    `least` is the exponent of the smallest normal number; subnormals are kept. With the 8 exponent bits of
    float32 and bfloat16, what rounds to 2^128 or above becomes infinity. Returns the bits without a sign.
    """
    if num == 0:
        return 0
    lowest = least - (precision - 1)  # exponent of the smallest subnormal
    ulp = max(_floor_log2(num, den) - (precision - 1), lowest)
    if ulp >= 0:
        den <<= ulp
    else:
        num <<= -ulp
    count, rest = divmod(num, den)
    if 2 * rest > den or (2 * rest == den and count & 1):
        count += 1
    # The hidden bit of `count` carries into the exponent field, as does a mantissa rounded up to a power.
    bits = count + ((ulp - lowest) << (precision - 1))
    return min(bits, 0xFF << (precision - 1))


def round_f32(value: Fraction) -> int:
    """A real rounded once to float32, ties to even: exact 0 is +0, negative underflow -0, overflow Inf."""
    bits = _round_magnitude(abs(value.numerator), value.denominator, 24)
    return bits | SIGN32 if value < 0 else bits


def round_bf16(value: Fraction) -> int:
    """A real rounded once to bfloat16 (16 bits), with the conventions of `round_f32`."""
    bits = _round_magnitude(abs(value.numerator), value.denominator, 8)
    return bits | SIGN16 if value < 0 else bits


def f32_bits_to_bf16_bits(bits: int) -> int:
    """A float32 rounded to bfloat16, ties to even: signs of zeros and infinities stay, NaN is canonical."""
    if _is_nan(bits):
        return NAN16
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    return sign | (INF16 if magnitude == INF32 else _round_magnitude(_units(magnitude), UNIT, 8))


def f32_add(a: int, b: int) -> int:
    """IEEE 754 float32 addition, ties to even; an exact zero sum is +0 unless both operands are -0."""
    if _is_nan(a) or _is_nan(b):
        return NAN32
    if is_nonfinite(a) or is_nonfinite(b):
        if is_nonfinite(a) and is_nonfinite(b) and a != b:
            return NAN32
        return a if is_nonfinite(a) else b
    total = _signed_units(a) + _signed_units(b)
    if total == 0:
        return SIGN32 if a == b == SIGN32 else 0
    return _round_magnitude(abs(total), UNIT, 24) | (SIGN32 if total < 0 else 0)


def f32_sub(a: int, b: int) -> int:
    """IEEE 754 float32 subtraction: addition of the negated operand."""
    return f32_add(a, b ^ SIGN32)


def f32_mul(a: int, b: int) -> int:
    """IEEE 754 float32 multiplication, ties to even; the sign is the signs' exclusive or, zeros included."""
    sign, x, y = (a ^ b) & SIGN32, a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if _is_nan(a) or _is_nan(b) or (INF32 in (x, y) and 0 in (x, y)):
        return NAN32
    if INF32 in (x, y):
        return sign | INF32
    return sign | _round_magnitude(_units(x) * _units(y), UNIT * UNIT, 24)


# ---- E2M1 elements and E8M0 scales ----


def element_value(code: int) -> Fraction:
    """E2M1: sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal; no NaN, no Inf."""
    if not 0 <= code <= 15:
        raise ValueError(f"element code {code} is outside 0..15")
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = Fraction(2 + mantissa, 2) * 2 ** (exponent - 1) if exponent else Fraction(mantissa, 2)
    return -magnitude if code & 8 else magnitude


GRID = [int(2 * element_value(code)) for code in range(8)]  # magnitudes in halves
_HALVES = [int(2 * element_value(code)) for code in range(16)]


def scale_value(byte: int) -> Fraction | None:
    """E8M0: byte b is 2^(b - 127), with no zero and no infinity; 255 is NaN, given as None."""
    if not 0 <= byte <= 255:
        raise ValueError(f"scale byte {byte} is outside 0..255")
    return None if byte == NAN_BYTE else Fraction(2) ** (byte - 127)


def shared_scale(amax_bits: int, rule: Rule) -> int:
    """The E8M0 byte for a block whose largest magnitude is the finite, non-zero float32 `amax_bits`.

    floor: the largest power of two not above amax, over 4 (4 is the largest power of two among the elements).
    ceil: the smallest power of two X with amax <= 4 X. rceil: the smallest X with amax <= 6 X.
    even: floor, after amax's significand is rounded to one fractional bit, halves up.
    The exponent is then held within -127..127.
    """
    if is_nonfinite(amax_bits) or amax_bits & SIGN32 or amax_bits == 0:
        raise ValueError(f"a shared scale needs a finite positive amax, not bits {amax_bits:#010x}")
    num, den = _units(amax_bits), UNIT
    e = _floor_log2(num, den)  # amax is in [2^e, 2^(e+1))
    power, amax = Fraction(2) ** e, Fraction(num, den)
    if rule == "floor":
        e -= 2
    elif rule == "ceil":
        e = e - 2 if amax <= power else e - 1
    elif rule == "rceil":
        e = e - 2 if amax <= 6 * power / 4 else e - 1
    elif rule == "even":
        halves = (2 * amax / power + Fraction(1, 2)).__floor__()  # the significand in halves: 2, 3 or 4
        e = e - 2 + (halves == 4)
    else:
        raise ValueError(f"unknown scale rule {rule!r}")
    return min(max(e, -127), 127) + 127


def _round_ratio(num: int, den: int, rounding: Rounding, r: int | None, R: int) -> int:
    """The magnitude code of num / den >= 0; see `round_element`."""
    if rounding not in ("rne", "rna", "rtz", "sr"):
        raise ValueError(f"unknown rounding {rounding!r}")
    twice = 2 * num
    low = bisect_right(GRID, twice // den) - 1
    if low == 7 or rounding == "rtz":
        return low
    below, gap = twice - GRID[low] * den, (GRID[low + 1] - GRID[low]) * den
    if rounding == "sr":
        if r is None or not (1 <= R <= 22 and 0 <= r < 1 << R):
            raise ValueError(f"stochastic rounding needs 0 <= r < 2^R and 1 <= R <= 22, not r={r}, R={R}")
        return low + ((below << R) // gap + r >= 1 << R)
    above = gap - below
    if below != above:
        return low + (above < below)
    return low + 1 if rounding == "rna" else low + (low & 1)


def round_element(v: Fraction, rounding: Rounding, r: int | None = None, R: int = 16) -> int:
    """The magnitude code (0..7) of v >= 0; everything from 6 up saturates to 6.

    rne: nearest, a tie goes to the even code. rna: nearest, a tie goes away from zero. rtz: toward zero.
    sr: with f = how far v is along the gap between its neighbours, up iff floor(f 2^R) + r >= 2^R.
    """
    if v < 0:
        raise ValueError(f"a magnitude is not negative: {v}")
    return _round_ratio(v.numerator, v.denominator, rounding, r, R)


def quantize_block(
    bits: Sequence[int],
    rule: Rule,
    rounding: Rounding,
    *,
    zero_scale: int = 0,
    prescale: bool = False,
    r: Sequence[int] | None = None,
    R: int = 16,
) -> tuple[int, list[int]]:
    """Byte and codes of the float32 elements that share one scale: 32 of a block, or 1,024 of a tile.

    Any NaN or infinity gives byte 255 and codes 0. All zeros give byte `zero_scale`. Codes keep the sign bit
    of their element, also on zeros and underflow. `prescale` rounds fl32(3/4 v) for v, scale unchanged.
    """
    magnitudes = [b & 0x7FFFFFFF for b in bits]
    amax = max(magnitudes)  # float32 magnitudes order as their bits do
    if amax >= INF32:
        return NAN_BYTE, [0] * len(magnitudes)
    byte = shared_scale(amax, rule) if amax else zero_scale
    scale = 1 << (byte + 22)  # 2^(byte-127) in units of 2^-149
    codes = []
    for i, (b, magnitude) in enumerate(zip(bits, magnitudes, strict=True)):
        num, den = _units(magnitude), scale
        if prescale:
            num, den = _units(_round_magnitude(3 * num, 4 * den, 24)), UNIT
        code = _round_ratio(num, den, rounding, None if r is None else r[i], R)
        codes.append(b >> 31 << 3 | code)
    return byte, codes


def dequantize_f32(byte: int, code: int) -> int:
    """Element times shared scale as float32: exact, but for overflow to infinity; byte 255 is NaN."""
    scale = scale_value(byte)
    if scale is None:
        return NAN32
    return (SIGN32 if code & 8 else 0) | round_f32(abs(element_value(code)) * scale)


def dequantize_bf16(byte: int, code: int) -> int:
    """Element times shared scale as bfloat16: exact, but for overflow to infinity; byte 255 is NaN."""
    scale = scale_value(byte)
    if scale is None:
        return NAN16
    return (SIGN16 if code & 8 else 0) | round_bf16(abs(element_value(code)) * scale)


# ---- one element of a scaled GEMM ----


def block_dot(codes_a: Sequence[int], codes_b: Sequence[int]) -> Fraction:
    """The sum of products of element values, before any scale: an exact multiple of 1/4."""
    return Fraction(sum(_HALVES[a] * _HALVES[b] for a, b in zip(codes_a, codes_b, strict=True)), 4)


def _block_products(a_blocks: Sequence[Block], b_blocks: Sequence[Block]) -> list[Fraction] | None:
    """Every block's dot times both of its scales, as reals; None as soon as a scale is NaN."""
    products = []
    for (byte_a, codes_a), (byte_b, codes_b) in zip(a_blocks, b_blocks, strict=True):
        if NAN_BYTE in (byte_a, byte_b):
            return None
        e = byte_a + byte_b - 254
        power = Fraction(1 << e) if e >= 0 else Fraction(1, 1 << -e)
        products.append(block_dot(codes_a, codes_b) * power)
    return products


def gemm_exact(
    a_blocks: Sequence[Block],
    b_blocks: Sequence[Block],
    out: Literal["float32", "bfloat16"] = "float32",
    prescaled: int = 0,
) -> int:
    """The real sum of all block products, times 4/3 per prescaled operand, rounded once to `out`."""
    if prescaled not in (0, 1, 2) or out not in ("float32", "bfloat16"):
        raise ValueError(f"no exact GEMM for prescaled={prescaled}, out={out!r}")
    products = _block_products(a_blocks, b_blocks)
    if products is None:
        return NAN32 if out == "float32" else NAN16
    total = sum(products, Fraction(0)) * Fraction(4, 3) ** prescaled
    return round_f32(total) if out == "float32" else round_bf16(total)


def gemm_ordered(a_blocks: Sequence[Block], b_blocks: Sequence[Block], prescaled: int = 0) -> int:
    """From +0, blocks ascending: add each exact product to the float32 accumulator, rounding each sum once.

    An infinite accumulator stays. Prescaled operands cost a last float32 multiply by fl32(4/3) or fl32(16/9).
    """
    if prescaled not in (0, 1, 2):
        raise ValueError(f"no ordered GEMM for prescaled={prescaled}")
    products = _block_products(a_blocks, b_blocks)
    if products is None:
        return NAN32
    acc = 0
    for product in products:
        if not is_nonfinite(acc):
            acc = round_f32(f32_value(acc) + product)
    return f32_mul(acc, round_f32(Fraction(4, 3) ** prescaled)) if prescaled else acc


# ---- the FP8 baseline ----

FP8: dict[str, tuple[int, int, int]] = {"E4M3": (4, 7, 448), "E5M2": (3, 15, 57344)}
"""Precision (mantissa bits and the hidden one), exponent bias and largest finite value."""


def fp8_value(code: int, name: str) -> Fraction | None:
    """The value of an FP8 code; None for NaN and infinities."""
    precision, bias, largest = FP8[name]
    exponent, mantissa = (code & 0x7F) >> (precision - 1), code & ((1 << (precision - 1)) - 1)
    significand = mantissa | (1 << (precision - 1) if exponent else 0)
    magnitude = Fraction(significand) * Fraction(2) ** (max(exponent, 1) - bias - (precision - 1))
    if magnitude > largest:  # the codes above the largest finite value stand for no number
        return None
    return -magnitude if code & 0x80 else magnitude


def fp8_cast(bits: int, scale_bits: int, name: str) -> int:
    """The FP8 code of fl32(x * scale): NaN is 0x7F, what is above the largest value saturates, ties go to even."""
    precision, bias, largest = FP8[name]
    w = f32_mul(bits, scale_bits)
    if _is_nan(w):
        return 0x7F
    num = min(_units(w & 0x7FFFFFFF), largest * UNIT) if not is_nonfinite(w) else largest * UNIT
    return w >> 31 << 7 | _round_magnitude(num, UNIT, precision, 1 - bias)


def fp8_scale(amax_bits: int, name: str) -> int | None:
    """The float32 bits of min(fl32(largest / amax), FLT_MAX); None if amax is 0, NaN or infinite."""
    if is_nonfinite(amax_bits) or not amax_bits & 0x7FFFFFFF:
        return None
    return min(round_f32(FP8[name][2] / f32_value(amax_bits)), INF32 - 1)
