"""Checks of prepared operands: a layout changes no bit, and serves only its own backend and profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mxref.conformance.checks.products import adversarial
from mxref.conformance.differential import product_check
from mxref.conformance.model import Check, CheckResult, Failure, Op, Plan, Subject
from mxref.conformance.requests.decoding import LAYOUTS, drawn_array, given
from mxref.conformance.requests.encoding import as_numpy
from mxref.conformance.requests.product import Operands, Product
from mxref.errors import ShapeError
from mxref.formats import BlockFormat
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `prepare`."""
    rng = np.random.default_rng(plan.seed)
    for profile in GemmProfile:
        operands = list(_operands(rng, plan.full, plan.format))
        yield _keeps(profile, operands, plan.format)
        for out in OUT_DTYPES if plan.full else OUT_DTYPES[:1]:
            for what, a, b in operands:
                top = max((int(q.scales[q.scales < 255].max(initial=0)) for q in (a, b)), default=0)
                product = Product(a, b, profile, out, what if what in LAYOUTS else "")
                for how, change in _CHANGES.items():
                    title = f"{profile.value}, {out}: {how}, {what}"
                    yield product_check("conformance.dual", title, product.passing(change), top)
    yield _refused(plan.format)


def _operands(
    rng: np.random.Generator, full: bool, made: BlockFormat
) -> Iterator[tuple[str, MXArray, MXArray]]:
    """Shapes, axes, padding and strides; every scale; NaN blocks; the prescale of either operand."""

    def drawn(shape: tuple[int, int], axis: int, length: int) -> MXArray:
        return drawn_array(rng, shape, axis, length, (120, 133), made=made)

    sizes = ((1, 1, 32), (5, 33, 96), (65, 17, 64), (3, 130, 160), (130, 65, 288))
    for m, n, k in sizes if full else sizes[:3]:
        yield f"M, N, K = {m}, {n}, {k}", drawn((m, k), 1, k), drawn((n, k), 1, k)
    yield "along axis 0, padded", drawn((4, 40), 1, 64), drawn((40, 6), 0, 64)
    for layout in LAYOUTS if full else LAYOUTS[:1]:
        yield layout, drawn((8, 64), 1, 64), drawn((6, 64), 1, 64)
    yield "no rows", drawn((3, 64), 1, 64), drawn((0, 64), 1, 64)
    yield "K = 0", drawn((2, 0), 1, 0), drawn((3, 0), 1, 0)
    a, b = adversarial(rng, 9, 6, made), adversarial(rng, 40, 6, made)
    b.scales[3, :] = 255
    yield "every scale and NaN blocks", a, b
    for prescales in ((True, False), (False, True), (True, True)):
        a, b = (
            replace(drawn((rows, 64), 1, 64), prescale=p) for rows, p in zip((4, 7), prescales, strict=True)
        )
        yield f"prescaled {prescales}", a, b


def _other(q: MXArray) -> MXArray:
    """Return an array of the same shape that holds other numbers."""
    return replace(
        q, codes=q.codes ^ np.uint8(0x35), scales=np.where(q.scales < 100, 130, 100).astype(np.uint8)
    )


def _prepare(subject: Subject, q: MXArray, profile: GemmProfile) -> MXArray:
    return subject.backend.prepare(q, profile=profile)


def _prepared(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    return a, _prepare(subject, b, product.profile)


def _both(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    return _prepare(subject, a, product.profile), _prepare(subject, b, product.profile)


def _left(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    return _prepare(subject, a, product.profile), b


def _before_another(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    first = _prepare(subject, b, product.profile)
    _prepare(subject, given(subject, _other(product.b)), product.profile)
    return a, first


def _for_others(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    for profile in sorted(
        subject.capabilities.profiles(product.a.format, product.b.format) - {product.profile}
    ):
        b = _prepare(subject, b, profile)
    return a, b


def _after_others(subject: Subject, product: Product, a: MXArray, b: MXArray) -> tuple[MXArray, MXArray]:
    _for_others(subject, product, a, b)
    return _prepared(subject, product, a, b)


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
    "B prepared": _prepared, "A and B prepared": _both, "A prepared": _left,
    "another prepared after B": _before_another, "B prepared for other profiles": _for_others,
    "B prepared for other profiles before": _after_others,
    "B with another backend's layout": _foreign, "B with another profile's layout": _unnamed,
}  # fmt: skip


def _keeps(profile: GemmProfile, operands: list[tuple[str, MXArray, MXArray]], made: BlockFormat) -> Check:
    """`prepare` does not change its operand, and the prepared operand has the same codes and scales."""
    title = f"prepare for {profile.value} keeps codes, scales and meaning"

    def run(subject: Subject) -> CheckResult:
        compared = 0
        for what, _, b in operands:
            if b.prescale and not subject.capabilities.prescale:
                continue
            source = given(subject, b)
            prepared = _prepare(subject, source, profile)
            compared += 1
            for name, q in (("what was prepared", source), ("what prepare gives", prepared)):
                if as_numpy(subject, q) != b:
                    message = f"{name} is no longer the operand that went in"
                    return CheckResult(
                        compared, Failure("conformance.dual", title, message, {"operand": what})
                    )
        return CheckResult(compared)

    return Check("conformance.dual", title, Op.GEMM, (("gemms", (profile, made, made)),), run)


def _refused(made: BlockFormat) -> Check:
    title = "prepare refuses what is not a matrix"
    k = made.k
    codes, scales = np.zeros((2, 3, made.code_bytes(k)), np.uint8), np.zeros((2, 3, 1), np.uint8)
    q = MXArray(codes, scales, (2, 3, k), 2, format=made)

    def run(subject: Subject) -> CheckResult:
        for profile in sorted(subject.capabilities.profiles(made, made)):
            try:
                _prepare(subject, given(subject, q), profile)
            except ShapeError:
                continue
            message = f"an array of three axes was prepared for {profile.value}: ShapeError expected"
            return CheckResult(1, Failure("conformance.dual", title, message))
        return CheckResult(1)

    return Check("conformance.dual", title, Op.GEMM, (), run)
