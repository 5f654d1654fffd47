"""Checks of the fused operations `quantize_dual` and `fake_quantize` against the separate operations.

They are held to the backend's own plain operations, not to the reference: a fault of `quantize` is not reported twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Asked, Check, Op, Plan, Subject, cast
from mxref.conformance.checks.places import drawn_spec
from mxref.conformance.requests.crafted import any_bits, heavy_tailed, tame
from mxref.conformance.requests.decoding import DTYPES, differs
from mxref.conformance.requests.quantizing import Blocks, Request, all_of_it, as_numpy
from mxref.errors import NonfiniteError, ShapeError
from mxref.formats import INPUT_DTYPES, Nonfinite
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

STREAM = Stream(8, step=1, layer=3, operand=2)
_STREAMS = STREAM, replace(STREAM, operand=4)

Pair = tuple[OperandSpec, OperandSpec]
Dual = tuple[Request, ...]
"""One matrix along axis 1, and along axis 0."""

_SHAPES: tuple[tuple[tuple[int, int], tuple[bool, bool]], ...] = (
    ((96, 160), (False, False)), ((41, 64), (False, True)), ((64, 41), (True, False)), ((70, 45), (True, True)),
    ((1, 64), (False, True)), ((64, 1), (True, False)), ((1, 1), (True, True)), ((32, 288), (True, True)),
    ((0, 64), (False, False)), ((64, 0), (False, False)), ((0, 0), (True, True)),
)  # fmt: skip
"""Shapes, and which block axes are padded; shapes that a pair of treatments cannot take are skipped."""


def _dual(
    x: NDArray[Any],
    specs: Pair,
    pads: tuple[bool, bool] = (False, False),
    streams: tuple[Stream, Stream] = _STREAMS,
    **where: Any,
) -> Dual:
    """Return the request for a matrix; `where` is its origin, its global shape and its layout."""
    parts = zip((1, 0), specs, streams, pads, strict=True)
    return tuple(Request(x, spec, axis, stream, pad=pad, **where) for axis, spec, stream, pad in parts)


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `quantize_dual` and `fake_quantize`."""
    rng = np.random.default_rng(plan.seed)
    for i, pair in enumerate(_pairs(plan)):
        whole = partial(_dual, plan.cast(_values(rng, (64, 96))), pair)
        ways = {
            "": whole(amax=plan.amax), ", transposed": whole(layout="transposed"),
            ", a part": whole(origin=(64, 0), global_shape=(192, 96), amax=plan.amax),
        }  # fmt: skip
        for shape, pads in _SHAPES:
            ways[f", shape {shape}"] = _dual(plan.cast(_values(rng, shape)), pair, pads)
        # The level quick covers every layout with a third of the treatments.
        for j, (what, case) in enumerate(ways.items()):
            if plan.full or (i + j) % 3 == 0:
                yield from _dual_check(f"treatments {i}{what}", case)
    for layout, shape in (
        ("every second row and column", (40, 96)), ("rows out of the middle", (65, 96)),
        ("columns from an odd one on", (40, 65)), ("backwards", (33, 65)),
    ):  # fmt: skip
        for rounding in (Rounding.RNE, Rounding.SR):
            spec = replace(plan.base, rounding=rounding)
            case = _dual(plan.cast(_values(rng, shape)), (spec, spec), (True, True), layout=layout)
            yield from _dual_check(f"{rounding.value}, {layout}", case)
    spec = replace(plan.base, rounding=Rounding.SR)
    last = plan.cast(_values(rng, (41, 64)))
    case = _dual(last, (spec, spec), (False, True), origin=(64, 64), global_shape=(105, 192), amax=plan.amax)
    yield from _dual_check("the last rows of a padded tensor", case)
    for i in range(400 if plan.full else 24):
        yield from _dual_check(f"drawn {i}", _drawn(rng, plan))
    for i, (spec, _) in enumerate(_pairs(plan)):
        for dtype in DTYPES if plan.full or not i else DTYPES[i % 3 :: 3]:
            yield _fake(plan, f"treatment {i}, {dtype}", spec, dtype, rng)
    yield from _raises(plan)


def _pairs(plan: Plan) -> Iterator[Pair]:
    """Yield pairs of treatments, plain first: those of a row and of a column."""
    base, powers = plan.base, plan.format.scale.powers
    sr, tile = replace(base, rounding=Rounding.SR), replace(base, block=plan.format.tile)
    turned = replace(base, hadamard=32, signs=SignPolicy.PER_STEP)
    yield base, base
    yield base, replace(base, zero_scale=plan.format.scale.one_code)
    if powers:
        yield replace(base, scale_rule=ScaleRule.EVEN), replace(base, scale_rule=ScaleRule.RCEIL)
        yield (
            replace(base, scale_rule=ScaleRule.CEIL),
            replace(base, scale_rule=ScaleRule.FLOOR, prescale=True),
        )
    yield replace(base, rounding=Rounding.RNA), replace(base, rounding=Rounding.RTZ)
    yield sr, sr
    yield sr, base
    yield base, sr
    yield replace(sr, sr_bits=8), replace(sr, sr_bits=20, prescale=powers)
    yield base, turned
    yield turned, base
    yield turned, turned
    yield replace(base, hadamard=16), replace(base, hadamard=16, prescale=powers)
    yield base, replace(base, hadamard=256)
    yield replace(turned, hadamard=128), replace(base, hadamard=2)
    yield replace(turned, hadamard=64), replace(base, hadamard=16, signs=SignPolicy.FIXED)
    yield replace(turned, rounding=Rounding.SR), replace(turned, rounding=Rounding.SR)
    yield tile, tile
    yield tile, base
    yield base, tile
    yield replace(tile, rounding=Rounding.SR), replace(turned, block=plan.format.tile)


def _values(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return draws of many magnitudes, with a corner of zeros, and a NaN where there is room for one."""
    x: NDArray[np.float64] = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    x[:32, :32] *= 0.0 if min(shape) > 32 else 1.0
    if min(shape) > 40:
        x[40, 40] = np.nan
    return x


def _drawn(rng: np.random.Generator, plan: Plan) -> Dual:
    """Return a drawn request of what is declared: treatments, type, shape, padding, placement, memory order."""
    specs = drawn_spec(rng, plan.declared, plan.format), drawn_spec(rng, plan.declared, plan.format)
    k = plan.format.k
    units = [max(k, spec.hadamard) for spec in specs[::-1]]  # of axis 0, then of axis 1
    tiles = any(spec.block.is_tile for spec in specs)
    pads = bool(rng.integers(2)), bool(rng.integers(2))
    shape = [unit * int(rng.integers(1, 4)) for unit in units]
    for axis, pad in ((1, pads[0]), (0, pads[1])):
        if pad and not tiles:
            shape[axis] -= int(rng.integers(units[axis]))
    kinds = partial(any_bits, element=plan.element), heavy_tailed, partial(tame, made=plan.format)
    kind = kinds[int(rng.integers(3))]
    x = np.asarray(kind(rng, (shape[0], k * -(-shape[1] // k))), np.float32)[:, : shape[1]]
    declared = [name for name in INPUT_DTYPES if name in plan.declared.in_dtypes] or list(INPUT_DTYPES)
    x = cast(x, declared[int(rng.integers(len(declared)))])
    where: dict[str, Any] = {"layout": "transposed" if rng.integers(2) else ""}
    if not any(pads) and rng.integers(2):
        origin = int(rng.integers(3)) * max(units), int(rng.integers(3)) * max(units)
        total = origin[0] + shape[0], origin[1] + shape[1] + max(units)
        where |= {"origin": origin, "global_shape": total, "amax": plan.amax}
    seed = Stream(int(rng.integers(1 << 62)), int(rng.integers(1 << 20)), int(rng.integers(99)), operand=2)
    return _dual(x, specs, pads, (seed, replace(seed, operand=4)), **where)


def _dual_check(title: str, case: Dual) -> Iterator[Check]:
    """Yield the check that both parts are what `quantize` gives; nothing if the treatments do not fit the shape."""
    row, column = case
    try:
        assert row.plan
        assert column.plan
    except ShapeError:
        return

    def problem(subject: Subject) -> tuple[int, str]:
        backend, compared = subject.backend, 0
        pair = backend.quantize_dual(
            subject.give(row.array()), (row.spec, column.spec), pads=(row.pad, column.pad),
            placements=(row.placement_for(subject), column.placement_for(subject)),
        )  # fmt: skip
        for q, request in zip(pair, case, strict=True):
            got, want = as_numpy(subject, q), as_numpy(subject, request.ask(subject))
            along = f"along axis {request.axis}"
            if (got.shape, got.length) != (want.shape, want.length):
                return compared, f"{along}: {got.shape} stored to {got.length}, not to {want.length}"
            wrong, count = all_of_it(Blocks.of(got), Blocks.of(want))
            compared += count
            if wrong.any():
                at, block = (int(i) for i in np.argwhere(wrong)[0])
                return compared, (
                    f"{along}: not what quantize gives in {int(wrong.sum())} of {count} blocks, the first in stored "
                    f"row {at}, block {block}"
                )
            if got != want:
                return compared, f"{along}: the same codes under another description: {got!r}"
        return compared, ""

    needs = tuple(dict.fromkeys((*row.needs, *column.needs)))
    words = {
        f"along axis {each.axis}": ", ".join(f"{k}={v}" for k, v in each.describe().items()) for each in case
    }
    yield Check.that("conformance.dual", f"quantize_dual, {title}", Asked(Op.QUANTIZE, needs, words), problem)


def _fake(plan: Plan, title: str, spec: OperandSpec, dtype: str, rng: np.random.Generator) -> Check:
    x = plan.cast(tame(rng, (64, 64), made=plan.format) * rng.standard_normal((64, 64)))
    x[3, 5] = np.inf
    padded = not spec.block.is_tile
    whole = Request(x, spec, -1, STREAM, pad=padded)

    def problem(subject: Subject) -> tuple[int, str]:
        compared = 0
        for asked in (whole, replace(whole, x=x[:41, :3] if padded else x, axis=0)):
            given = subject.give(asked.array())
            fake = subject.backend.fake_quantize(given, spec, dtype=dtype, **asked.arguments_for(subject))
            plain = subject.backend.dequantize(asked.ask(subject), dtype)
            got, want = subject.take(fake), subject.take(plain)
            compared += want.size
            same = got.shape == want.shape and got.dtype == want.dtype
            wrong = differs(got, want) if same else np.ones(want.shape, np.bool_)
            if wrong.any():
                return compared, (
                    f"along axis {asked.axis} of {asked.x.shape}: fake_quantize differs from dequantize(quantize) in "
                    f"{int(wrong.sum())} of {want.size} values"
                )
        return compared, ""

    needs = (*whole.needs, ("dequantize_dtypes", dtype))
    asked = Asked(Op.QUANTIZE, needs, whole.describe())
    return Check.that("conformance.dual", f"fake_quantize, {title}", asked, problem)


def _raises(plan: Plan) -> Iterator[Check]:
    """A NaN under the policy that refuses it; a fused operation returns no scales that would show it."""
    x = plan.cast(_values(np.random.default_rng(3), (64, 64)))
    spec = replace(plan.base, nonfinite=Nonfinite.RAISE)
    needs, at = Request(x, spec).needs, Placement(STREAM)

    def dual(subject: Subject) -> object:
        return subject.backend.quantize_dual(subject.give(x.copy()), (plan.base, spec), placements=(at, at))

    def fake(subject: Subject) -> object:
        return subject.backend.fake_quantize(subject.give(x.copy()), spec, placement=at)

    for name, call, asked in (
        ("quantize_dual", dual, Asked(Op.QUANTIZE, needs)),
        ("fake_quantize", fake, Asked(Op.QUANTIZE, (*needs, ("dequantize_dtypes", "float32")))),
    ):
        accepted = f"{name} let a NaN pass under nonfinite = 'raise'"
        title = f"{name}, nonfinite = 'raise'"
        yield Check.refused("conformance.dual", title, asked, call, NonfiniteError, accepted)
