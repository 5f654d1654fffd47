"""Shared scales: E8M0 bytes, and the rules by comparison of exact magnitudes."""

from fractions import Fraction
from functools import cache

from oracle.elements import E2M1, Element
from oracle.floats import SIGN32, UNIT, floor_log2, is_nonfinite, units

Rule = str
"""A name, or a threshold as `>1.5`."""
RULES: tuple[Rule, ...] = ("floor", "ceil", "rceil", "even")
NAN_BYTE = 255


@cache
def scale_value(byte: int) -> Fraction | None:
    """E8M0: byte b is 2^(b - 127), with no zero and no infinity; 255 is NaN, given as None."""
    if not 0 <= byte <= 255:
        raise ValueError(f"scale byte {byte} is outside 0..255")
    return None if byte == NAN_BYTE else Fraction(2) ** (byte - 127)


def shared_scale(amax_bits: int, rule: Rule, element: Element = E2M1) -> int:
    """The E8M0 byte for a block whose largest magnitude is the finite, non-zero float32 `amax_bits`.

    Let T be the largest power of two among the elements, and M their largest magnitude.
    floor: the largest power of two not above amax, over T.
    ceil: the smallest power of two X with amax <= T X. rceil: the smallest X with amax <= M X.
    even: floor, after amax's significand is rounded to as many fractional bits as the element has, halves up.
    >c and >=c: floor, one more where amax's significand is above c, or not below it.
    A subnormal amax counts as 2^-127 (1 + amax / 2^-126), which matters only to elements whose T is 1 or less.
    The exponent is then held within -127..127.
    """
    if is_nonfinite(amax_bits) or amax_bits & SIGN32 or amax_bits == 0:
        raise ValueError(f"a shared scale needs a finite positive amax, not bits {amax_bits:#010x}")
    num, den = units(amax_bits), UNIT
    e = floor_log2(num, den)  # amax is in [2^e, 2^(e+1))
    num, den = (num, den << e) if e >= 0 else (num << -e, den)  # the significand, amax over 2^e
    if e < -126:  # a subnormal, whose fields are read as those of a normal number
        e, num, den = -127, (1 << 23) + amax_bits, 1 << 23
    if rule == "floor":
        bump = False
    elif rule == "ceil":
        bump = num > den
    elif rule == "rceil":
        most = 2 * element.prescale  # M / T, below 2
        bump = num * most.denominator > den * most.numerator
    elif rule == "even":
        steps = 2**element.mantissa_bits
        rounded = (2 * steps * num + den) // (2 * den)  # the significand in steps
        bump = rounded == 2 * steps
    elif rule.startswith(">"):
        c, significand = Fraction(rule.lstrip(">=")), Fraction(num, den)
        bump = significand > c or (rule.startswith(">=") and significand == c)
    else:
        raise ValueError(f"unknown scale rule {rule!r}")
    return min(max(e - element.largest_exponent + bump, -127), 127) + 127
