"""Checks of where values lie: packing, axes, strides, lengths, padding, empty arrays; and random combinations.

Values of single checks are those of `tame`, which every scale rule and rounding keeps: only a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.capabilities import Capabilities
from mxref.conformance.checking import Check, Plan, cast
from mxref.conformance.clauses import storage_clause
from mxref.conformance.finding import controlled_check, quantize_check
from mxref.conformance.requests.crafted import any_bits, heavy_tailed, tame
from mxref.conformance.requests.quantizing import LAYOUTS, Blocks, Request
from mxref.errors import ShapeError
from mxref.formats import INPUT_DTYPES, BlockFormat
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import SIZES, SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import rules_of

STREAM = Stream(99, step=2, layer=1, operand=4)


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of packing.*, quantize.* and, last, of combinations of everything."""
    rng = np.random.default_rng(17)
    shape: tuple[int, ...]

    def request(shape: tuple[int, ...], axis: int = -1, **rest: Any) -> Request:
        spec = replace(plan.base, **rest.pop("spec", {}))
        x = tame(rng, shape, axis, made=plan.format)
        return Request(plan.cast(x), spec, axis=axis, rng=STREAM, amax=plan.amax, **rest)

    yield _permuted(plan, rng, storage_clause(plan.element), 1)
    yield _permuted(plan, rng, "packing.scales", 8)
    for layout, view in LAYOUTS.items():
        plain = request((3, 4, 32) if layout in ("first axes swapped", "last axis of stride 2") else (5, 64))
        # A repeated row has other values.
        plain = replace(plain, x=np.ascontiguousarray(view(plain.x.copy())))
        yield controlled_check("quantize.strides", layout, replace(plain, layout=layout), [plain])
    empty: tuple[tuple[int, ...], ...] = ((0, 32), (3, 0), (0, 0), (2, 0, 64), (0, 32, 3))
    for shape in empty:
        none = request(shape, axis=1 if len(shape) > 2 else -1)
        yield quantize_check("quantize.strides", f"empty {shape}", none)
    large = [((3, plan.long), -1), ((plan.long, 3), 0)]
    if plan.full:
        # Beyond 65,535 rows, of either axis: a grid of GPU programs has no more along its second dimension.
        large += [((65569, 32), -1), ((32, 65569), 0)]
        large += [((2049, 2080), -1), ((2080, 2049), 0)]  # beyond 4 Mi elements
    for shape, axis in large:
        yield quantize_check("quantize.strides", f"sizes {shape}, axis {axis}", request(shape, axis))
    for shape in ((1, 32), (3, 96), (33, 32), (130, 64), (1, 4128), (1027, 32)):
        yield quantize_check("quantize.strides", f"sizes {shape}", request(shape))
    for shape, axis in (
        ((32,), 0), ((64, 3), 0), ((5, 64), -1), ((2, 64, 3), 1), ((64, 2, 3), 0), ((2, 3, 4, 32), -1),
        ((2, 3, 32, 5), -2), ((2, 32, 3, 2), -3), ((160, 130), 0), ((96, 3, 2, 2), 0),
    ):  # fmt: skip
        yield quantize_check("quantize.axis", f"shape {shape}, axis {axis}", request(shape, axis))
    for n in SIZES if plan.full else (16, 64):
        long = request((2 * n if n >= 32 else 64, 3), 0, spec={"hadamard": n})
        yield quantize_check("quantize.axis", f"H{n} along axis 0", long)
        three = request((2 * n if n >= 32 else 64, 2, 3), 0, spec={"hadamard": n})
        yield quantize_check("quantize.axis", f"H{n} along axis 0 of three", three)
    yield _refused(request((3, 40)), "length 40 without pad=True")
    yield _refused(request((40, 3), 0), "length 40 along axis 0 without pad=True")
    yield _refused(request((3, 32), spec={"hadamard": 64}), "length 32 under H64")
    for shape, axis, n in (
        ((3, 33), -1, 0), ((1, 1), -1, 0), ((2, 31), -1, 0), ((70, 3), 0, 0), ((2, 45, 3), 1, 0),
        ((3, 40), -1, 16), ((3, 40), -1, 64), ((70, 2), 0, 128), ((2, 32), -1, 64),
    ):  # fmt: skip
        title = f"shape {shape}, axis {axis}" + (f", H{n}" if n else "")
        yield quantize_check("quantize.padding", title, request(shape, axis, pad=True, spec={"hadamard": n}))


def combinations(plan: Plan) -> Iterator[Check]:
    """Yield drawn combinations of what is declared: treatment, type, shape, axis, padding, placement, values."""
    rng = np.random.default_rng(plan.seed)
    for i in range(3000 if plan.full else 60):
        yield quantize_check("quantize.order", f"drawn combination {i}", _drawn(rng, plan))


def _one_of(rng: np.random.Generator, choices: Any, declared: Any = None) -> Any:
    values = [c for c in choices if declared is None or c in declared] or list(choices)
    return values[int(rng.integers(len(values)))]


def drawn_spec(rng: np.random.Generator, caps: Capabilities, made: BlockFormat) -> OperandSpec:
    """Return a random treatment, made of declared values where any are declared."""
    one_of = partial(_one_of, rng)
    native = {Rounding.SR} if caps.native_sr else set()
    hadamard = one_of([0, 0, 0, *SIZES], {0, *caps.hadamard_sizes})
    return OperandSpec(
        format=made, scale_rule=one_of(rules_of(made.scale), caps.scale_rules),
        rounding=one_of(Rounding, caps.roundings - native),
        sr_bits=one_of([16, 16, 1, 8, 17, 22], range(1, caps.max_sr_bits + 1)),
        block=one_of([made.row] * 3 + [made.tile], caps.blocks), zero_scale=one_of([0, made.scale.one_code]),
        prescale=one_of([False, False, True], {False, caps.prescale and made.scale.powers}), hadamard=hadamard,
        signs=one_of(SignPolicy) if hadamard else SignPolicy.NONE,
    )  # fmt: skip


def _drawn(rng: np.random.Generator, plan: Plan) -> Request:
    one_of = partial(_one_of, rng)
    caps, made = plan.declared, plan.format
    spec = drawn_spec(rng, caps, made)
    tile = spec.block.is_tile
    unit = max(made.k, spec.hadamard)
    length = unit * one_of([1, 1, 2, 3])
    pad = not tile and bool(rng.integers(4) == 0)
    others = one_of([(32,), (64,), (2, 32)] if tile else [(1,), (3,), (7,), (2, 3)])
    axis = -1 if len(others) > 1 else one_of([-1, 0])
    shape = (*others, length - (one_of([1, 5, made.k * 3 // 4]) if pad else 0))
    drawn = one_of([partial(any_bits, element=made.element), heavy_tailed, _normal, _zeros_and_signs])(
        rng, shape
    )
    x = np.ascontiguousarray(np.moveaxis(drawn, -1, axis)).astype(np.float32)
    where: dict[str, Any] = {}
    if not pad and rng.integers(2):
        units = [made.k if tile else 1] * x.ndim
        units[axis] = unit
        origin = tuple(int(rng.integers(3)) * u for u in units)
        extra = tuple(int(rng.integers(2)) * u for u in units)
        where = {"origin": origin, "global_shape": tuple(map(sum, zip(origin, x.shape, extra, strict=True)))}
    name = one_of(["float32"] * 4 + list(INPUT_DTYPES), caps.in_dtypes)
    stream = Stream(
        int(rng.integers(1 << 62)), int(rng.integers(1 << 20)), int(rng.integers(99)), int(rng.integers(6))
    )
    x = cast(x, name)
    amax = None
    if made.tensor_scale and (where or rng.integers(2)):  # that of a part is given, near some of its elements
        magnitudes = np.abs(x[np.isfinite(x)].astype(np.float32))
        amax = float(one_of(magnitudes)) if magnitudes.size else 1.0
    return Request(x, spec, axis=axis, rng=stream, pad=pad, amax=amax, **where)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _zeros_and_signs(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    x: NDArray[np.float32] = rng.choice(np.array([0.0, -0.0, 1e-45, -1e-45, 1.0, -3.5], np.float32), shape)
    return x


def _permuted(plan: Plan, rng: np.random.Generator, clause: str, blocks: int) -> Check:
    x = plan.cast(tame(rng, (48, plan.format.k * blocks), made=plan.format))
    return permuted(clause, Request(x, plan.base, rng=STREAM, amax=plan.amax))


def permuted(clause: str, request: Request) -> Check:
    """Return the check that blames the layout if the right codes, or scales, are in another order."""

    def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
        if clause != "packing.scales":
            same = (np.sort(got.codes, axis=-1) == np.sort(want.codes, axis=-1)).all(axis=-1)
            wrong = same & (got.codes != want.codes).any(axis=-1)
        else:
            same = (np.sort(got.scales, axis=-1) == np.sort(want.scales, axis=-1)).all(axis=-1)
            wrong = same[:, None] & (got.scales != want.scales)
        return wrong, wrong.size

    what = "scales within a row" if clause == "packing.scales" else "codes within a block"
    return quantize_check(clause, f"order of {what}", request, judge)


def _refused(request: Request, title: str) -> Check:
    accepted = "a length that does not fit was accepted without pad=True"
    return Check.refused("quantize.length", title, request, request.ask, ShapeError, accepted)
