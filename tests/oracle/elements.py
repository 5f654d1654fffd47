"""Element formats: the value of every code, and rounding to the grid, by fractions."""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from oracle.floats import floor_log2

Rounding = Literal["rne", "rna", "rtz", "sr"]
Specials = Literal["none", "nan", "ieee"]
Kind = Literal["finite", "infinite", "nan"]


@dataclass(frozen=True)
class Element:
    """A small binary floating-point format: a sign bit, then exponent bits, then mantissa bits.

    `specials` says which codes stand for no number. none: no code. nan: the code with all exponent and
    mantissa bits set. ieee: every code whose exponent bits are all set; mantissa 0 is infinity, the rest NaN.
    In two's complement, a code from the sign bit up is what it is less than the number of codes, negated.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = "none"
    twos_complement: bool = False

    @cached_property
    def bits(self) -> int:
        """The width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    def kind(self, code: int) -> Kind:
        """Whether a code stands for a number, an infinity or NaN.

        Raises:
            ValueError: the format has no such code.
        """
        if not 0 <= code < 2 * self.sign:
            raise ValueError(f"element code {code} is outside 0..{2 * self.sign - 1}")
        return self._kinds[code]

    @cached_property
    def _kinds(self) -> list[Kind]:
        return [self._kind(code) for code in range(2 * self.sign)]

    def _kind(self, code: int) -> Kind:
        exponent, mantissa = self._fields(code)
        largest_exponent = exponent == 2**self.exponent_bits - 1
        if self.specials == "ieee" and largest_exponent:
            return "nan" if mantissa else "infinite"
        if self.specials == "nan" and largest_exponent and mantissa == 2**self.mantissa_bits - 1:
            return "nan"
        return "finite"

    def _fields(self, code: int) -> tuple[int, int]:
        return divmod(code % self.sign, 2**self.mantissa_bits)

    def value(self, code: int) -> Fraction:
        """The number that a code stands for; both zeros give 0.

        Raises:
            ValueError: the code stands for NaN or an infinity.
        """
        kind = self.kind(code)
        if kind != "finite":
            raise ValueError(f"element code {code} of {self.name} is {kind}, not a number")
        return self._values[code]

    @cached_property
    def _values(self) -> list[Fraction]:
        """The number that each code would stand for if all of them were finite."""
        return [self._value(code) for code in range(2 * self.sign)]

    def _value(self, code: int) -> Fraction:
        if self.twos_complement:
            steps = code - 2 * self.sign if code >= self.sign else code
            return Fraction(steps, self.sign // 2)
        exponent, mantissa = self._fields(code)
        fraction = Fraction(mantissa, 2**self.mantissa_bits)
        if exponent == 0:  # subnormal: no hidden one, the exponent of the smallest normal numbers
            magnitude = fraction * Fraction(2) ** (1 - self.bias)
        else:
            magnitude = (1 + fraction) * Fraction(2) ** (exponent - self.bias)
        return -magnitude if code >= self.sign else magnitude

    def code(self, magnitude: int, negative: bool) -> int:
        """The code of a magnitude code, or of its negative; the negative of 0 is 0 in two's complement."""
        if self.twos_complement:
            return (2 * self.sign - magnitude) % (2 * self.sign) if negative else magnitude
        return self.sign + magnitude if negative else magnitude

    def negated(self, code: int) -> int:
        """The code of the negative of what a code stands for."""
        return -code % (2 * self.sign) if self.twos_complement else code ^ self.sign

    @property
    def fraction_bits(self) -> int:
        """The bits behind the leading one of the largest magnitude."""
        return self.mantissa_bits - 1 if self.twos_complement else self.mantissa_bits

    @cached_property
    def grid(self) -> list[Fraction]:
        """The magnitudes in rising order; the place of each is its code, as the codes without sign rise too."""
        codes = [code for code in range(self.sign) if self.kind(code) == "finite"]
        grid = [self.value(code) for code in codes]
        assert codes == list(range(len(codes)))
        assert grid == sorted(grid)
        return grid

    @property
    def largest(self) -> Fraction:
        """The largest magnitude."""
        return self.grid[-1]

    @cached_property
    def top(self) -> int:
        """The code of the largest magnitude."""
        return len(self.grid) - 1

    @cached_property
    def largest_exponent(self) -> int:
        """The exponent of the largest power of two on the grid."""
        return floor_log2(self.largest.numerator, self.largest.denominator)

    @cached_property
    def prescale(self) -> Fraction:
        """The largest magnitude over the power of two above it."""
        return self.largest / Fraction(2) ** (self.largest_exponent + 1)

    @cached_property
    def per_one(self) -> int:
        """How many of the smallest positive magnitude make 1."""
        return int(1 / self.grid[1])

    @cached_property
    def counts(self) -> list[int]:
        """The grid in units of the smallest positive magnitude, as integers."""
        counts = [int(value * self.per_one) for value in self.grid]
        assert [Fraction(count, self.per_one) for count in counts] == self.grid
        return counts

    @cached_property
    def signed_counts(self) -> list[int]:
        """Every code's number in units of the smallest positive magnitude, of special codes what it would be."""
        return [int(value * self.per_one) for value in self._values]


E2M1 = Element("E2M1", 2, 1, bias=1)
E4M3 = Element("E4M3", 4, 3, bias=7, specials="nan")
E5M2 = Element("E5M2", 5, 2, bias=15, specials="ieee")
E2M3 = Element("E2M3", 2, 3, bias=1)
E3M2 = Element("E3M2", 3, 2, bias=3)
E1M2 = Element("E1M2", 1, 2, bias=1)
INT8 = Element("INT8", 0, 7, bias=0, twos_complement=True)
ELEMENTS = {element.name: element for element in (E2M1, E4M3, E5M2, E2M3, E3M2, E1M2, INT8)}
GRID = E2M1.counts  # in halves


def element_value(code: int, element: Element = E2M1) -> Fraction:
    """The number that a code stands for; see `Element.value`."""
    return element.value(code)


def round_ratio(
    num: int, den: int, rounding: Rounding, r: int | None = None, R: int = 16, element: Element = E2M1
) -> int:
    """The magnitude code of num / den >= 0; see `round_element`."""
    if rounding not in ("rne", "rna", "rtz", "sr"):
        raise ValueError(f"unknown rounding {rounding!r}")
    counts, count = element.counts, num * element.per_one
    low = bisect_right(counts, count // den) - 1
    if low == element.top or rounding == "rtz":
        return low
    below, gap = count - counts[low] * den, (counts[low + 1] - counts[low]) * den
    if rounding == "sr":
        if r is None or not (1 <= R <= 22 and 0 <= r < 1 << R):
            raise ValueError(f"stochastic rounding needs 0 <= r < 2^R and 1 <= R <= 22, not r={r}, R={R}")
        return low + ((below << R) // gap + r >= 1 << R)
    above = gap - below
    if below != above:
        return low + (above < below)
    return low + 1 if rounding == "rna" else low + (low & 1)


def round_element(
    v: Fraction, rounding: Rounding, r: int | None = None, R: int = 16, element: Element = E2M1
) -> int:
    """The magnitude code of v >= 0; everything from the largest magnitude up saturates to it.

    rne: nearest, a tie goes to the even code. rna: nearest, a tie goes away from zero. rtz: toward zero.
    sr: with f = how far v is along the gap between its neighbours, up iff floor(f 2^R) + r >= 2^R.
    """
    if v < 0:
        raise ValueError(f"a magnitude is not negative: {v}")
    return round_ratio(v.numerator, v.denominator, rounding, r, R, element)
