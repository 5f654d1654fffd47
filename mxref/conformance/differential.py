"""Turns a request into a check, which compares the backend's answer with the reference's and shrinks a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mxref.conformance.finding import shrunk_failure
from mxref.conformance.model import Check, CheckResult, Failure, Op, Subject
from mxref.conformance.requests.decoding import shown
from mxref.conformance.requests.encoding import Blocks, Judge, Place, Request, all_of_it, plainest
from mxref.conformance.requests.product import Product, decided
from mxref.conformance.shrink import smallest_product
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile

_MAX_SHRINK_BLOCKS = 64
_FEW_ROWS = 4


Blamed = Callable[[Subject, Blocks, Place], str]
"""Returns the clause that a wrong block of an answer breaks."""


def quantize_check(
    clause: str, title: str, request: Request, judge: Judge = all_of_it, blamed: Blamed | None = None
) -> Check:
    """Return the check that a backend answers a request as the reference does.

    Args:
        clause: the clause of the check, which a wrong block breaks unless `blamed` names another.
        title: of the check.
        request: what is asked.
        judge: compares the answers.
        blamed: finds the clause of the plainest wrong block.
    """

    def run(subject: Subject) -> CheckResult:
        want = request.expected_blocks
        got = subject.once(request, lambda: Blocks.of(request.answer(subject)))
        wrong, compared = judge(got, want)
        if not wrong.any():
            return CheckResult(compared)
        place, count = plainest(wrong, want, request.element), int(wrong.sum())
        broken = blamed(subject, got, place) if blamed else clause
        return CheckResult(compared, shrunk_failure(subject, request, place, broken, count, judge))

    return Check(clause, title, Op.QUANTIZE, request.needs, run, request.spec, request.describe)


def controlled_check(clause: str, title: str, request: Request, controls: Sequence[Request]) -> Check:
    """Return a check that blames its clause only if the backend answers each control right.

    A control is a similar request that does not depend on the clause; an undeclared one is not asked. If a control is
    wrong too, the failure counts under `quantize.order`, which joins all clauses.
    """
    check = quantize_check(clause, title, request)

    def run(subject: Subject) -> CheckResult:
        verdict = check.run(subject)
        if verdict.failure is None or all(_right(subject, control) for control in controls):
            return verdict
        return replace(verdict, failure=replace(verdict.failure, clause="quantize.order"))

    return replace(check, run=run)


def _right(subject: Subject, control: Request) -> bool:
    if not control.declared(subject.capabilities):
        return True
    return not all_of_it(Blocks.of(control.answer(subject)), control.expected_blocks)[0].any()


def product_check(clause: str, title: str, product: Product) -> Check:
    """Return the check that a backend's GEMM gives the required result, or under `bounded` an allowed one."""

    def run(subject: Subject) -> CheckResult:
        asked = product.in_class_of(subject)
        wrong, got = asked.wrong(subject)
        blamed, wrong = decided(subject, clause, asked, wrong)
        if not wrong.any():
            return CheckResult(wrong.size)
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        small, here = smallest_product(subject, asked, at, clause, blamed) if subject.shrink else (asked, at)
        if subject.shrink:
            _, got = small.wrong(subject)
        expected = shown(small.expected[here])
        if product.profile is GemmProfile.BOUNDED:
            total, tolerance = small.bound
            expected = f"{total[here]:.9g} within {tolerance[here]:.3g}"
        inputs = {
            name: tuple(_blocks(q, range(len(q.scales)) if len(q.scales) <= _FEW_ROWS else [here[i]]))
            for i, (name, q) in enumerate((("A", small.a), ("B", small.b)))
            if q.scales.size <= _MAX_SHRINK_BLOCKS
        }
        message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
        return CheckResult(
            wrong.size, Failure(blamed, message, small.describe(), inputs, expected, shown(got[here]))
        )

    return Check(clause, title, Op.GEMM, product.needs, run, describe=product.describe)


def _blocks(q: MXArray, rows: Iterable[int]) -> Iterator[str]:
    for row in rows:
        for scale, codes in zip(q.scales[row], q.codes[row].reshape(len(q.scales[row]), -1), strict=True):
            yield f"{int(scale):02x}:{bytes(codes).hex()}"
