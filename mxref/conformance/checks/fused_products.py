"""Checks of the fused operations of a product, `prepare` and `add_product`: neither may change a bit.

A layout made by `prepare` serves only its own backend and profile. `add_product` gives the sum of the old array and the
product, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import within_range
from mxref.conformance.checking import Asked, Check, Op, Plan, Subject
from mxref.conformance.checks.gemms import adversarial
from mxref.conformance.finding import product_check
from mxref.conformance.requests.decoding import (
    LAYOUTS,
    differs,
    drawn_array,
    first_place,
    given,
    no_tensor_scale,
    shown,
)
from mxref.conformance.requests.multiplying import Operands, Product
from mxref.conformance.requests.quantizing import as_numpy
from mxref.errors import DtypeError, ShapeError, UnsupportedError
from mxref.formats import BlockFormat
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile


def prepared_checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `prepare`."""
    rng = np.random.default_rng(plan.seed)
    for profile in GemmProfile:
        operands = list(_operands(rng, plan.full, plan.format))
        yield _keeps_its_operand(profile, operands, plan.format)
        for out in OUT_DTYPES if plan.full else OUT_DTYPES[:1]:
            for what, a, b in operands:
                product = Product(a, b, profile, out, what if what in LAYOUTS else "")
                for how, change in _CHANGES.items():
                    title = f"{profile.value}, {out}: {how}, {what}"
                    yield product_check("conformance.dual", title, product.passing(change))
        yield _refuses_operands(profile, plan.format)


def _operands(
    rng: np.random.Generator, full: bool, made: BlockFormat
) -> Iterator[tuple[str, MXArray, MXArray]]:
    """Shapes, axes, padding and strides; every scale; NaN blocks; the prescale of either operand."""

    def drawn(shape: tuple[int, int], axis: int, length: int) -> MXArray:
        return drawn_array(rng, shape, axis, length, (-7, 6), made=made)

    sizes = ((1, 1, 32), (5, 33, 96), (65, 17, 64), (3, 130, 160), (130, 65, 288))
    for m, n, k in sizes if full else sizes[:3]:
        yield f"M, N, K = {m}, {n}, {k}", drawn((m, k), 1, k), drawn((n, k), 1, k)
    yield "along axis 0, padded", drawn((4, 40), 1, 64), drawn((40, 6), 0, 64)
    for layout in LAYOUTS if full else LAYOUTS[:1]:
        yield layout, drawn((8, 64), 1, 64), drawn((6, 64), 1, 64)
    yield "no rows", drawn((3, 64), 1, 64), drawn((0, 64), 1, 64)
    yield "K = 0", drawn((2, 0), 1, 0), drawn((3, 0), 1, 0)
    a, b = adversarial(rng, 9, 6, made), adversarial(rng, 40, 6, made)
    b.scales[3, :] = made.scale.nan_code
    yield "every scale and NaN blocks", a, b
    if made.tensor_scale:
        a, b = (
            replace(drawn((rows, 64), 1, 64), tensor_scale=np.array([scale], np.float32))
            for rows, scale in ((4, 1 / 2688), (7, 3.7))
        )
        yield "scales of tensors", a, b
    for prescales in ((True, False), (False, True), (True, True)) if made.scale.powers else ():
        a, b = (
            replace(drawn((rows, 64), 1, 64), prescale=p) for rows, p in zip((4, 7), prescales, strict=True)
        )
        yield f"prescaled {prescales}", a, b


def _other(q: MXArray) -> MXArray:
    """Return an array of the same shape that holds other numbers."""
    low, high = q.format.scale.one_code - 27, q.format.scale.one_code + 3
    scales = np.where(q.scales < low, high, low).astype(np.uint8)
    return replace(q, codes=q.codes ^ np.uint8(0x35), scales=scales)


def _prepare(subject: Subject, q: MXArray, profile: GemmProfile) -> MXArray:
    return subject.backend.prepare(q, profile=profile)


def _prepared(which: str) -> Operands:
    """Return what prepares A, B or both."""

    def operands(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
        a = _prepare(subject, a, product.profile) if "A" in which else a
        return a, _prepare(subject, b, product.profile) if "B" in which else b

    return operands


def _before_another(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    first = _prepare(subject, b, product.profile)
    _prepare(subject, given(subject, _other(product.b)), product.profile)
    return a, first


def _for_others(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    declared = subject.capabilities.profiles(product.a.format, product.b.format)
    for profile in sorted(declared - {product.profile}):
        b = _prepare(subject, b, profile)
    return a, b


def _after_others(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    _for_others(subject, product, a, b)
    return a, _prepare(subject, b, product.profile)


def _foreign(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    """Give B a layout of wrong numbers, under the name of a backend that does not exist."""
    return a, PreparedArray.of(b, "no such backend", product.profile, _wrong_layout(subject, product))


def _unnamed(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    """Give B a layout of wrong numbers, under a profile that does not exist."""
    return a, PreparedArray.of(b, subject.backend.name, "no such profile", _wrong_layout(subject, product))


def _wrong_layout(subject: Subject, product: Product) -> tuple[Any, ...]:
    other = _prepare(subject, given(subject, _other(product.b)), product.profile)
    return other.layout if isinstance(other, PreparedArray) else (other.codes, other.scales)


_CHANGES: dict[str, Operands] = {
    "B prepared": _prepared("B"), "A and B prepared": _prepared("A, B"), "A prepared": _prepared("A"),
    "another prepared after B": _before_another, "B prepared for other profiles": _for_others,
    "B prepared for other profiles before": _after_others,
    "B with another backend's layout": _foreign, "B with another profile's layout": _unnamed,
}  # fmt: skip


def _keeps_its_operand(
    profile: GemmProfile, operands: list[tuple[str, MXArray, MXArray]], made: BlockFormat
) -> Check:
    """A prepared operand has the codes, the scales and the meaning of what was prepared."""
    title = f"prepare for {profile.value} keeps codes, scales and meaning"

    def problem(subject: Subject) -> tuple[int, str]:
        compared = 0
        for what, _, b in operands:
            if b.prescale and not subject.capabilities.prescale:
                continue
            compared += 1
            if as_numpy(subject, _prepare(subject, given(subject, b), profile)) != b:
                return compared, f"{what}: what prepare gives is no longer the operand that went in"
        return compared, ""

    asked = Asked(Op.GEMM, (("gemms", (profile, made, made)),))
    return Check.that("conformance.dual", title, asked, problem)


def _refuses_operands(profile: GemmProfile, made: BlockFormat) -> Check:
    codes, scales = np.zeros((2, 3, made.code_bytes(made.k)), np.uint8), np.zeros((2, 3, 1), np.uint8)
    q = MXArray(codes, scales, (2, 3, made.k), 2, format=made, tensor_scale=no_tensor_scale(made))

    def call(subject: Subject) -> object:
        return _prepare(subject, given(subject, q), profile)

    asked, title = Asked(Op.GEMM, (("gemms", (profile, made, made)),)), "prepare refuses what is not a matrix"
    return Check.refused("conformance.dual", f"{profile.value}: {title}", asked, call, ShapeError, "accepted")


_SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, 1.0], np.float32)
_INFINITIES = np.array([np.inf, -np.inf], np.float32)


def added_checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `add_product`."""
    rng = np.random.default_rng(plan.seed)
    operands = list(_operands(rng, plan.full, plan.format))
    for profile in GemmProfile:
        for what, a, b in operands:
            product = Product(a, b, profile, layout=what if what in LAYOUTS else "")
            for held, onto in _held(rng, product.expected):
                for prepared in (False, True) if plan.full or held == "a gradient" else (False,):
                    title = f"add_product, {profile.value}: {what}, onto {held}{', B prepared' * prepared}"
                    yield _sum_check(title, product, onto, prepared)
        yield _refuses_sums(profile, plan.format)


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


def _sum_check(title: str, product: Product, onto: NDArray[np.float32], prepared: bool) -> Check:
    def problem(subject: Subject) -> tuple[int, str]:
        asked, backend = product.in_class_of(subject), subject.backend
        a, b = (given(subject, q, product.layout) for q in (product.a, product.b))
        if prepared:
            b = backend.prepare(b, profile=product.profile)

        def added() -> Any:
            given_onto = subject.give(onto.copy())
            backend.add_product(a, b, given_onto, profile=product.profile)
            return given_onto

        got = subject.take(within_range(backend, added))
        wrong, want = _wrong_sums(asked, onto, got)
        if wrong.any():
            # A GEMM that is wrong without the addition is reported under its own clauses.
            wrong &= ~asked.wrong(subject)[0]
        if not wrong.any():
            return wrong.size, ""
        at = first_place(wrong)
        return wrong.size, (
            f"{int(wrong.sum())} of {wrong.size} sums differ, the first at {at}: {shown(got[at])} instead of "
            f"{shown(want[at])} = {shown(onto[at])} + {shown(asked.expected[at])}"
        )

    words = product.describe() | ({"B": "prepared"} if prepared else {})
    return Check.that("conformance.dual", title, Asked(Op.GEMM, product.needs, words), problem)


def _wrong_sums(
    product: Product, onto: NDArray[np.float32], got: NDArray[np.float32]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Return where a sum with a product is not allowed, and an allowed sum."""
    with np.errstate(over="ignore", invalid="ignore"):
        want = onto + product.expected
        if product.profile is not GemmProfile.BOUNDED:
            return differs(got, want), want
        # Rounding is monotone, so the sums with both ends of the interval bound the sum with any number in it.
        total, tolerance = product.bound
        low, high = (onto + end.astype(np.float32) for end in (total - tolerance, total + tolerance))
        outside = ~((low <= got) & (got <= high)) & np.isfinite(tolerance) & ~np.isnan(low + high)
    nan = np.isnan(product.expected) | np.isnan(onto)
    return np.where(nan, ~np.isnan(got), outside), want


def _refuses_sums(profile: GemmProfile, made: BlockFormat) -> Check:
    """Arrays to which nothing can be added, and operands that do not fit together: refused, and nothing written."""
    title = f"add_product, {profile.value}: refuses what does not fit"
    rng = np.random.default_rng(6)
    a, b, longer = (
        drawn_array(rng, (rows, k), 1, k, (-7, 6), made=made) for rows, k in ((4, 64), (6, 64), (6, 96))
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

    def problem(subject: Subject) -> tuple[int, str]:
        left = given(subject, a)
        for what, right, held, view, error in cases:
            try:
                whole = subject.give(held.copy())
            except (DtypeError, UnsupportedError):
                continue  # such an array cannot exist
            try:
                subject.backend.add_product(left, given(subject, right), view(whole), profile=profile)
            except error:
                if subject.take(whole).tobytes() == held.tobytes():
                    continue
                return 1, f"an array {what}: refused, but written to all the same"
            return 1, f"an array {what}: accepted; {error.__name__} expected"
        return len(cases), ""

    needs = (("gemms", (profile, made, made)), ("gemm_dtypes", "float32"))
    return Check.that("conformance.dual", title, Asked(Op.GEMM, needs), problem)
