"""Float32 and bfloat16 as integers: values, rounding of reals, and IEEE 754 addition and multiplication.

A finite float32 is an integer count of 2^-149, the smallest subnormal. No floating-point arithmetic is used.
"""

from fractions import Fraction

NAN32, INF32, SIGN32 = 0x7FC00000, 0x7F800000, 0x80000000
NAN16, INF16, SIGN16 = 0x7FC0, 0x7F80, 0x8000
UNIT = 1 << 149  # units of 2^-149 in 1.0


def is_nonfinite(bits: int) -> bool:
    """NaN or infinity: the exponent field is all ones."""
    return bits & INF32 == INF32


def is_nan(bits: int) -> bool:
    """NaN: above infinity once the sign is cleared."""
    return bits & 0x7FFFFFFF > INF32


def units(magnitude: int) -> int:
    """A finite float32 without its sign, counted in units of 2^-149: m, or (2^23 + m) 2^(E-1) if E > 0."""
    exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    return (mantissa | 1 << 23) << (exponent - 1) if exponent else mantissa


def _signed_units(bits: int) -> int:
    return -units(bits & 0x7FFFFFFF) if bits & SIGN32 else units(bits)


def f32_value(bits: int) -> Fraction:
    """The real number that a finite float32 holds; both zeros give 0.

    Raises:
        ValueError: for NaN and infinities, which are not numbers on the real line.
    """
    if is_nonfinite(bits):
        raise ValueError(f"float32 bits {bits:#010x} hold no real number")
    return Fraction(_signed_units(bits), UNIT)


def floor_log2(num: int, den: int) -> int:
    """The largest e with 2^e <= num / den, for positive integers, by exact comparison."""
    e = num.bit_length() - den.bit_length()
    fits = num >= den << e if e >= 0 else num << -e >= den
    return e if fits else e - 1


def round_to_float(num: int, den: int, precision: int) -> int:
    """num / den >= 0 rounded once, ties to even, to a float of `precision` - 1 mantissa bits and 8 exponent bits.

    Subnormals are kept; what rounds to 2^128 or above becomes infinity. Returns the bits without a sign.
    """
    if num == 0:
        return 0
    lowest = -126 - (precision - 1)  # exponent of the smallest subnormal
    ulp = max(floor_log2(num, den) - (precision - 1), lowest)
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


def round_units(count: int) -> int:
    """A sum counted in units of 2^-149, >= 0, rounded once to float32, ties to even; the bits without a sign.

    As `round_to_float`, but without a division, of which sums have no need.
    """
    dropped = count.bit_length() - 24
    if dropped <= 0:
        return count
    odd = count >> dropped & 1
    # Half of the last place is added; a tie below an even count gets a little less, and stays.
    kept = (count + (1 << (dropped - 1)) - 1 + odd) >> dropped
    return min(kept + (dropped << 23), INF32)


def round_f32(value: Fraction) -> int:
    """A real rounded once to float32, ties to even: exact 0 is +0, negative underflow -0, overflow Inf."""
    bits = round_to_float(abs(value.numerator), value.denominator, 24)
    return bits | SIGN32 if value < 0 else bits


def round_bf16(value: Fraction) -> int:
    """A real rounded once to bfloat16 (16 bits), with the conventions of `round_f32`."""
    bits = round_to_float(abs(value.numerator), value.denominator, 8)
    return bits | SIGN16 if value < 0 else bits


def f32_bits_to_bf16_bits(bits: int) -> int:
    """A float32 rounded to bfloat16, ties to even: signs of zeros and infinities stay, NaN is canonical."""
    if is_nan(bits):
        return NAN16
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    return sign | (INF16 if magnitude == INF32 else round_to_float(units(magnitude), UNIT, 8))


def f32_add(a: int, b: int) -> int:
    """IEEE 754 float32 addition, ties to even; an exact zero sum is +0 unless both operands are -0."""
    if a & INF32 == INF32 or b & INF32 == INF32:  # as `is_nonfinite`, which takes longer to call
        if is_nan(a) or is_nan(b) or (is_nonfinite(a) and is_nonfinite(b) and a != b):
            return NAN32
        return a if is_nonfinite(a) else b
    total = _signed_units(a) + _signed_units(b)
    if total == 0:
        return SIGN32 if a == b == SIGN32 else 0
    return round_units(abs(total)) | (SIGN32 if total < 0 else 0)


def f32_sub(a: int, b: int) -> int:
    """IEEE 754 float32 subtraction: addition of the negated operand."""
    return f32_add(a, b ^ SIGN32)


def f32_mul(a: int, b: int) -> int:
    """IEEE 754 float32 multiplication, ties to even; the sign is the signs' exclusive or, zeros included."""
    sign, x, y = (a ^ b) & SIGN32, a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if is_nonfinite(a) or is_nonfinite(b):
        invalid = is_nan(a) or is_nan(b) or 0 in (x, y)  # infinity times zero is invalid
        return NAN32 if invalid else sign | INF32
    return sign | round_to_float(units(x) * units(y), UNIT * UNIT, 24)
