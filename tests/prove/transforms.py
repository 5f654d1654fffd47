"""The theorem on a row kernel with a Hadamard transform: its sums and differences are the clause's, in their order.

Float32 addition is not associative, so no solver is asked: the kernel's terms of the transformed elements are the
clause's terms, operation by operation, or there is no proof. Then each stands for one free float32, and the proof goes
on as without a transform.

A norm that is a power of two may be left to the scale. That rounds nothing where all numbers are multiples of 2^-133:
the inputs are, and so are sums and differences of such numbers, which is a step of the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from prove.clauses import INFINITY, MAGNITUDE
from prove.kernels import Case
from prove.layouts import Layout
from prove.questions import NotProved, Step
from prove.terms import Term, apply, choose, const, extract, in_order, substitute, var
from prove.theorems import Proof, is_maximum

_FIRST = 16
"""Exponent field up to which a float32 has bits below 2^-133."""


def is_multiple(x: Term) -> Term:
    """Return whether a float32 is a multiple of 2^-133, or not finite."""
    field = extract(x, 30, 23)
    out = const(1, 1)
    for exponent in range(_FIRST, 0, -1):
        here = field.upto(1) if exponent == 1 else field.equal(exponent)
        out = choose(here, extract(x, 16 - exponent, 0).equal(0), out)
    return out


class _Transformed(Proof):
    """The proof of what follows the transform, of free float32 elements."""

    def __init__(
        self, case: Case, layout: Layout, elements: tuple[list[Term], Term], norm: Term | None
    ) -> None:
        super().__init__(replace(case, dtype="float32"), layout)
        self.inputs = self.ys = [var(f"x{j}", 32) for j in range(self.k)]
        self.is_amax = is_maximum(self.amax, var("amax_input", 32))
        self._elements_of = elements
        self._norm = norm
        """Of the clause, where the kernel leaves it to the scale."""
        if norm is not None:
            self.is_amax = self.is_amax & is_multiple(self.amax)

    @property
    def is_folded(self) -> bool:
        """Whether the norm is left to the scale."""
        return self._norm is not None

    @property
    def elements(self) -> tuple[list[Term], Term]:
        return self._elements_of

    def normed(self, y: Term) -> Term:
        return y if self._norm is None else apply("fmul", y, self._norm)

    def known(self, y: Term) -> tuple[Term, ...]:
        return () if self._norm is None else (is_multiple(y),)

    def contents(self) -> Iterator[Step]:
        if self._norm is not None:
            yield from self._norms(self._norm)
        yield from super().contents()

    def _norms(self, norm: Term) -> Iterator[Step]:
        """Yield that the norm keeps the order of magnitudes and the sign, and that sums are multiples of 2^-133."""
        a, b = var("a", 32), var("b", 32)
        of_a, of_b = (apply("fmul", x, norm) & MAGNITUDE for x in (a, b))
        numbers = (a.upto(b), b.upto(INFINITY))
        yield Step("norm: an order is kept", of_a.upto(of_b), numbers)
        number = (a & MAGNITUDE).upto(INFINITY)
        same = extract(apply("fmul", a, norm), 31, 31).equal(extract(a, 31, 31))
        yield Step("norm: the sign is kept", same, (number,))
        given = (is_multiple(a), is_multiple(b))
        for op in ("fadd", "fsub"):
            yield Step("norm: multiples", is_multiple(apply(op, a, b)), given)


class TransformProof(Proof):
    """The steps for one kernel of one case with a transform."""

    def __init__(self, case: Case, layout: Layout) -> None:
        super().__init__(case, layout)
        self.n = case.hadamard
        bits = np.array([1 / np.sqrt(self.n)], np.float32).view(np.uint32)[0]  # clause hadamard.factor
        self._norm = const(int(bits), 32)

    @cached_property
    def _sums(self) -> list[Term]:
        """The elements after the stages. Clause hadamard.order."""
        z = list(self.ys)
        for first in range(0, self.k, self.n):
            h = 1
            while h < self.n:
                for i in range(first, first + self.n):
                    if not (i - first) & h:
                        s, t = z[i], z[i + h]
                        z[i], z[i + h] = apply("fadd", s, t), apply("fsub", s, t)
                h *= 2
        return z

    @cached_property
    def _rest(self) -> _Transformed:
        words, byte = self.layout.stored
        products = [apply("fmul", z, self._norm) for z in self._sums]
        known = set(in_order([*words, byte]))
        folded = not any(product in known for product in products)
        elements = self._sums if folded else products
        free = [var(f"x{j}", 32) for j in range(self.k)]
        if self.inputs[0].width == 32:
            raise NotProved("hadamard: inputs of float32")
        *words, byte = substitute([*words, byte], dict(zip(elements, free, strict=True)))
        if any(v in self.inputs for v in in_order([*words, byte])):
            raise NotProved(
                "hadamard: what is quantized is not made by the clause's operations in their order"
            )
        return _Transformed(self.case, self.layout, (words, byte), self._norm if folded else None)

    def steps(self) -> list[Step]:
        rest = self._rest.contents()
        inputs = Step("norm: multiples", is_multiple(self.ys[0]))
        own = [inputs] if self._rest.is_folded else []
        return list(dict.fromkeys([*self.layout.places(), *own, *rest]))

    def whole_words(self) -> Iterator[Step]:
        return iter(())

    def blocks_for(self, blocks: np.ndarray) -> np.ndarray:
        """Return blocks of input bits whose transform is near some blocks of float32 bits."""
        with np.errstate(all="ignore"):
            z = (
                blocks.astype(np.uint32)
                .view(np.float32)
                .astype(np.float64)
                .reshape(-1, self.k // self.n, self.n)
            )
            matrix = np.array([[1]])
            while len(matrix) < self.n:
                matrix = np.block([[matrix, matrix], [matrix, -matrix]])
            scale = 1 / self.n if self._rest.is_folded else 1 / np.sqrt(self.n)
            x = (z @ matrix * scale).astype(np.float32).reshape(-1, self.k)
        if self.case.dtype == "float16":
            return x.astype(np.float16).view(np.uint16).astype(np.uint64)
        return x.view(np.uint32).astype(np.uint64) >> np.uint64(16 if self.case.dtype == "bfloat16" else 0)
