"""Shows that two addresses are one by writing both as polynomials in the variables, which solvers find hard.

A term of w bits is its polynomial modulo 2^w. Where it is widened its value itself counts: then the polynomial has to
lie within the term's range for all values of the variables, or to be a part of an offset that is known to be small.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prove.terms import Term

Monomial = tuple[str, ...]


class NotAPolynomial(Exception):
    """A term has another operation than those of a polynomial, or may leave its range."""


@dataclass
class Polynomials:
    """Polynomials of terms. `small` has no negative coefficient, and is known to be below 2^31."""

    small: dict[Monomial, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def of(self, term: Term) -> dict[Monomial, int]:
        """Return the polynomial that a term is, modulo 2 to its width."""
        match term.op:
            case "const":
                value = term.value
                return _clean({(): value - (1 << term.width) if value >> term.width - 1 else value})
            case "var":
                self.widths[term.value] = term.width
                return {(term.value,): 1}
            case "add" | "sub":
                a, b = map(self.of, term.args)
                return _sum(a, b, 1 if term.op == "add" else -1)
            case "mul":
                a, b = map(self.of, term.args)
                out: Counter[Monomial] = Counter()
                for m, x in a.items():
                    for n, y in b.items():
                        out[tuple(sorted(m + n))] += x * y
                return _clean(out)
            case "concat":
                return self._of_concat(term)
            case "sext":
                return self._exact(term.args[0], signed=True)
            case "extract" if term.value[1] == 0:
                return self.of(term.args[0])
        raise NotAPolynomial(term.op)

    def _of_concat(self, term: Term) -> dict[Monomial, int]:
        out: dict[Monomial, int] = {}
        place = term.width
        for part in term.args:
            place -= part.width
            if part.constant != 0:
                top = place + part.width == term.width
                if part.constant is not None:
                    found = {(): part.value}
                else:
                    found = self.of(part) if top else self._exact(part, signed=False)
                out = _sum(out, {m: x << place for m, x in found.items()}, 1)
        return out

    def _exact(self, term: Term, *, signed: bool) -> dict[Monomial, int]:
        """Return the polynomial that is a term's value, and not another number modulo 2 to its width."""
        shift = 0
        if term.op == "extract" and term.value[0] == term.args[0].width - 1:
            shift, term = term.value[1], term.args[0]
        found = self.of(term)
        if any(x & (1 << shift) - 1 for x in found.values()):
            raise NotAPolynomial("a quotient has a remainder")
        highest = 1 << term.width - signed
        low, high = self._range(found)
        within = (-highest if signed else 0) <= low and high < highest
        if not (within or (highest >= 1 << 31 and self._is_part(found))):
            raise NotAPolynomial(f"{found} may leave {term.width} bits")
        return {m: x >> shift for m, x in found.items()}

    def _range(self, polynomial: dict[Monomial, int]) -> tuple[int, int]:
        low = high = 0
        for monomial, x in polynomial.items():
            largest = x
            for name in monomial:
                largest *= (1 << self.widths[name]) - 1
            low, high = low + min(largest, 0 if monomial else x), high + max(largest, 0 if monomial else x)
        return low, high

    def _is_part(self, polynomial: dict[Monomial, int]) -> bool:
        """Return whether a polynomial is between 0 and `small`, term by term."""
        return all(0 <= x <= self.small.get(m, 0) for m, x in polynomial.items())


def _sum(a: dict[Monomial, int], b: dict[Monomial, int], sign: int) -> dict[Monomial, int]:
    out = Counter(a)
    for m, x in b.items():
        out[m] += sign * x
    return _clean(out)


def _clean(found: dict[Monomial, int]) -> dict[Monomial, int]:
    return {m: x for m, x in found.items() if x}


def is_place(address: Term, pointer: Term, offset: Term, size: int, *, small: bool) -> bool:
    """Return whether an address is pointer + offset * size, as polynomials show.

    Args:
        address: of 64 bits.
        pointer: a variable.
        offset: what the place is, in entries; all its variables count up from 0.
        size: bytes of an entry.
        small: whether the offset is known to be below 2^31.
    """
    polynomials = Polynomials()
    try:
        expected = polynomials.of(offset)
        if small and all(x > 0 for x in expected.values()):
            polynomials.small = expected
        found = _sum(polynomials.of(address), polynomials.of(pointer), -1)
    except NotAPolynomial:
        return False
    return found == _clean({m: x * size for m, x in expected.items()})
