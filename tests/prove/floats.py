"""Operations of floats that are terms of bits alone: comparisons, narrowing, and the casts to 8 bits.

`terms` has the operations whose meaning is that of IEEE 754 arithmetic; the solver has a theory for those.
"""

from __future__ import annotations

import numpy as np

from mxref.formats import BLOCK_FORMATS
from prove.clauses import MAGNITUDE
from prove.terms import Term, choose, concat, const, digest_of, extract, var, widen

_FLOAT8 = {"f8E4M3FN": ("mxfp8_e4m3", 0x7F), "f8E5M2": ("mxfp8_e5m2", 0x7F)}
"""By the type's name in Triton's IR: the format, and the code of a NaN as NVIDIA's conversions give it."""


def _infinity(width: int) -> int:
    return 0x7F800000 if width == 32 else 0x7F80


def is_nan(x: Term) -> Term:
    """Return whether a float32 or bfloat16 is a NaN."""
    return const(_infinity(x.width), x.width - 1).below(extract(x, x.width - 2, 0))


def widened(x: Term) -> Term:
    """Return a bfloat16 as a float32."""
    return concat(x, const(0, 16))


def narrowed(x: Term) -> Term:
    """Return a float32 to the nearest bfloat16, ties to even; a NaN becomes a quiet one."""
    kept, lowest = extract(x, 31, 16), extract(x, 16, 16)
    up = extract(x + 0x7FFF + widen(lowest, 32), 31, 16)
    return choose(is_nan(x), kept | 0x40, up)


def compared(predicate: str, a: Term, b: Term) -> Term:
    """Return a comparison of MLIR's cmpf."""
    numbers = ~(is_nan(a) | is_nan(b))
    top = 1 << (a.width - 1)
    zeros = extract(a | b, a.width - 2, 0).equal(0)
    # Bits as integers whose order is that of the numbers.
    place = [choose(x.signed_below(0), ~x, x | top) for x in (a, b)]
    less, equal = place[0].below(place[1]) & ~zeros, a.equal(b) | zeros
    found = {
        "oeq": equal,
        "olt": less,
        "ole": less | equal,
        "ogt": ~(less | equal),
        "oge": ~less,
        "one": ~equal,
    }
    if predicate[0] == "u":
        return found["o" + predicate[1:]] | ~numbers
    return found[predicate] & numbers


def clamped(x: Term, low: Term, high: Term) -> Term:
    """Return a number between two; a NaN becomes the lower one, since minima and maxima of numbers pass over NaN."""
    x = choose(is_nan(x) | compared("olt", x, low), low, x)
    return choose(compared("olt", high, x), high, x)


_INFINITY = 0x7F800000


def log2_of_power(x: Term) -> Term:
    """Return log2 of a float32 that has no mantissa."""
    e = extract(x, 30, 23)
    number = Term("itof", 32, (widen(e, 32) - 127,))
    negative = const(_INFINITY | 1 << 31, 32)
    found = choose(e.equal(255), const(_INFINITY, 32), number)
    found = choose(extract(x, 31, 31), const(0x7FC00000, 32), found)
    return choose(e.equal(0), negative, found)


def is_whole(x: Term) -> bool:
    """Return whether a term is a whole number, an infinity or a NaN by its form."""
    if x.op == "ite":
        return is_whole(x.args[1]) and is_whole(x.args[2])
    return x.op == "itof" or (x.constant is not None and x.constant & MAGNITUDE >= _INFINITY)


def exp2_of_whole(x: Term) -> Term:
    """Return 2 to a whole number from -127 to 127; of any other number, any float32."""
    whole = Term("ftoi", 32, (x,))
    in_range = (whole + 127).below(255) & Term("itof", 32, (whole,)).equal(x)
    power = concat(const(0, 1), extract(whole + 127, 7, 0), const(0, 23))
    power = choose((whole + 127).equal(0), const(1 << 22, 32), power)
    return choose(in_range, power, var(f"exp2 of {digest_of(x)[:16]}", 32))


def to_float8(x: Term, name: str) -> Term:
    """Return a float32 as a float of 8 bits: to nearest even, the largest magnitude for all above it, infinity too."""
    made, nan = _FLOAT8[name]
    points = [np.float64(p) for p in BLOCK_FORMATS[made].element.magnitudes]
    magnitude = extract(x, 30, 0)
    code = const(0, 7)
    for at in range(1, len(points)):
        middle = int(np.float32((points[at - 1] + points[at]) / 2).view(np.uint32))
        bound = const(middle, 31)
        reached = bound.upto(magnitude) if at % 2 == 0 else bound.below(magnitude)
        code = choose(reached, const(at, 7), code)
    code = choose(is_nan(x), const(nan, 7), code)
    return concat(extract(x, 31, 31), code)
