"""Sweeps: every crafted block under every scale rule, rounding and policy, each bit compared under its clause.

One answer is judged for several clauses: its scales by the kind of block; its signs; and, where the scale is right, its
magnitudes by the step that decides them. So a wrong scale is not also reported as a wrong rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.blame import deciders
from mxref.conformance.checking import Check, Plan, block_format
from mxref.conformance.finding import controlled_check, quantize_check
from mxref.conformance.requests.crafted import crafted_blocks, crafted_tensors, tame, threshold_blocks
from mxref.conformance.requests.quantizing import Request, scales_only
from mxref.dialects import dialects_of
from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.quotient import Arithmetic, scale_code_of_quotient, tensor_scale
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import INFINITY_BITS, ScaleRule, bump_above, rules_of

STREAM = Stream(2026, step=3, layer=7, operand=2)

# RCEIL and EVEN of E2M1, a number that no float32 holds, and the ends: always one more, and never.
THRESHOLDS = tuple(map(ScaleRule, (">1.5", ">=1.75", ">1.3", ">=1", ">=2")))

_AMAXES = (5.3, 1234.5)
"""Largest magnitudes of tensors whose inverses depend on the order of operations: on how often they are rounded."""


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the sweeps over crafted blocks, and the checks of amax, blocks, tiles and dialects."""
    full = plan.full
    tensors = [(plan.cast(each.x), each) for each in crafted_tensors(plan.format, full)]
    yield from _amax_places(plan)
    for spec in _sweep_specs(plan):
        name = f"{spec.scale_rule.value} {spec.rounding.value}{_prescale(spec)}, crafted blocks"
        for x, tensor in tensors:
            yield from _decided(name + tensor.where, Request(x, spec, rng=STREAM, amax=tensor.amax))
    for rule in THRESHOLDS if plan.format.scale.powers else ():
        blocks = plan.cast(threshold_blocks(plan.format, bump_above(rule, plan.element)).x)
        request = Request(blocks, replace(plan.base, scale_rule=rule), rng=STREAM)
        yield from _decided(f"{rule.value}, amax at its bound", request)
    if full:
        yield from _every_bfloat16(plan)
    yield from _block_shapes(plan)
    orders = () if plan.format.scale.powers else tuple(Arithmetic)[1:]
    for order, (x, tensor) in product(orders, tensors):
        request = Request(x, replace(plan.base, arithmetic=order), amax=tensor.amax)
        yield quantize_check("scale.arithmetic", f"{order.value}, crafted blocks{tensor.where}", request)
    for order, amax in product(orders, _AMAXES if plan.format.tensor_scale else ()):
        turns = plan.cast(_turns(plan.format, order, amax))
        request = Request(turns, replace(plan.base, arithmetic=order), amax=amax)
        yield quantize_check("scale.arithmetic", f"{order.value}, turns of scales, tensor {amax}", request)
    choices = () if plan.format.scale.powers else tuple(FourOverSix)[1:]
    drawn = plan.cast(np.random.default_rng(plan.seed + 1).standard_normal((64, 8 * plan.format.k)))
    for by, (x, amax, where) in product(
        choices, [*((x, tensor.amax, f"crafted blocks{tensor.where}") for x, tensor in tensors),
                  (drawn, None, "normal draws")],
    ):  # fmt: skip
        request = Request(x, replace(plan.base, four_over_six=by), amax=amax)
        yield quantize_check("scale.four_over_six", f"{by.value} error, {where}", request, scales_only)
    for name, spec in dialects_of(plan.format).items():
        yield from _dialect(name, spec, plan)


def _turns(made: BlockFormat, order: Arithmetic, amax: float) -> NDArray[np.float32]:
    """Return blocks of the least amax to which an order of operations gives each scale, and of the number below it.

    Another order has other turns, by an ulp or two; all blocks beside them get the same scale.
    """
    tensor = tensor_scale(np.float32(amax), made, order)
    codes = np.arange(made.scale.max_code)
    below, above = np.zeros_like(codes), np.full_like(codes, INFINITY_BITS - 1)
    while (above - below > 1).any():
        middle = (below + above) // 2
        largest = middle.astype(np.uint32).view(np.float32)
        higher = scale_code_of_quotient(largest, made, tensor, order) > codes
        below, above = np.where(higher, below, middle), np.where(higher, middle, above)
    x = np.zeros((2 * len(codes), made.k), np.float32)
    x[:, 0] = np.concatenate([below, above]).astype(np.uint32).view(np.float32)
    return x


def _decided(title: str, request: Request) -> Iterator[Check]:
    """Yield a check of a request for each clause that decides some of its bits."""
    for clause, judge in deciders(request):
        yield quantize_check(clause, title, request, judge)


def _sweep_specs(plan: Plan) -> Iterator[OperandSpec]:
    base, scale = plan.base, plan.format.scale
    if not plan.full:
        for i, rule in enumerate(rules_of(scale)):
            yield replace(base, scale_rule=rule, zero_scale=scale.one_code * (i % 2))
        for rounding in Rounding:
            if rounding is not base.rounding:
                yield replace(base, rounding=rounding)
            yield replace(base, rounding=rounding, prescale=scale.powers, zero_scale=scale.one_code)
        return
    for rule, rounding, prescale in product(rules_of(scale), Rounding, _prescales(plan)):
        yield replace(base, scale_rule=rule, rounding=rounding, prescale=prescale)
        if not prescale:
            yield replace(base, scale_rule=rule, rounding=rounding, zero_scale=scale.one_code)


def _prescales(plan: Plan) -> tuple[bool, ...]:
    return (False, True) if plan.format.scale.powers else (False,)


def _prescale(spec: OperandSpec) -> str:
    """Return the part of a check's name that tells the prescale."""
    return f" {Fraction(block_format(spec).element.prescale)}" if spec.prescale else ""


def _every_bfloat16(plan: Plan) -> Iterator[Check]:
    x = plan.cast(every_bfloat16(plan))
    for rounding, prescale in product(Rounding, _prescales(plan)):
        spec = replace(plan.base, rounding=rounding, prescale=prescale)
        request = Request(x, spec, rng=STREAM, amax=plan.amax)
        name = f"{rounding.value}{_prescale(request.spec)}, every bfloat16 to {plan.element.max_value:g}"
        yield from _decided(name, request)


def every_bfloat16(plan: Plan) -> NDArray[np.float32]:
    """Return every bfloat16 from 0 to M as an element under X = 1, with either sign: blocks [N, k]."""
    k, largest = plan.format.k, int(np.float32(plan.element.max_value).view(np.uint32))
    words = np.arange((largest >> 16) + 1, dtype=np.uint32) << np.uint32(16)
    per_block = k - 1
    blocks = np.full((-(-words.size // per_block), k), np.uint32(largest))
    blocks[:, 1:].flat[: words.size] = words
    return np.concatenate([blocks, blocks | np.uint32(1 << 31)]).view(np.float32)


def _amax_places(plan: Plan) -> Iterator[Check]:
    """The largest magnitude at each position of a block, with each sign."""
    k = plan.format.k
    x = tame(np.random.default_rng(1), (2 * k, k), made=plan.format) / 64
    # 1.25 times a power of two stays on its side of every rule's bound, even if it is off by one.
    largest = 5120.0 if plan.format.scale.powers else 1280.0
    x[np.arange(2 * k), np.arange(2 * k) % k] = np.where(np.arange(2 * k) < k, largest, -largest)
    for rule in rules_of(plan.format.scale):
        yield quantize_check(
            "scale.amax", f"{rule.value}, amax at every position with either sign",
            Request(plan.cast(x), replace(plan.base, scale_rule=rule), rng=STREAM, amax=plan.amax), scales_only,
        )  # fmt: skip


def _block_shapes(plan: Plan) -> Iterator[Check]:
    rng = np.random.default_rng(2)
    # Times 1.25, a small block would be at a tie of two scales with a mantissa.
    factor = 1.25 if plan.format.scale.powers else 1.0
    for rule in rules_of(plan.format.scale):
        x = plan.cast(tame(rng, (5, 7 * plan.format.k), made=plan.format) * factor)
        spec = replace(plan.base, scale_rule=rule)
        title = f"{rule.value}, blocks of different sizes side by side"
        request = Request(x, spec, rng=STREAM, amax=plan.amax)
        yield quantize_check("scale.block.row", title, request, scales_only)
    for rule, rounding in product(rules_of(plan.format.scale), Rounding):
        if not plan.full and (rule is not plan.base.scale_rule) and rounding is not plan.base.rounding:
            continue
        for shape, axis in (((96, 64), 1), ((64, 96), 0), ((2, 32, 64), -1), ((64, 2, 32), 0)):
            one = plan.format.scale.one_code
            rows = replace(plan.base, scale_rule=rule, rounding=rounding, zero_scale=one)
            x = plan.cast(crafted_tiles(rng, shape, axis, plan.format.k))
            tiles = replace(rows, block=plan.format.tile)
            request = Request(x, tiles, axis=axis, rng=STREAM, amax=plan.amax)
            title = f"{rule.value} {rounding.value}, tiles of shape {shape} along axis {axis}"
            yield controlled_check("scale.block.tile", title, request, [replace(request, spec=rows)])


def crafted_tiles(rng: np.random.Generator, shape: tuple[int, ...], axis: int, k: int) -> NDArray[np.float64]:
    """Return tiles of grid points whose amax is in one row only; one tile with NaN or Inf, one of zeros."""
    lengths = [*shape]
    length = lengths.pop(axis)
    # The last axis of the rows and the block axis, each in tiles.
    tiles = (*lengths[:-1], lengths[-1] // k, k, length // k, k)
    x = rng.choice([0.5, 1.0, 1.5, 2.0, -0.5, -2.0], tiles)
    x[..., int(rng.integers(k)), :, k // 2 + 1] = -4.0
    x *= np.exp2(rng.integers(-9, 10, (*tiles[:-3], 1, tiles[-2], 1)))
    flat = x.reshape(-1, *tiles[-4:])
    flat[0, 0, 9, -1, 5] = rng.choice([np.nan, np.inf, -np.inf])
    flat[-1, -1, :, 0] = 0.0
    return np.moveaxis(x.reshape(*lengths, length), -1, axis)


def _dialect(name: str, spec: OperandSpec, plan: Plan) -> Iterator[Check]:
    x = plan.cast(crafted_blocks(plan.format, plan.full).x)
    k = plan.format.k
    unit = max(spec.hadamard, k)
    rows = x[: len(x) // (unit // k) * (unit // k)].reshape(-1, unit)
    drawn = plan.cast(np.random.default_rng(plan.seed).standard_normal((64, 4 * unit)))
    for what, values in (("crafted blocks", rows), ("normal draws", drawn)):
        yield quantize_check(f"dialect.{name}", f"{name}, {what}", Request(values, spec, rng=STREAM))
