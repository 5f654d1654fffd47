"""Checks of dequantization: every element code under every scale code, in every declared type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.hadamard import float_bits
from mxref.conformance.model import Check, Failure, Op, Plan, Subject, Verdict
from mxref.formats import E2M1, BlockShape
from mxref.hadamard import Rotation
from mxref.mxarray import MXArray
from mxref.packing import pack, unpack
from mxref.quantization import dequantize

DTYPES = ("float64", "float32", "bfloat16")
LAYOUTS = ("codes not contiguous", "codes in Fortran order", "scales in Fortran order")
"""How codes and scales may lie in memory, beside C order."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """Arguments of a dequantization."""

    q: MXArray
    dtype: str
    layout: str = ""
    """One of `LAYOUTS`, or nothing."""

    @cached_property
    def expected(self) -> NDArray[Any]:
        """The reference's answer."""
        return dequantize(self.q, self.dtype)

    def answer(self, subject: Subject) -> NDArray[Any]:
        """Return the backend's answer.

        Raises:
            ValueError: the result has another shape or type than it should.
        """
        values = subject.take(subject.backend.dequantize(given(subject, self.q, self.layout), self.dtype))
        if values.shape != self.expected.shape or values.dtype != self.expected.dtype:
            raise ValueError(
                f"the result is {values.dtype} {values.shape}, expected {self.expected.dtype} {self.expected.shape}"
            )
        return values

    def describe(self) -> dict[str, str]:
        """Return the request in words."""
        return {
            "dtype": self.dtype, "shape": str(self.q.shape), "axis": str(self.q.axis),
            **({"layout": self.layout} if self.layout else {}),
        }  # fmt: skip


def given(subject: Subject, q: MXArray, layout: str = "") -> MXArray:
    """Return an MXArray of the backend's own arrays, fresh ones, in C order or one of `LAYOUTS`."""

    def fresh(name: str, a: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if layout == "codes not contiguous":  # nor are the scales
            return np.repeat(a, 2, axis=0)[::2]
        return a.copy(order="F" if layout.startswith(name) else "C")

    codes, scales = (subject.give(fresh(n, np.asarray(getattr(q, n)))) for n in ("codes", "scales"))
    return MXArray(codes, scales, q.shape, q.axis, q.block, q.prescale, q.rotation)


def differs(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where values differ in any bit, any NaN being equal to any NaN; float64 or narrower."""
    if want.dtype == np.float64:
        same = (got.view(np.uint64) == want.view(np.uint64)) | (np.isnan(got) & np.isnan(want))
        return np.asarray(~same)
    return np.asarray(float_bits(got) != float_bits(want))


def table() -> MXArray:
    """Return every element code under every scale code: [256, 32], each code twice, in an order all its own."""
    order = np.concatenate([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    scales = np.arange(256, dtype=np.uint8)
    return MXArray(pack(np.tile(order, (256, 1)), E2M1), scales[:, None], (256, 32), 1)


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of dequantize.*, and of formats.* and packing.* as dequantization shows them."""
    every = table()
    codes, scales = unpack(every.codes, E2M1), np.broadcast_to(every.scales, (256, 32))
    rng = np.random.default_rng(5)
    for dtype in DTYPES:
        sweep = Decoding(every, dtype)
        finite = scales < 255
        with np.errstate(invalid="ignore"):
            overflows = finite & ~np.isfinite(sweep.expected.astype(np.float64))
        one = codes & 7 == 2
        yield _check("packing.nibbles", f"{dtype}, order of elements", sweep, scales == 127, permuted=True)
        yield _check("formats.e2m1", f"{dtype}, element codes at X = 1", sweep, scales == 127)
        yield _check("formats.e8m0", f"{dtype}, scale codes with element 1", sweep, one & finite)
        yield _check("dequantize.value", f"{dtype}, every code under every scale", sweep, finite & ~overflows)
        yield _check("dequantize.overflow", f"{dtype}, beyond the type's range", sweep, overflows)
        yield _check("dequantize.nan", f"{dtype}, scale code 255", sweep, ~finite)
        for shape, axis, length in (
            ((32,), 0, 32), ((64, 3), 0, 64), ((5, 40), 1, 64), ((2, 45, 3), 1, 64), ((1, 1), 0, 256),
            ((0, 32), 1, 32), ((3, 0), 1, 0), ((33, 7, 96), -1, 96),
            ((64, 2, 3), 0, 64), ((96, 3, 2, 2), 0, 96), ((45, 2, 3), 0, 64), ((2, 64, 3, 2), 1, 64),
        ):  # fmt: skip
            q = drawn_array(rng, shape, axis, length)
            yield _check("quantize.axis" if length == shape[axis] else "quantize.padding",
                         f"dequantize to {dtype}, shape {shape}, axis {axis}", Decoding(q, dtype))  # fmt: skip
        plain = drawn_array(rng, (64, 96), 1, 96)
        for layout in LAYOUTS:
            decoding = Decoding(plain, dtype, layout)
            yield _check("quantize.strides", f"dequantize to {dtype}, {layout}", decoding)
        if plan.full:  # results beyond a processor's caches: 8 MiB and more in each type
            large = drawn_array(rng, (4099, 1024), 1, 1024)
            yield _check("quantize.strides", f"dequantize to {dtype}, 4 Mi values", Decoding(large, dtype))
        treated = MXArray(plain.codes, plain.scales, (64, 96), 1, BlockShape.TILE, True, Rotation(32, 5))
        yield _check(
            "dequantize.value", f"{dtype}, tiles, prescale and Hadamard not undone", Decoding(treated, dtype)
        )


def drawn_array(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    axis: int,
    length: int,
    scales: tuple[int, int] = (100, 150),
) -> MXArray:
    """Return an MXArray of drawn codes, its scale codes within the given half-open range."""
    rows = list(shape)
    rows.pop(axis)
    codes = rng.integers(0, 256, (*rows, length // 2), np.uint8)
    return MXArray(codes, rng.integers(*scales, (*rows, length // 32)).astype(np.uint8), shape, axis)


def _check(
    clause: str,
    title: str,
    decoding: Decoding,
    where: NDArray[np.bool_] | None = None,
    permuted: bool = False,
) -> Check:
    def run(subject: Subject) -> Verdict:
        want = decoding.expected
        got = subject.once(decoding, lambda: decoding.answer(subject))
        looked = np.ones(want.shape, np.bool_) if where is None else where
        wrong = differs(got, want) & looked
        if permuted:  # the layout is to blame only where the very same values lie in another order
            others = differs(*(np.sort(_sortable(values), axis=-1) for values in (got, want)))
            wrong &= ~np.any(others, axis=-1, keepdims=True)
        if not wrong.any():
            return Verdict(int(looked.sum()))
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        moved = (*at[: decoding.q.axis], *at[decoding.q.axis + 1 :], at[decoding.q.axis])
        code = int(unpack(np.asarray(decoding.q.codes), E2M1)[moved])
        scale = int(np.asarray(decoding.q.scales)[(*moved[:-1], moved[-1] // 32)])
        failure = Failure(
            clause, title, f"{int(wrong.sum())} of {int(looked.sum())} values differ, the first at {at}",
            decoding.describe(), {"scale code": (f"{scale:02x}",), "element code": (f"{code:x}",)},
            shown(want[at]), shown(got[at]), tuple(int(i) for i in np.flatnonzero(wrong)[:64]),
        )  # fmt: skip
        return Verdict(int(looked.sum()), failure)

    needs = (("dequantize_dtypes", decoding.dtype),)
    return Check(clause, title, Op.DEQUANTIZE, needs, run, describe=decoding.describe)


def _sortable(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values with their zeros told apart, as the least magnitudes of either sign."""
    wide = values.astype(np.float64)
    return np.where(wide == 0, np.copysign(np.finfo(np.float64).smallest_subnormal, wide), wide)


def shown(value: Any) -> str:
    """Return a float with its bits."""
    scalar = np.asarray(value)
    bits = int(scalar.view(f"u{scalar.itemsize}"))
    return f"{float(scalar):g} (0x{bits:0{2 * scalar.itemsize}x})"
