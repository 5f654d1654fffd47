"""Checks of stochastic rounding and of where its random bits come from.

Inputs are made from the random integers that an element should meet. To test the integers, every element is
placed well away from its threshold, so that a slightly wrong comparison still decides rightly; to test the
comparison, exactly at the threshold and just below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checking import Asked, Check, Op, Plan, Subject
from mxref.conformance.finding import controlled_check, quantize_check
from mxref.conformance.requests.crafted import tame
from mxref.conformance.requests.quantizing import Blocks, Request, as_numpy, magnitude_codes
from mxref.conformance.sr_statistics import stochastic_problem
from mxref.formats import BlockFormat, ElementFormat, Negatives
from mxref.plan import QuantPlan
from mxref.quantization import dequantize
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream, elements_per_call, random_integers
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import MANTISSA_BITS

STREAM = Stream(0x0123456789ABCDEF, step=5, layer=9, operand=3)


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of random.* and rounding.sr, or the statistical one of rounding.native_sr."""
    spec = replace(plan.base, rounding=Rounding.SR)
    all_bits = range(1, MAX_SR_BITS + 1) if plan.full else (1, 2, 8, 15, 16, 17, 21, 22)
    yield _right_bits_anywhere(plan, spec)
    for bits in (b for b in all_bits if b >= 4):
        yield _clear(plan, "random.elements", f"R = {bits}", replace(spec, sr_bits=bits), Stream(0))
    for seed in (1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1):
        yield _clear(plan, "random.counter", f"seed {seed:#x}", spec, Stream(seed))
    for bits in (16, 20):
        yield _clear(plan, "random.counter", f"R = {bits}, group index beyond 32 bits", replace(spec, sr_bits=bits),
                     Stream(0), origin=((1 << 31) - 4, 64), global_shape=(1 << 31, 160),
                     near={"origin": (4, 64), "global_shape": (8, 160)})  # fmt: skip
    for bits in (16, 20):
        for title, arguments in _carries(bits).items():
            some = replace(spec, sr_bits=bits)
            yield _clear(plan, "random.counter", f"R = {bits}, {title}", some, Stream(0), **arguments)
    for name, values in (
        ("step", (1, 0xFFFFFFFF)), ("layer", (1, 256, (1 << 24) - 1)), ("operand", range(1, 6)),
    ):  # fmt: skip
        for value in values:
            yield _clear(plan, "random.stream", f"{name} {value}", spec, replace(Stream(7), **{name: value}))
    for bits in (16, 20):
        for title, arguments in _places().items():
            some = replace(spec, sr_bits=bits)
            yield _clear(plan, "random.index", f"R = {bits}, {title}", some, STREAM, **arguments)
    tile = replace(spec, block=plan.format.tile)
    yield _clear(plan, "random.index", "tiles of a shard", tile, STREAM, shape=(32, 64), origin=(64, 32),
                 global_shape=(128, 96))  # fmt: skip
    for bits in all_bits:
        request = _made(
            plan, _turning, {"shape": (8, 96), "spec": replace(spec, sr_bits=bits), "rng": STREAM}
        )
        yield quantize_check("rounding.sr", f"R = {bits}, at the threshold and just below", request)
    yield _native(plan, spec)


def _carries(bits: int) -> dict[str, dict[str, Any]]:
    """Rows within which the group index passes 2^32, so that its upper word changes, and their neighbours."""
    turn = (1 << 32) * elements_per_call(bits)
    found: dict[str, dict[str, Any]] = {}
    for length in (96, 544):
        row = turn // length
        assert turn % length  # so the turn lies within the row, at a multiple of 32
        found |= {
            f"a carry within a row of {length}": {
                "shape": (3, length), "origin": (row - 1, 0), "global_shape": (row + 2, length),
                "near": {"origin": (1, 0), "global_shape": (4, length)},
            },
            f"a carry within a column of {length}": {
                "shape": (length, 3), "axis": 0, "origin": (0, row - 1), "global_shape": (length, row + 2),
                "near": {"origin": (0, 1), "global_shape": (length, 4)},
            },
        }  # fmt: skip
    return found


def _places() -> dict[str, dict[str, Any]]:
    """Where arrays lie in larger ones: shards, micro-batches, many axes, padding."""
    return {
        "rows and blocks": {"shape": (9, 160)},
        "along axis 0": {"shape": (96, 5), "axis": 0},
        "shard at the left": {"shape": (2, 32), "origin": (0, 0), "global_shape": (4, 96)},
        "shard at the right": {"shape": (2, 32), "origin": (0, 32), "global_shape": (2, 64)},
        "shard below": {"shape": (3, 64), "origin": (1, 0), "global_shape": (4, 64)},
        "shard along axis 0": {"shape": (32, 3), "axis": 0, "origin": (32, 1), "global_shape": (96, 7)},
        "three axes": {"shape": (2, 3, 32), "origin": (1, 2, 32), "global_shape": (3, 6, 96)},
        "three axes along the middle": {"shape": (2, 64, 3), "axis": 1},
        "padded length": {"shape": (4, 40), "pad": True},
        "last shard of a padded length": {
            "shape": (2, 8), "origin": (1, 64), "global_shape": (4, 72), "pad": True,
        },
    }  # fmt: skip


def _clear(
    plan: Plan,
    clause: str,
    title: str,
    spec: OperandSpec,
    rng: Stream,
    shape: tuple[int, ...] = (4, 96),
    near: dict[str, Any] | None = None,
    **where: Any,
) -> Check:
    """Return a check of random integers; `near` is the place of a control whose index fits 32 bits."""
    arguments = {"shape": shape, "spec": spec, "rng": rng, **where}
    controls = [_made(plan, _away, arguments | near)] if near else []
    if plan.base.rounding is not Rounding.SR:  # are the rows the right ones, whatever their random bits?
        values = tame(np.random.default_rng(6), shape, where.get("axis", -1), made=plan.format)
        plain = replace(plan.base, block=spec.block)
        controls.append(Request(plan.cast(values), plain, **{"rng": rng, "amax": plan.amax, **where}))
    return controlled_check(clause, title, _made(plan, _away, arguments), controls)


def _made(plan: Plan, place: Any, where: dict[str, Any]) -> Request:
    """Return a request whose elements `place` positions relative to the random integers that they should get."""
    arguments = dict(where)
    shape, spec = arguments.pop("shape"), arguments.pop("spec")
    resolved = Request(plan.cast(np.zeros(shape, np.float32)), spec, **arguments).plan
    r = _integers(resolved)
    rng = np.random.default_rng(plan.seed)
    lower, width = _gaps(plan.element)
    gap = rng.integers(0, len(width), r.shape)
    fraction = place(rng, r, spec.sr_bits, plan.element)
    x = (lower[gap] + width[gap] * fraction) * rng.choice([-1.0, 1.0], r.shape)
    x[:, :: plan.format.k] = _amax_of_one(plan.format)
    rows = x[:, : shape[resolved.axis]].reshape(*resolved.rows_shape, shape[resolved.axis])
    x = np.ascontiguousarray(np.moveaxis(rows, -1, resolved.axis), np.float32)
    return Request(plan.cast(x), spec, amax=plan.amax, **arguments)


def _amax_of_one(made: BlockFormat) -> float:
    """Return the largest magnitude of a block of which every rule makes X = 1."""
    return 2.0**made.element.max_exponent if made.scale.powers else made.element.max_value


def _gaps(element: ElementFormat) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower ends and the widths of the gaps of the grid from its least positive point to 2^emax."""
    grid = np.array(element.magnitudes)
    points = grid[(grid > 0) & (grid <= 2.0**element.max_exponent)]
    return points[:-1], np.diff(points)


def _integers(resolved: QuantPlan) -> NDArray[np.int64]:
    assert resolved.stream is not None
    return random_integers(
        resolved.global_rows(), resolved.first, resolved.length, resolved.global_length, resolved.stream,
        resolved.spec.sr_bits,
    ).astype(np.int64)  # fmt: skip


def _away(
    rng: np.random.Generator, r: NDArray[np.int64], bits: int, element: ElementFormat
) -> NDArray[np.float64]:
    """Return fractions a sixteenth above or below the threshold at which an element goes up."""
    threshold = 1 - r / 2.0**bits
    side = np.where(rng.integers(0, 2, r.shape), 1 / 16, -1 / 16)
    side = np.where(threshold + side >= 1, -side, side)
    return np.maximum(threshold + side, 0)


def _turning(
    rng: np.random.Generator, r: NDArray[np.int64], bits: int, element: ElementFormat
) -> NDArray[np.float64]:
    """Return the least fractions whose T is 2^R - r or more, which go up, or the largest of the others.

    Both are multiples of the last place that float32 has for them between any two grid points.
    """
    full = 1 << bits
    last = 2.0 ** -(MANTISSA_BITS - element.precision)
    at = np.minimum(np.ceil((full - r) / full / last) * last, 1 - max(last, 1 / full))
    below = np.ceil((full - r) / full / last) * last - last
    return np.where(rng.integers(0, 2, r.shape), at, below)


def _right_bits_anywhere(plan: Plan, spec: OperandSpec) -> Check:
    """Half-way values in groups of eight: how many are rounded up does not depend on the order of Philox's words."""
    one, k = plan.element.values.index(1.0), plan.format.k
    x = np.full((64, 256), sum(plan.element.values[one : one + 2]) / 2, np.float32)
    x[:, ::k] = _amax_of_one(plan.format)
    request = Request(plan.cast(x), spec, rng=Stream(0), amax=plan.amax)

    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        counts = ((b.codes == one + 1).reshape(*b.scales.shape, -1, 8).sum(axis=-1) for b in (got, want))
        # The first element of a block is its amax: one of eight is not half-way.
        first, second = counts
        wrong = (np.abs(first - second) > 1).any(axis=-1)
        return wrong, wrong.size

    return quantize_check("random.philox", "half-way values that go up, by groups", request, judge)


def _native(plan: Plan, spec: OperandSpec) -> Check:
    """Native SR has random bits of its own: an element goes to a neighbour, and statistics judge how often."""
    request = Request(np.zeros((1, plan.format.k), np.float32), spec, rng=STREAM)
    needs = [need for need in request.needs if need[0] not in ("native_sr", "max_sr_bits")]
    asked = Asked(Op.QUANTIZE, (*needs, ("native_sr", True)), request.describe())

    def problem(subject: Subject) -> tuple[int, str]:
        compared = left = 0

        def rounded(
            x: NDArray[np.float32], spec: OperandSpec, stream: Stream, first: int
        ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
            nonlocal compared, left
            asked = Request(x[first:], spec, rng=stream, amax=plan.amax)
            got = Blocks.of(as_numpy(subject, asked.ask(subject)))
            toward_zero = replace(asked, spec=replace(spec, rounding=Rounding.RTZ, sr_bits=16)).expected
            low = Blocks.of(toward_zero)
            reached = magnitude_codes(got.codes, plan.element)
            below = magnitude_codes(low.codes, plan.element)
            up = reached.astype(np.int64) - below
            if plan.element.negatives is Negatives.SIGN:  # a sign that turned is far from both neighbours
                up += (got.codes & plan.element.sign).astype(np.int64) - (low.codes & plan.element.sign)
            stays = (dequantize(toward_zero, "float32") == asked.x).reshape(up.shape)
            stays |= below == plan.element.max_code
            left += int(((up < 0) | (up > ~stays)).sum() + (got.scales != low.scales).sum())
            compared += up.size
            return got.codes.reshape(len(asked.x), -1), got.scales

        found = stochastic_problem(rounded, spec, 1, STREAM, native=True)
        if left:
            return compared, f"{left} elements left their two neighbours, or grid points or scales moved"
        return compared, found and f"the rounding {found}"

    return Check.that("rounding.native_sr", "statistics", asked, problem)
