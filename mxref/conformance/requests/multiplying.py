"""A scaled GEMM to be asked of a backend: what it must or may give, and which clause decides a wrong result.

`exact` and `ordered` must give the bits of the reference, `bounded` a number within its tolerance of the real sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mxref.backend import within_range
from mxref.block_dots import block_dots
from mxref.capabilities import Gemm
from mxref.conformance.checking import Needs, Op, Subject
from mxref.conformance.requests.decoding import differs, given, no_tensor_scale, tensor_words
from mxref.gemm import bounded_tolerance, prescale_product, scaled_gemm
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.scale import scale_value


@dataclass(frozen=True, eq=False)
class Product:
    """Arguments of a scaled GEMM; `error_class` is that of the profile `bounded`.

    `operands`, if given, changes what is passed for A and B, and must not change what comes of it.
    """

    op: ClassVar = Op.GEMM
    a: MXArray
    b: MXArray
    profile: GemmProfile
    out: str = "float32"
    layout: str = ""
    """How codes and scales lie in memory: one of `LAYOUTS` of `requests.decoding`, or nothing."""
    error_class: str = "fp32"
    operands: Operands | None = None
    plain: Product | None = field(default=None, init=False)
    """The product of the same operands, unchanged, which keeps what is expected of both; `passing` sets it."""

    def passing(self, operands: Operands) -> Product:
        """Return the product whose operands are passed as `operands` changes them; what is expected is shared."""
        changed = replace(self, operands=operands)
        object.__setattr__(changed, "plain", self)
        return changed

    @property
    def gemm(self) -> Gemm:
        """The profile and the formats, as `Capabilities.gemms` has them."""
        return self.profile, self.a.format, self.b.format

    @property
    def largest_scale(self) -> int:
        """The largest scale code of either operand that is not NaN; 0 where there is none."""
        return max(int(q.scales[q.scales < q.format.scale.nan_code].max(initial=0)) for q in (self.a, self.b))

    @property
    def needs(self) -> Needs:
        """The capabilities that the product uses."""
        needs: list[tuple[str, Any]] = [("gemms", self.gemm), ("gemm_dtypes", self.out)]
        if self.a.prescale or self.b.prescale:
            needs.append(("prescale", True))
        if self.profile is GemmProfile.BOUNDED:
            needs.append(("bounded_max_scale", self.largest_scale))
        return tuple(needs)

    def in_class_of(self, subject: Subject) -> Product:
        """Return the product with the error class that the backend declares for `bounded`.

        It is this product itself if possible, because that keeps the reference's answer.
        """
        declared = subject.capabilities.bounded_class
        if self.profile is not GemmProfile.BOUNDED or self.error_class == declared:
            return self
        return replace(self, error_class=declared)

    @cached_property
    def expected(self) -> NDArray[Any]:
        """The reference's answer; for `bounded`, one of the answers allowed."""
        if self.plain:
            return self.plain.expected
        return scaled_gemm(self.a, self.b, profile=self.profile, out_dtype=self.out)

    @cached_property
    def bound(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For `bounded`: the real sums, to 2^-52 of the sum of magnitudes, and how far from them is allowed."""
        if self.plain:
            return self.plain.bound
        total = np.zeros(self.expected.shape)
        with np.errstate(invalid="ignore"):
            for dot in block_dots(self.a, self.b):
                total += dot.approximate()
        total /= float(prescale_product(self.a, self.b))
        for q in (self.a, self.b):
            if q.tensor_scale is not None:
                total *= float(q.tensor_scale[0])
        return total, bounded_tolerance(self.a, self.b, self.error_class, self.out)

    @property
    def _nan_scales(self) -> NDArray[np.bool_]:
        """Where a row of A or of B has a block that is NaN."""
        a, b = (np.isnan(scale_value(q.scales, q.format.scale)) for q in (self.a, self.b))
        return np.asarray(a.any(axis=1, keepdims=True) | b.any(axis=1))

    def wrong(self, subject: Subject) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return where the backend's answer is not allowed, and the answer.

        Raises:
            ValueError: the result has another shape or type than it should.
        """
        a, b = (given(subject, q, self.layout) for q in (self.a, self.b))
        if self.operands:
            a, b = self.operands(subject, self, a, b)
        backend = subject.backend
        got = subject.take(
            within_range(backend, lambda: backend.scaled_gemm(a, b, profile=self.profile, out_dtype=self.out))
        )
        return self.misses(got), got

    def misses(self, got: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where an answer is not allowed; ValueError if its shape or type is wrong."""
        want = self.expected
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"the result is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}")
        if self.profile is not GemmProfile.BOUNDED:
            return differs(got, want)
        total, tolerance = self.bound
        value = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            # Infinities of one sign are equal, and their difference is NaN.
            allowed = (np.abs(value - total) <= tolerance) | (value == total) | np.isinf(tolerance)
        nan = self._nan_scales | (np.isnan(total) & np.isfinite(tolerance))
        wrong: NDArray[np.bool_] = ~np.where(nan, np.isnan(value), allowed)
        return wrong

    def describe(self) -> dict[str, str]:
        """Return the request in words."""
        (m, k), (n, _) = rows_of(self.a).shape, rows_of(self.b).shape
        out = {"profile": self.profile.value, "out_dtype": self.out, "M, N, K": f"{m}, {n}, {k}"}
        if {self.a.format, self.b.format} != {OperandSpec().format}:
            out["formats"] = f"{self.a.format} x {self.b.format}"
        if self.a.prescale or self.b.prescale:
            out["prescaled"] = " and ".join(name for name, q in (("A", self.a), ("B", self.b)) if q.prescale)
        out |= tensor_words("tensor scale of A", self.a) | tensor_words("tensor scale of B", self.b)
        if self.layout:
            out["layout"] = self.layout
        return out


Operands = Callable[[Subject, Product, MXArray, MXArray], tuple[MXArray, MXArray]]


def rows_of(q: MXArray) -> MXArray:
    """Return an operand as [rows, K] with the block axis last, padding made part of it."""
    return MXArray(
        q.codes, q.scales, (q.scales.shape[0], q.length), 1, q.block, q.prescale, q.rotation, q.format,
        q.tensor_scale,
    )  # fmt: skip


def decided(
    subject: Subject, clause: str, product: Product, wrong: NDArray[np.bool_]
) -> tuple[str, NDArray[np.bool_]]:
    """Return the clause that decides wrong results of a check of `clause`, and which of the results it decides.

    Each step is held against the plainer product that lacks it: where that is wrong too, the step is not to blame.
    """
    plain = _plainer(subject, clause, product) if wrong.any() else None
    if plain is None:
        return clause, wrong
    before = wrong & plain.wrong(subject)[0]
    profile = f"gemm.{product.profile.value}"
    if clause in ("gemm.operands", "gemm.block_dot"):
        if before.any():
            return clause, before
        # `exact` rounds the real sum to the output type, and narrows nothing.
        return (profile if product.profile is GemmProfile.EXACT else "gemm.output"), wrong
    return (profile, wrong) if (before == wrong).all() else (clause, wrong & ~before)


def _plainer(subject: Subject, clause: str, product: Product) -> Product | None:
    """Return the product without the step that a clause is about; None if it has no such step."""
    if product.operands:
        return product.plain or replace(product, operands=None)
    if clause == "gemm.prescale":
        a, b = (replace(q, prescale=False) for q in (product.a, product.b))
        return replace(product, a=a, b=b)
    if clause == "gemm.tensor_scale":
        a, b = (replace(q, tensor_scale=no_tensor_scale(q.format)) for q in (product.a, product.b))
        return replace(product, a=a, b=b)
    narrow = clause in ("gemm.output", "gemm.operands", "gemm.block_dot") and product.out != "float32"
    if narrow and "float32" in subject.capabilities.gemm_dtypes:
        return replace(product, out="float32")
    return None
