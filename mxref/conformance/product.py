"""A scaled GEMM to be asked of a backend: what it must or may give, and the smallest operands that still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import within_range
from mxref.conformance.decode import differs, given, shown
from mxref.conformance.model import Check, Failure, Op, Subject, Verdict
from mxref.gemm import block_dots, bounded_tolerance, scaled_gemm
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile

_MAX_SHRINK_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class Product:
    """Arguments of a scaled GEMM; `error_class` is that of the profile `bounded`.

    `operands`, if given, changes what is passed for A and B, and must not change what comes of it.
    """

    a: MXArray
    b: MXArray
    profile: GemmProfile
    out: str = "float32"
    strided: bool = False
    error_class: str = "fp32"
    operands: Operands | None = None

    @cached_property
    def expected(self) -> NDArray[Any]:
        """The reference's answer; for `bounded`, one of the answers allowed."""
        return scaled_gemm(self.a, self.b, profile=self.profile, out_dtype=self.out)

    @cached_property
    def bound(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For `bounded`: the real sums, to 2^-52 of the sum of magnitudes, and how far from them is allowed."""
        total = np.zeros(self.expected.shape)
        for dot, exponent in block_dots(self.a, self.b):
            total += np.ldexp(dot.astype(np.float64), exponent)
        total *= (4 / 3) ** (int(self.a.prescale) + int(self.b.prescale))
        return total, bounded_tolerance(self.a, self.b, self.error_class, self.out)

    def wrong(self, subject: Subject) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return where the backend's answer is not allowed, and the answer.

        Raises:
            ValueError: the result has another shape or type than it should.
        """
        a, b = (given(subject, q, self.strided) for q in (self.a, self.b))
        if self.operands:
            a, b = self.operands(subject, self, a, b)
        backend = subject.backend
        got = subject.take(
            within_range(backend, lambda: backend.scaled_gemm(a, b, profile=self.profile, out_dtype=self.out))
        )
        want = self.expected
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"the result is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}")
        if self.profile is not GemmProfile.BOUNDED:
            return differs(got, want), got
        total, tolerance = self.bound
        value = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            outside = ~(np.abs(value - total) <= tolerance) & np.isfinite(tolerance)
        nan = np.isnan(want.astype(np.float64))
        return np.where(nan, ~np.isnan(value), outside), got

    def describe(self) -> dict[str, str]:
        """Return the request in words."""
        (m, k), (n, _) = rows_of(self.a).shape, rows_of(self.b).shape
        out = {"profile": self.profile.value, "out_dtype": self.out, "M, N, K": f"{m}, {n}, {k}"}
        if self.a.prescale or self.b.prescale:
            out["prescaled"] = " and ".join(name for name, q in (("A", self.a), ("B", self.b)) if q.prescale)
        if self.strided:
            out["layout"] = "codes and scales not contiguous"
        return out


Operands = Callable[[Subject, Product, MXArray, MXArray], tuple[MXArray, MXArray]]


def rows_of(q: MXArray) -> MXArray:
    """Return an operand as [rows, K] with the block axis last, padding made part of it."""
    return MXArray(q.codes, q.scales, (q.scales.shape[0], q.length), 1, q.block, q.prescale, q.rotation)


def product_check(clause: str, title: str, product: Product, max_scale: int = 0) -> Check:
    """Return the check that a backend's GEMM gives what it must, or under `bounded` what it may."""

    def run(subject: Subject) -> Verdict:
        asked = replace(product, error_class=subject.capabilities.bounded_class) if bounded else product
        wrong, got = asked.wrong(subject)
        if wrong.any() and clause in ("gemm.output", "gemm.prescale"):
            # The narrowing, or the undoing, is to blame only where the product without it is right.
            plain = replace(asked, out="float32") if clause == "gemm.output" else _unscaled(asked)
            if plain.out in subject.capabilities.gemm_dtypes:
                wrong = wrong & ~plain.wrong(subject)[0]
        if wrong.any() and asked.operands:
            wrong = wrong & ~replace(asked, operands=None).wrong(subject)[0]
        if not wrong.any():
            return Verdict(wrong.size)
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        small, here = _shrunk(subject, asked, at) if subject.shrink else (asked, at)
        if subject.shrink:
            _, got = small.wrong(subject)
        expected = shown(small.expected[here])
        if bounded:
            total, tolerance = small.bound
            expected = f"{total[here]:.9g} within {tolerance[here]:.3g}"
        inputs = {
            name: tuple(_blocks(q, here[i]))
            for i, (name, q) in enumerate((("A", small.a), ("B", small.b)))
            if q.scales.size <= _MAX_SHRINK_BLOCKS
        }
        message = f"{int(wrong.sum())} of {wrong.size} results differ, the first at {at}"
        return Verdict(
            wrong.size, Failure(clause, title, message, small.describe(), inputs, expected, shown(got[here]))
        )

    bounded = product.profile is GemmProfile.BOUNDED
    needs: list[tuple[str, Any]] = [("gemm_profiles", product.profile), ("gemm_dtypes", product.out)]
    if product.a.prescale or product.b.prescale:
        needs.append(("prescale", True))
    if bounded:
        needs.append(("bounded_max_scale", max_scale))
    return Check(clause, title, Op.GEMM, tuple(needs), run, describe=product.describe)


def _unscaled(product: Product) -> Product:
    return replace(product, a=replace(product.a, prescale=False), b=replace(product.b, prescale=False))


def _blocks(q: MXArray, row: int) -> Iterator[str]:
    for scale, codes in zip(q.scales[row], q.codes[row].reshape(-1, 16), strict=True):
        yield f"{int(scale):02x}:{bytes(codes).hex()}"


def _shrunk(subject: Subject, product: Product, at: tuple[int, ...]) -> tuple[Product, tuple[int, ...]]:
    """Return a product of one row and one column that is still wrong, if there is one, blocks and elements dropped."""

    def fails(candidate: Product) -> bool:
        try:
            return bool(candidate.wrong(subject)[0].any())
        except Exception:  # another way to fail is not the failure that is being shrunk
            return False

    a, b = (rows_of(q) for q in (product.a, product.b))
    single = replace(product, a=_row(a, at[0]), b=_row(b, at[1]), strided=False)
    if not fails(single):
        return product, at
    product = single
    step = product.a.scales.shape[1]
    while step:  # drop runs of blocks, long ones first
        start = 0
        while start < product.a.scales.shape[1]:
            dropped = replace(product, a=_without(product.a, start, step), b=_without(product.b, start, step))
            if dropped.a.scales.shape[1] and fails(dropped):
                product = dropped
            else:
                start += step
        step //= 2
    for side in ("a", "b"):
        for i in range(getattr(product, side).codes.size):
            for keep in (0x00, 0x0F, 0xF0):
                q = getattr(product, side)
                codes = q.codes.copy()
                codes[0, i] &= keep
                if (codes != q.codes).any():
                    candidate = replace(product, **{side: replace(q, codes=codes)})
                    product = candidate if fails(candidate) else product
    return product, (0, 0)


def _row(q: MXArray, i: int) -> MXArray:
    return replace(q, codes=q.codes[i : i + 1].copy(), scales=q.scales[i : i + 1].copy(), shape=(1, q.length))


def _without(q: MXArray, start: int, count: int) -> MXArray:
    blocks = [i for i in range(q.scales.shape[1]) if not start <= i < start + count]
    codes = q.codes.reshape(1, -1, 16)[:, blocks].reshape(1, -1)
    return replace(q, codes=codes, scales=q.scales[:, blocks], shape=(1, 32 * len(blocks)))
