"""The clauses of the specification as terms, written from its text: integers, and no floating point.

Bits of float32 come in, codes and bytes go out. Every number of a format is read from `mxref.formats`; what is computed
with them shares no code with the package. tests/prove/test_prove.py holds these terms to the scalar oracle and to the
golden vectors; spec/smt has them as SMT-LIB text.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mxref.formats import E8M0, BlockFormat, ElementFormat, ScaleFormat
from mxref.formats.elements import Negatives, Specials
from prove.terms import Term, apply, choose, concat, const, extract, widen

INFINITY = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
SIGN = 0x80000000


def exponent(y: Term) -> Term:
    """Return E, the biased exponent of a float32, eight bits."""
    return extract(y, 30, 23)


def mantissa(y: Term) -> Term:
    """Return m, 23 bits."""
    return extract(y, 22, 0)


# scale.rst


def largest(magnitudes: Sequence[Term]) -> Term:
    """Return the largest of some integers. Clause scale.amax."""
    out = magnitudes[0]
    for magnitude in magnitudes[1:]:
        out = choose(out.below(magnitude), magnitude, out)
    return out


def goes_up(u: Term, rule: str, element: ElementFormat) -> Term:
    """Return whether a rule adds 1 to the exponent. Clauses scale.rule.floor, .ceil, .rceil, .even."""
    m, p = mantissa(u), element.precision
    match rule:
        case "floor":
            return const(0, 1)
        case "ceil":
            return ~m.equal(0)
        case "rceil":
            fraction = Fraction(element.max_value) / Fraction(2) ** element.max_exponent - 1
            return const(int(fraction * 2**23), 23).below(m)
        case "even":
            return const(2**23 - 2 ** (22 - p), 23).upto(m)
    raise ValueError(f"no rule {rule}")


def scale_byte(u: Term, rule: str, element: ElementFormat, zero_scale: int = 0) -> Term:
    """Return the byte of a block. Clauses scale.clamp, scale.zero, scale.nonfinite and those of `goes_up`."""
    e = widen(exponent(u), 32) - 127 - element.max_exponent + widen(goes_up(u, rule, element), 32)
    lowest, highest = const(-127, 32), const(127, 32)
    clamped = choose(e.signed_below(lowest), lowest, choose(highest.signed_below(e), highest, e))
    byte = extract(clamped + 127, 7, 0)
    byte = choose(u.equal(0), const(zero_scale, 8), byte)
    return choose(u.below(INFINITY), byte, const(E8M0.nan_code, 8))


def e8m0_cast(x: Term, nearest: bool) -> Term:
    """Return a cast of a float32 to E8M0. Clause formats.e8m0.cast."""
    e, m = exponent(x), mantissa(x)
    if not nearest:
        return e
    up = choose(e.equal(0), const(2**22, 23).below(m), const(2**22, 23).upto(m))
    return choose(e.equal(255), e, e + widen(up, 8))


# rounding.rst


def grid(element: ElementFormat) -> list[int]:
    """Return the magnitudes in units of the smallest. Clause formats.element."""
    unit = Fraction(2) ** element.unit_exponent
    return [int(Fraction(x) / unit) for x in element.magnitudes]


def scaled(y: Term, byte: Term, element: ElementFormat, digits: int = 0, prescale: bool = False) -> Term:
    """Return v of clause rounding.scaled in halves of the smallest magnitude, exact, and its sticky bit below.

    A number much above M stays above M, and is smaller.

    Args:
        y: a finite float32.
        byte: of a finite block.
        element: the format.
        digits: binary digits after the halves, before the sticky bit.
        prescale: whether it is v' with the prescale instead. Clause rounding.prescale.
    """
    e = exponent(y)
    significand = concat(choose(e.equal(0), const(0, 1), const(1, 1)), mantissa(y))
    e = choose(e.equal(0), const(1, 8), e)
    if prescale:
        significand, fraction = _prescaled(significand, element)
        digits_of_v = digits - fraction
    else:
        digits_of_v = digits
    # |y| is significand 2^(e - 150), X is 2^(byte - 127), and a half 2^(unit_exponent - 1).
    shift = widen(e, 16) - widen(byte, 16) - 22 - element.unit_exponent + digits_of_v
    cap = (2 * grid(element)[-1]).bit_length() + 1 + digits
    width = significand.width + cap
    left = choose(const(cap, 16).signed_below(shift), const(cap, 16), shift)
    right = const(0, 16) - shift
    most = const(significand.width + 1, 16)
    right = choose(most.signed_below(right), most, right)
    size = max(width, 16)
    whole = widen(significand, size)
    up = whole << widen(left, size)
    down = whole >> widen(right, size)
    lost = ~(down << widen(right, size)).equal(whole)
    negative = shift.signed_below(0)
    return concat(choose(negative, down, up), negative & lost)


def _prescaled(significand: Term, element: ElementFormat) -> tuple[Term, int]:
    """Return a significand times the prescale, rounded to 24 bits to nearest even, and how many bits are a fraction.

    A v below 2^-126, of which this keeps too many bits, has code 0 under every rounding.
    """
    c = Fraction(element.max_value) / Fraction(2) ** (element.max_exponent + 1)
    fraction = c.denominator.bit_length() - 1
    size = 24 + c.numerator.bit_length()
    product = widen(significand, size) * c.numerator
    out = product
    for drop in range(1, size - 23):
        half = extract(product, drop - 1, drop - 1)
        odd = extract(product, drop, drop)
        below = const(0, 1) if drop == 1 else ~extract(product, drop - 2, 0).equal(0)
        kept = widen(extract(product, size - 1, drop), size) + widen(half & (below | odd), size)
        out = choose(const(1 << 23 + drop, size).upto(product), kept << drop, out)
    return out, fraction


def _first_that(conditions: Sequence[Term], width: int) -> Term:
    """Return how many conditions hold, of which each implies those before it."""
    out = const(0, width)
    for count, condition in enumerate(conditions, 1):
        out = choose(condition, const(count, width), out)
    return out


def rounded(v: Term, element: ElementFormat, rounding: str) -> Term:
    """Return the magnitude code of a `scaled` v. Clauses rounding.rne, .rna, .rtz, rounding.saturate."""
    points, conditions = grid(element), []
    for code in range(1, len(points)):
        if rounding == "rtz":
            conditions.append(const(4 * points[code], v.width).upto(v))
            continue
        middle = const(2 * (points[code - 1] + points[code]), v.width)
        tie_goes_up = rounding == "rna" or code % 2 == 0
        conditions.append(middle.upto(v) if tie_goes_up else middle.below(v))
    return _first_that(conditions, element.bits)


def stochastic(v: Term, r: Term, bits: int, element: ElementFormat) -> Term:
    """Return the magnitude code under SR. Clauses rounding.sr, rounding.saturate.

    Args:
        v: `scaled` with `bits` digits.
        r: the random integer, as wide as v.
        bits: R.
        element: the format.
    """
    points = grid(element)
    conditions = []
    for code in range(1, len(points)):
        below, gap = points[code - 1], points[code] - points[code - 1]
        l = const(below << (2 + bits), v.width)  # noqa: E741 the letter of the clause
        # The digits of v - l behind the point are R, one for halves, and the sticky bit; those of the gap fall off.
        t = (v - l) >> (1 + gap.bit_length())
        upper = const(points[code] << (2 + bits), v.width).upto(v)
        conditions.append(upper | (l.upto(v) & const(1 << bits, v.width).upto(t + r)))
    return _first_that(conditions, element.bits)


def signed(code: Term, y: Term, element: ElementFormat) -> Term:
    """Return the code of an element from its magnitude code. Clause rounding.sign."""
    negative = extract(y, 31, 31)
    if element.negatives is Negatives.TWOS_COMPLEMENT:
        return choose(negative, const(0, element.bits) - code, code)
    return choose(negative, code | element.sign, code)


def element_code(
    y: Term, byte: Term, element: ElementFormat, rounding: str = "rne", prescale: bool = False
) -> Term:
    """Return the code that is stored for an element under a byte. Clause scale.nonfinite and those above."""
    v = scaled(y, byte, element, 0, prescale)
    code = signed(rounded(v, element, rounding), y, element)
    return choose(byte.equal(E8M0.nan_code), const(0, element.bits), code)


# random.rst

PHILOX = (0xD2511F53, 0xCD9E8D57)
"""The factors of clause random.philox."""
Words = tuple[Term, Term, Term, Term]


def philox(counter: Words, key: tuple[Term, Term]) -> Words:
    """Return the four words of a call. Clause random.philox."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = key[0] + turn * 0x9E3779B9, key[1] + turn * 0xBB67AE85
        p0, p1 = widen(c0, 64) * PHILOX[0], widen(c2, 64) * PHILOX[1]
        c0, c1, c2, c3 = (
            extract(p1, 63, 32) ^ c1 ^ k0, extract(p1, 31, 0), extract(p0, 63, 32) ^ c3 ^ k1, extract(p0, 31, 0)
        )  # fmt: skip
    return c0, c1, c2, c3


def random_integer(words: Sequence[Term], element: int, bits: int) -> Term:
    """Return r of an element from the words of its call. Clause random.elements.

    A call is of eight elements, and of four for R above 16.
    """
    if bits > 16:
        return words[element % 4] >> (32 - bits)
    j = element % 8
    half = extract(words[j >> 1], 16 * (j & 1) + 15, 16 * (j & 1))
    return half >> (16 - bits)


# packing.rst


def packed(codes: Sequence[Term]) -> Term:
    """Return codes as one little-endian number. Clauses packing.nibbles, packing.sixes, packing.bytes.

    Two codes of 4 bits to a byte, the first in the low half; four of 6 bits to three bytes, the lowest bits first; one
    of 8 bits: in each, the codes of a block follow each other from the lowest bit on.
    """
    return concat(*reversed(codes))


# quantize.rst


def decoded(code: Term, byte: Term, element: ElementFormat) -> Term:
    """Return the float32 that a code under a byte stands for. Clauses dequantize.value, .overflow, .nan.

    A table of the grid by magnitude code; the sign of a zero is kept.
    """
    two = element.negatives is Negatives.TWOS_COMPLEMENT
    top = extract(code, element.bits - 1, element.bits - 1)
    magnitude = choose(top, const(0, element.bits) - code, code) if two else code & (element.sign - 1)
    value = const(0, 31)
    points = [*grid(element), *([2 * element.sign // 2] if two else [])]
    for at, count in enumerate(points):
        if count:
            value = choose(magnitude.equal(at), _float32_of(count, byte, element), value)
    if element.specials is Specials.IEEE:
        value = choose(magnitude.equal(element.max_code + 1), const(INFINITY, 31), value)
    sign = top & ~magnitude.equal(0) if two else top
    out = concat(sign, value)
    nan = byte.equal(E8M0.nan_code)
    if element.specials is not Specials.NONE:
        last = element.max_code + (1 if element.specials is Specials.IEEE else 0)
        nan = nan | const(last, element.bits).below(magnitude)
    return choose(nan, const(0x7FC00000, 32), out)


def _float32_of(count: int, byte: Term, element: ElementFormat) -> Term:
    """Return the 31 bits of count units times 2^(byte - 127): exact, or infinity from 2^128 on."""
    top = count.bit_length() - 1
    m = const((count << 23 >> top) & 0x7FFFFF, 23)
    e = widen(byte, 16) + top + element.unit_exponent
    normal = concat(extract(e, 7, 0), m)
    shift = const(1, 16) - e
    subnormal = concat(const(0, 7), (concat(const(1, 1), m) >> widen(shift, 24)) & 0xFFFFFF)
    small = e.signed_below(1)
    large = const(254, 16).signed_below(e)
    return choose(small, subnormal, choose(large, const(INFINITY, 31), normal))


def to_bfloat16(x: Term) -> Term:
    """Return a float32 rounded to bfloat16, to nearest even; NaN is the canonical one. Clause dequantize.value."""
    up = (x & 0xFFFF) + 0x7FFF + widen(extract(x, 16, 16), 32)
    return extract(x, 31, 16) + widen(extract(up, 16, 16), 16)


def scale_value(byte: Term, scale: ScaleFormat) -> tuple[Term, Term]:
    """Return the significand and the exponent, 16 bits, of a scale with a mantissa. Clause formats.scale."""
    m = scale.mantissa_bits
    field = extract(byte, 7, m)
    none = field.equal(0)
    significand = concat(~none, extract(byte, m - 1, 0))
    return significand, widen(choose(none, const(1, field.width), field), 16) - (scale.bias + m)


def value_of(code: Term, byte: Term, made: BlockFormat, tensor: Term | None) -> Term:
    """Return the float32 of a code in a format, under the scale of the tensor if there is one.

    Clauses dequantize.value, .overflow, .nan. The product with the tensor's scale is one rounded product: P X, of few
    bits, is a float32.
    """
    if made.scale.powers:
        return decoded(code, byte, made.element)
    element = made.element
    significand, exponent_of = scale_value(byte, made.scale)
    points = grid(element)
    size = significand.width + points[-1].bit_length()
    magnitude = code & (element.sign - 1)
    count = const(0, size)
    for at, units in enumerate(points):
        if units:
            count = choose(magnitude.equal(at), widen(significand, size) * units, count)
    value = const(0, 31)
    for top in range(size):
        m = extract(widen(count, 24) << (23 - top), 22, 0)
        e = extract(exponent_of + element.unit_exponent + 127 + top, 7, 0)
        value = choose(const(1 << top, size).upto(count), concat(e, m), value)
    product = concat(const(0, 1), value)
    if tensor is not None:
        product = apply("fmul", product, tensor)
    sign = extract(code, element.bits - 1, element.bits - 1)
    out = product | concat(sign, const(0, 31))
    return choose(byte.upto(made.scale.max_code), out, const(0x7FC00000, 32))
