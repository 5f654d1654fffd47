"""Checks of dequantization: every element code under every scale code, in every declared type.

One answer, the table of all codes, is judged for several clauses, each by the values that it decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Check, Plan, Subject
from mxref.conformance.clauses import element_clause, storage_clause
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.requests.decoding import (
    DTYPES,
    LAYOUTS,
    Decoding,
    differs,
    drawn_array,
    first_place,
    no_tensor_scale,
    shown,
)
from mxref.formats import BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.steps.hadamard import Rotation

TENSOR_SCALES = (1 / 2688, 260 / 2688, 3.7, 2.0**-149, 2.0**-130, 1e-36, 1e35, 3.4e38)
"""Scales of tensors: those that round products, and those at both ends of float32."""


def table(made: BlockFormat) -> MXArray:
    """Return every element code under every scale code: [256, ..], each code twice, each row in a different order."""
    codes = np.arange(1 << made.element.bits, dtype=np.uint8)
    order = np.concatenate([codes, codes[::-1]])
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], order.size // made.k, axis=1)
    shape = (256, order.size)
    codes = pack(np.tile(order, (256, 1)), made.element)
    return MXArray(codes, scales, shape, 1, format=made, tensor_scale=no_tensor_scale(made))


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of dequantize.*, and of formats.* and packing.* as dequantization shows them."""
    made, element = plan.format, plan.element
    every = table(made)
    codes, scales = unpack(every.codes, element), np.repeat(every.scales, made.k, axis=1)
    special = ~np.isfinite(np.array(element.values)[codes])
    nan, one_scale = np.isnan(np.array(made.scale.values))[scales], scales == made.scale.one_code
    scale_clause = "formats.e8m0" if made.scale.powers else "formats.scale"
    rng = np.random.default_rng(5)
    for dtype in DTYPES:
        sweep = Decoding(every, dtype)
        finite = ~nan & ~special
        with np.errstate(invalid="ignore"):
            overflows = finite & ~np.isfinite(sweep.expected.astype(np.float64))
        one = codes & (element.sign - 1) == element.values.index(1.0)
        order = f"{dtype}, order of elements"
        yield _check(storage_clause(element), order, sweep, one_scale, permuted=True)
        yield _check(element_clause(element), f"{dtype}, element codes at X = 1", sweep, one_scale)
        yield _check(scale_clause, f"{dtype}, scale codes with element 1", sweep, one & finite)
        yield _check("dequantize.value", f"{dtype}, every code under every scale", sweep, finite & ~overflows)
        yield _check("dequantize.overflow", f"{dtype}, beyond the type's range", sweep, overflows)
        yield _check("dequantize.nan", f"{dtype}, scale code {made.scale.nan_code}", sweep, nan)
        if special.any():
            yield _check("dequantize.nan", f"{dtype}, codes of NaN and Inf", sweep, special & ~nan)
        for shape, axis, length in (
            ((32,), 0, 32), ((64, 3), 0, 64), ((5, 40), 1, 64), ((2, 45, 3), 1, 64), ((1, 1), 0, 256),
            ((0, 32), 1, 32), ((3, 0), 1, 0), ((33, 7, 96), -1, 96),
            ((3, plan.long), 1, plan.long), ((64, 2, 3), 0, 64), ((96, 3, 2, 2), 0, 96),
            ((45, 2, 3), 0, 64), ((2, 64, 3, 2), 1, 64),
        ):  # fmt: skip
            q = drawn_array(rng, shape, axis, length, made=made)
            clause = "quantize.axis" if length == shape[axis] else "quantize.padding"
            yield _check(clause, f"dequantize to {dtype}, shape {shape}, axis {axis}", Decoding(q, dtype))
        plain = drawn_array(rng, (64, 96), 1, 96, made=made)
        for layout in LAYOUTS:
            decoding = Decoding(plain, dtype, layout)
            yield _check("quantize.strides", f"dequantize to {dtype}, {layout}", decoding)
        if plan.full:  # results beyond a processor's caches: 8 MiB and more in each type
            large = drawn_array(rng, (4099, 1024), 1, 1024, made=made)
            yield _check("quantize.strides", f"dequantize to {dtype}, 4 Mi values", Decoding(large, dtype))
        treated = replace(plain, block=made.tile, prescale=made.scale.powers, rotation=Rotation(32, 5))
        title = f"{dtype}, tiles, prescale and Hadamard not undone"
        yield _check("dequantize.value", title, Decoding(treated, dtype))
        for scale in TENSOR_SCALES if made.tensor_scale else ():
            under = Decoding(replace(every, tensor_scale=np.array([scale], np.float32)), dtype)
            with np.errstate(invalid="ignore"):
                overflows = finite & ~np.isfinite(under.expected.astype(np.float64))
            title = f"{dtype}, every code under every scale, tensor scale {scale:g}"
            yield _check("dequantize.value", title, under, finite & ~overflows)
            if overflows.any():
                yield _check("dequantize.overflow", f"{title}, beyond the type's range", under, overflows)


def _check(
    clause: str,
    title: str,
    decoding: Decoding,
    where: NDArray[np.bool_] | None = None,
    permuted: bool = False,
) -> Check:
    def run(subject: Subject) -> CheckResult:
        want = decoding.expected
        got = subject.once(decoding, lambda: decoding.answer(subject))
        looked = np.ones(want.shape, np.bool_) if where is None else where
        wrong = differs(got, want) & looked
        if permuted:  # the layout is to blame only if the same values are in another order
            others = differs(*(np.sort(_sortable(values), axis=-1) for values in (got, want)))
            wrong &= ~np.any(others, axis=-1, keepdims=True)
        if not wrong.any():
            return CheckResult(int(looked.sum()))
        at = first_place(wrong)
        moved = (*at[: decoding.q.axis], *at[decoding.q.axis + 1 :], at[decoding.q.axis])
        made = decoding.q.format
        digits = -(-made.element.bits // 4)
        code = int(unpack(np.asarray(decoding.q.codes), made.element)[moved])
        scale = int(np.asarray(decoding.q.scales)[(*moved[:-1], moved[-1] // made.k)])
        failure = Failure(
            clause, f"{int(wrong.sum())} of {int(looked.sum())} values differ, the first at {at}",
            decoding.describe(), {"scale code": (f"{scale:02x}",), "element code": (f"{code:0{digits}x}",)},
            shown(want[at]), shown(got[at]), tuple(int(i) for i in np.flatnonzero(wrong)[:64]),
        )  # fmt: skip
        return CheckResult(int(looked.sum()), failure)

    return Check(clause, title, decoding, run)


def _sortable(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values with zeros replaced by the smallest magnitudes of their sign, so that -0 differs from +0."""
    wide = values.astype(np.float64)
    return np.where(wide == 0, np.copysign(np.finfo(np.float64).smallest_subnormal, wide), wide)
