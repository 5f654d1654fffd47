"""Checks of one treatment, for a function that takes only values.

The values are those of the whole suite. A failure counts under the clause that decides its first wrong bit, unless
a plainer request shows that the transform, the tiles, the input type or the strides are at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.blame import blame
from mxref.conformance.checking import Check, Plan, Subject
from mxref.conformance.checks.places import permuted
from mxref.conformance.checks.sweep import crafted_tiles, every_bfloat16
from mxref.conformance.clauses import storage_clause
from mxref.conformance.dump import compare_arrays
from mxref.conformance.finding import Blamed, quantize_check
from mxref.conformance.function import FunctionBackend, Stored
from mxref.conformance.outcome import CheckResult
from mxref.conformance.requests.crafted import any_bits, crafted_blocks, heavy_tailed, tame
from mxref.conformance.requests.quantizing import Blocks, MalformedAnswer, Place, Request
from mxref.formats import BlockShape
from mxref.plan import dtype_name
from mxref.steps.random import Stream

_SIZES = ((1, 1), (3, 3), (33, 1), (130, 2), (7, 40))
"""Rows and units of the block axis."""
_PROTOCOL = "conformance.protocol"


@dataclass(frozen=True)
class Ways:
    """How a function is called."""

    axis: int
    """The block axis of the matrices that it is given, 0 or 1."""
    stream: Stream | None
    """The random stream whose bits it draws."""
    dtypes: tuple[str, ...]
    """Input types."""
    finite: bool
    """Whether blocks with NaN or Inf are left out."""
    strided: bool
    """Whether it is also given views of larger arrays."""
    rows: int
    """The number of rows is a multiple of this."""
    unit: int
    """The length of the block axis is a multiple of this."""


def checks(plan: Plan, ways: Ways) -> Iterator[Check]:
    """Yield the checks of a treatment, `plan.base`."""
    whole = _Questions(plan, ways)
    yield whole.first()
    yield from whole.order()
    if plan.base.hadamard:
        yield _of_clause("hadamard.order", "one value per Hadamard group", whole.impulses)
    for dtype in ways.dtypes:
        for title, x in _values(plan, ways):
            yield whole.found(f"{title}, {dtype}", whole.request(x, dtype))
    for rows, units in _SIZES:
        shape = (rows * ways.rows, units * ways.unit)
        x = tame(np.random.default_rng(rows), shape, made=plan.format)
        yield whole.found(f"shape {shape}", whole.request(x, ways.dtypes[0]))
    if ways.strided:
        for layout in ("transposed", "every second row and column", "columns out of the middle"):
            yield whole.strided(layout)


def _values(plan: Plan, ways: Ways) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield titles and matrices, block axis last, that fit into the multiples of `ways`."""
    rng = np.random.default_rng(plan.seed)
    crafted = crafted_blocks(plan.format, plan.full).x
    yield "crafted blocks", _fitted(_finite(crafted, ways), ways)
    if plan.full:
        yield "every bfloat16", _fitted(every_bfloat16(plan), ways)
    if plan.base.block is BlockShape.TILE:
        shape = 2 * np.lcm(plan.format.k, ways.rows), 2 * ways.unit
        tiles = crafted_tiles(rng, tuple(map(int, shape)), 1, plan.format.k)
        yield "tiles", np.where(np.isfinite(tiles), tiles, 1.0) if ways.finite else tiles
    shape = 4 * ways.rows, 4 * ways.unit
    for number in range(40 if plan.full else 4):
        drawn = any_bits(rng, shape, ways.finite, element=plan.element)
        for title, x in (
            ("any bits", np.where(np.isfinite(drawn), drawn, np.float32(1)) if ways.finite else drawn),
            ("heavy tails", heavy_tailed(rng, shape)), ("normal draws", rng.standard_normal(shape)),
        ):  # fmt: skip
            yield f"{title} {number}", x.astype(np.float32)


def _finite(blocks: NDArray[np.float32], ways: Ways) -> NDArray[np.float32]:
    return blocks[np.isfinite(blocks).all(axis=1)] if ways.finite else blocks


def _fitted(blocks: NDArray[np.float32], ways: Ways) -> NDArray[np.float32]:
    """Return blocks [N, k] as a matrix whose rows are `unit` long, the last ones filled up with ones."""
    together = ways.rows * ways.unit
    flat = blocks.reshape(-1)
    filled = np.concatenate([flat, np.ones(-flat.size % together, np.float32)])
    return filled.reshape(-1, ways.unit)


@dataclass(frozen=True)
class _Questions:
    """Makes requests of one treatment, and checks of them."""

    plan: Plan
    ways: Ways

    def request(self, x: NDArray[Any], dtype: str, **rest: Any) -> Request:
        """Return the request for a matrix whose block axis is last."""
        turned = np.ascontiguousarray(x if self.ways.axis == 1 else x.T)
        typed = replace(self.plan, dtype=dtype).cast(turned)
        if self.ways.finite:  # a narrow type may hold less
            typed = np.where(np.isfinite(typed.astype(np.float32)), typed, typed.dtype.type(1))
        return Request(typed, self.plan.base, axis=self.ways.axis, rng=self.ways.stream, **rest)

    @property
    def impulses(self) -> Request:
        """One power of two in each Hadamard group: its transform has equal magnitudes, which every rule keeps."""
        n = self.plan.base.hadamard
        x = np.zeros((np.lcm(n, self.ways.rows), self.ways.unit), np.float32)
        for group in range(self.ways.unit // n):
            x[np.arange(len(x)), group * n + np.arange(len(x)) % n] = 4.0**group
        return self.request(x, self.ways.dtypes[0])

    def first(self) -> Check:
        """Return the check that the function answers at all, and in the layout that was named."""
        shape = 3 * self.ways.rows, 5 * self.ways.unit  # not square: a transposed answer shows
        x = tame(np.random.default_rng(19), shape, made=self.plan.format)
        request, title = self.request(x, self.ways.dtypes[0]), "the first call"

        def run(subject: Subject) -> CheckResult:
            backend = subject.watched.backend
            assert isinstance(backend, FunctionBackend)
            stored = backend.answer(subject.give(request.array()))
            if not isinstance(stored, Stored):
                with suppress(MalformedAnswer):  # wrong values
                    request.answer(subject)
                return CheckResult(1)
            names = tuple(layout.name for layout in backend.layouts)
            found = compare_arrays(
                request.x, *stored, request.spec, self.ways.axis, names, request.rng, False
            )
            failure = found.failure
            if failure and failure.clause in (storage_clause(self.plan.element), "packing.scales"):
                message = "; ".join([failure.message, *map(str.strip, found.hints)])
                return CheckResult(found.blocks, replace(failure, message=message))
            return CheckResult(found.blocks)

        return Check(_PROTOCOL, title, request, run, raised=_PROTOCOL)

    def order(self) -> Iterator[Check]:
        """Yield checks for right codes and scales in the wrong order."""
        ways = self.ways
        for clause in (storage_clause(self.plan.element), "packing.scales"):
            shape = (16 * ways.rows, 8 * ways.unit if clause == "packing.scales" else ways.unit)
            x = tame(np.random.default_rng(17), shape, made=self.plan.format)
            yield self._untransformed(permuted(clause, self.request(x, ways.dtypes[0])))

    def _untransformed(self, check: Check) -> Check:
        """Return a check that passes if the transform is wrong, because a wrong transform can look like any order.

        Exceptions are left to the other checks too.
        """

        def run(subject: Subject) -> CheckResult:
            try:
                verdict = check.run(subject)
            except Exception:
                return CheckResult(0)
            spoiled = verdict.failure and self.plan.base.hadamard and _wrong(subject, self.impulses)
            return replace(verdict, failure=None) if spoiled else verdict

        return replace(check, run=run)

    def found(self, title: str, request: Request) -> Check:
        """Return the check of a request whose failure determines the clause."""

        def blamed(subject: Subject, got: Blocks, place: Place) -> str:
            return self._cause(subject, request, blame(request, got, *place))

        return _of_clause(f"rounding.{request.spec.rounding.value}", title, request, blamed)

    def _cause(self, subject: Subject, request: Request, decided: str | None) -> str:
        """Return the clause of a wrong answer; `decided` is the clause of its first wrong bit."""
        spec, found = request.spec, decided or "quantize.order"
        if spec.hadamard and _wrong(subject, self.impulses):
            return "hadamard.order"
        if spec.block is BlockShape.TILE and found.startswith("scale."):
            even = np.full((np.lcm(request.format.k, self.ways.rows), self.ways.unit), 4.0)
            return found if _wrong(subject, self.request(even, self.ways.dtypes[0])) else "scale.block.tile"
        if dtype_name(request.x) != "float32" and "float32" in self.ways.dtypes:
            wide = replace(request, x=request.x.astype(np.float32))
            return found if _wrong(subject, wide) else "conventions.inputs"
        return found

    def strided(self, layout: str) -> Check:
        """Return the check of another layout in memory; it fails only if the answer is right for a contiguous copy."""
        x = tame(np.random.default_rng(5), (4 * self.ways.rows, 2 * self.ways.unit), made=self.plan.format)
        plain = self.request(x, self.ways.dtypes[0])
        check = _of_clause("quantize.strides", layout, replace(plain, layout=layout))

        def run(subject: Subject) -> CheckResult:
            try:
                if _wrong(subject, plain):
                    return CheckResult(0)  # other checks name the fault
            except Exception:
                return CheckResult(0)
            return check.run(subject)

        return replace(check, run=run)


def _of_clause(clause: str, title: str, request: Request, blamed: Blamed | None = None) -> Check:
    """Return the check of a request; what the function raises breaks the protocol."""
    return replace(quantize_check(clause, title, request, blamed=blamed), raised=_PROTOCOL)


def _wrong(subject: Subject, request: Request) -> bool:
    return bool(request.wrong(subject).any())
