"""Checks of products that are added in place: the sum of the old array and the product, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import within_range
from mxref.conformance.checks.products import adversarial
from mxref.conformance.model import Check, CheckResult, Failure, Op, Plan, Subject
from mxref.conformance.requests.decoding import LAYOUTS, differs, drawn_array, given, shown
from mxref.conformance.requests.product import Product
from mxref.errors import DtypeError, ShapeError, UnsupportedError
from mxref.formats import BlockFormat
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile

_SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, 1.0], np.float32)
_INFINITIES = np.array([np.inf, -np.inf], np.float32)


@dataclass(frozen=True, eq=False)
class Sum:
    """A product, and the array to which it is added."""

    product: Product
    onto: NDArray[np.float32]
    prepared: bool

    def wrong(self, subject: Subject) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.float32]]:
        """Return where the array is wrong afterwards, an allowed result, and the actual one."""
        product, backend = self.product, subject.backend
        a, b = (given(subject, q, product.layout) for q in (product.a, product.b))
        if self.prepared:
            b = backend.prepare(b, profile=product.profile)

        def added() -> Any:
            onto = subject.give(self.onto.copy())
            backend.add_product(a, b, onto, profile=product.profile)
            return onto

        got = subject.take(within_range(backend, added))
        with np.errstate(over="ignore", invalid="ignore"):
            want = self.onto + product.expected
            if product.profile is not GemmProfile.BOUNDED:
                return differs(got, want), want, got
            # Rounding is monotone, so the sums with both ends of the interval bound the sum with any number in it.
            total, tolerance = product.bound
            low, high = (self.onto + end.astype(np.float32) for end in (total - tolerance, total + tolerance))
            outside = ~((low <= got) & (got <= high)) & np.isfinite(tolerance) & ~np.isnan(low + high)
        nan = np.isnan(product.expected) | np.isnan(self.onto)
        return np.where(nan, ~np.isnan(got), outside), want, got


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `add_product`."""
    rng = np.random.default_rng(plan.seed)
    for profile in GemmProfile:
        for what, a, b in _operands(rng, plan.full, plan.format):
            product = Product(a, b, profile, layout=what if what in LAYOUTS else "")
            for held, onto in _held(rng, product.expected):
                for prepared in (False, True) if plan.full or held == "a gradient" else (False,):
                    title = f"add_product, {profile.value}: {what}, onto {held}{', B prepared' * prepared}"
                    yield _check(title, Sum(product, onto, prepared))
        yield _refused(profile, plan.format)


def _operands(
    rng: np.random.Generator, full: bool, made: BlockFormat
) -> Iterator[tuple[str, MXArray, MXArray]]:
    def drawn(rows: int, length: int, prescale: bool = False) -> MXArray:
        return replace(drawn_array(rng, (rows, length), 1, length, (120, 133), made=made), prescale=prescale)

    sizes = ((5, 33, 96), (66, 17, 64), (1, 1, 32), (3, 130, 160), (130, 65, 288))
    for m, n, k in sizes if full else sizes[:2]:
        yield f"M, N, K = {m}, {n}, {k}", drawn(m, k), drawn(n, k)
    for layout in LAYOUTS if full else LAYOUTS[:1]:
        yield layout, drawn(8, 64), drawn(6, 64)
    yield "prescaled", drawn(9, 64, True), drawn(7, 64, True)
    yield "A prescaled", drawn(4, 96, True), drawn(5, 96)
    yield "every scale and NaN blocks", adversarial(rng, 9, 6, made), adversarial(rng, 40, 6, made)
    yield "no rows", drawn(0, 64), drawn(3, 64)
    yield "K = 0", drawn(2, 0), drawn(3, 0)


def _held(
    rng: np.random.Generator, product: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield contents of the array: numbers of the product's size, roundings, NaN and Inf, and the negative product."""
    finite = np.where(np.isfinite(product), product, np.float32(1))
    size = np.clip(np.abs(finite).mean(dtype=np.float64) if finite.size else 1.0, 1.0, 1e30)
    yield "a gradient", (rng.standard_normal(product.shape) * size).astype(np.float32)
    yield "zeros, NaN and Inf", np.resize(rng.permutation(_SPECIAL), product.shape)
    yield "its negative", -finite
    # Half a unit in the last place more or less: this shows a product that was rounded before the addition.
    yield "nearly its negative", np.nextafter(-finite, rng.choice(_INFINITIES, product.shape))


def _check(title: str, case: Sum) -> Check:
    product = case.product
    bounded = product.profile is GemmProfile.BOUNDED

    def run(subject: Subject) -> CheckResult:
        asked = case  # unchanged if possible, because it keeps the reference's answer
        if bounded and product.error_class != subject.capabilities.bounded_class:
            asked = replace(case, product=replace(product, error_class=subject.capabilities.bounded_class))
        wrong, want, got = asked.wrong(subject)
        if wrong.any():
            # A GEMM that is wrong without the addition is reported under its own clauses.
            wrong = wrong & ~asked.product.wrong(subject)[0]
        if not wrong.any():
            return CheckResult(wrong.size)
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        message = f"{int(wrong.sum())} of {wrong.size} sums differ, the first at {at}"
        parts = f"{shown(want[at])} = {shown(case.onto[at])} + {shown(product.expected[at])}"
        failure = Failure("conformance.dual", title, message, describe(), {}, parts, shown(got[at]))
        return CheckResult(wrong.size, failure)

    def describe() -> dict[str, str]:
        return product.describe() | ({"B": "prepared"} if case.prepared else {})

    needs: list[tuple[str, Any]] = [("gemms", product.gemm), ("gemm_dtypes", "float32")]
    if product.a.prescale or product.b.prescale:
        needs.append(("prescale", True))
    if bounded:
        needs.append(("bounded_max_scale", product.largest_scale))
    return Check("conformance.dual", title, Op.GEMM, tuple(needs), run, describe=describe)


def _refused(profile: GemmProfile, made: BlockFormat) -> Check:
    """Arrays to which nothing can be added, and operands that do not fit together: refused, and nothing written."""
    title = f"add_product, {profile.value}: refuses what does not fit"
    rng = np.random.default_rng(6)
    a, b, longer = (
        drawn_array(rng, (rows, k), 1, k, (120, 133), made=made) for rows, k in ((4, 64), (6, 64), (6, 96))
    )

    def filled(*shape: int) -> NDArray[np.float32]:
        return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def every(array: Any) -> Any:
        return array

    cases: tuple[tuple[str, MXArray, NDArray[Any], Callable[[Any], Any], type[Exception]], ...] = (
        ("of the transposed shape", b, filled(6, 4), every, ShapeError),
        ("of one row, to be spread over all", b, filled(1, 6), every, ShapeError),
        ("with a third axis", b, filled(1, 4, 6), every, ShapeError),
        ("in column order", b, filled(6, 4), lambda array: array.T, ShapeError),
        ("of every second column", b, filled(4, 12), lambda array: array[:, ::2], ShapeError),
        ("of float64", b, filled(4, 6).astype(np.float64), every, DtypeError),
        ("of float16", b, filled(4, 6).astype(np.float16), every, DtypeError),
        ("for operands of two lengths", longer, filled(4, 6), every, ShapeError),
    )

    def run(subject: Subject) -> CheckResult:
        left = given(subject, a)
        for what, right, held, view, error in cases:
            try:
                whole = subject.give(held.copy())
            except (DtypeError, UnsupportedError):
                continue  # such an array cannot exist
            try:
                subject.backend.add_product(left, given(subject, right), view(whole), profile=profile)
            except error:
                problem = "refused, but written to all the same"
            else:
                problem = f"accepted; {error.__name__} expected"
            if problem.startswith("accepted") or subject.take(whole).tobytes() != held.tobytes():
                return CheckResult(1, Failure("conformance.dual", title, f"an array {what}: {problem}"))
        return CheckResult(len(cases))

    needs = (("gemms", (profile, made, made)), ("gemm_dtypes", "float32"))
    return Check("conformance.dual", title, Op.GEMM, needs, run)
