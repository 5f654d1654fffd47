"""Scale formats, and the rules that choose a block's and a tensor's scale, by comparison of exact magnitudes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from oracle.elements import E2M1, Element
from oracle.floats import INF32, SIGN32, UNIT, floor_log2, is_nonfinite, round_f32, units

Rule = str
"""A name, or a threshold as `>1.5`."""
RULES: tuple[Rule, ...] = ("floor", "ceil", "rceil", "even")
NAN_BYTE = 255


ONE = 0x3F800000
"""The float32 bits of 1: the tensor scale of what has none."""


@dataclass(frozen=True)
class Scale:
    """A scale format: a byte of exponent bits, then mantissa bits, and unused bits above them; no sign, no infinity.

    With a mantissa it has subnormals and zero, and the code of all ones is NaN, as is every byte above it.
    E8M0 has no mantissa: code c is 2^(c - bias) for every c, the first too, but for the last code, NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int

    @property
    def nan(self) -> int:
        """The code of NaN."""
        return 2 ** (self.exponent_bits + self.mantissa_bits) - 1

    @cached_property
    def values(self) -> list[Fraction]:
        """The number of every code below that of NaN, in rising order."""
        values = []
        for code in range(self.nan):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            significand = Fraction(mantissa, 2**self.mantissa_bits)
            if exponent or not self.mantissa_bits:
                significand += 1
            else:
                exponent = 1
            values.append(significand * Fraction(2) ** (exponent - self.bias))
        assert values == sorted(values)
        return values

    @property
    def largest(self) -> Fraction:
        """The largest scale."""
        return self.values[-1]

    @property
    def one(self) -> int:
        """The code of 1."""
        return self.values.index(Fraction(1))

    def nearest(self, number: Fraction) -> int:
        """The code of the scale nearest to a number >= 0; a tie goes to the even code, too much to the largest."""
        low = bisect_right(self.values, number) - 1
        if low == self.nan - 1:
            return low
        below, above = number - self.values[low], self.values[low + 1] - number
        if below != above:
            return low if below < above else low + 1
        return low + low % 2


E8M0 = Scale("E8M0", 8, 0, bias=127)
UE4M3 = Scale("UE4M3", 4, 3, bias=7)
UE5M3 = Scale("UE5M3", 5, 3, bias=15)
SCALES = {scale.name: scale for scale in (E8M0, UE4M3, UE5M3)}


def scale_value(byte: int, scale: Scale = E8M0) -> Fraction | None:
    """The number of a scale byte, None for NaN. In E8M0 byte b is 2^(b - 127), and 255 is NaN."""
    if not 0 <= byte <= 255:
        raise ValueError(f"scale byte {byte} is outside 0..255")
    return scale.values[byte] if byte < scale.nan else None


def tensor_amax(bits: Sequence[int]) -> int:
    """The float32 bits of the largest finite magnitude of a tensor, 0 if it has none."""
    return max((b & 0x7FFFFFFF for b in bits if not is_nonfinite(b)), default=0)


def tensor_scale(amax_bits: int, element: Element, scale: Scale, four_over_six: bool = False) -> int:
    """The float32 bits of the scale of a tensor: amax over what the largest element and scale make, rounded once.

    An amax of 0 gives 1. Any other gives at least 2^-149, the smallest float32. Where blocks choose between two
    scales, the largest power of two among the scales stands for the largest.
    """
    if not 0 <= amax_bits < INF32:
        raise ValueError(f"a tensor scale needs a finite amax >= 0, not bits {amax_bits:#010x}")
    if amax_bits == 0:
        return ONE
    top = scale.largest
    if four_over_six:
        top = max(value for value in scale.values if value and _is_power(value))
    return max(round_f32(Fraction(units(amax_bits), UNIT) / (element.largest * top)), 1)


def _is_power(value: Fraction) -> bool:
    return all(number & (number - 1) == 0 for number in (value.numerator, value.denominator))


def nearest_scale(
    amax_bits: int, element: Element, scale: Scale, tensor: int = ONE, largest: Fraction | None = None
) -> int:
    """The scale code nearest to amax over the largest element, or over `largest`, and over the tensor's scale."""
    return scale.nearest(Fraction(units(amax_bits), units(tensor)) / (largest or element.largest))


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
        steps = 2**element.fraction_bits
        rounded = (2 * steps * num + den) // (2 * den)  # the significand in steps
        bump = rounded == 2 * steps
    elif rule.startswith(">"):
        c, significand = Fraction(rule.lstrip(">=")), Fraction(num, den)
        bump = significand > c or (rule.startswith(">=") and significand == c)
    else:
        raise ValueError(f"unknown scale rule {rule!r}")
    return min(max(e - element.largest_exponent + bump, -127), 127) + 127
