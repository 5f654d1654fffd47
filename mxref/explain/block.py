"""One block, step by step: computes what quantization did to each of its elements, and why.

Codes and scale codes are those that `mxref.quantize` returns; the steps between are computed by the same functions that
it calls, so an explanation always agrees with the quantization. Only the part of an array on which the block depends is
read: its Hadamard groups, and its tile. A format with a scale of the tensor depends on the whole array, unless the
tensor's amax is given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.arguments import as_spec, check_bool, check_integer
from mxref.arrays import as_array
from mxref.dialects import Dialect
from mxref.errors import RecipeError, ShapeError
from mxref.explain.explanation import BlockExplanation, Case, ElementExplanation, ScaleExplanation
from mxref.formats import BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement
from mxref.plan import QuantPlan, check_input, plan_quantize
from mxref.quantization import plan_tensor_scale, quantize
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix, lower_largest
from mxref.steps.hadamard import hadamard
from mxref.steps.quotient import (
    NO_TENSOR_SCALE,
    TensorScale,
    block_quotient,
    quotient,
    scale_code_of_quotient,
)
from mxref.steps.random import Stream, random_integers
from mxref.steps.rounding import Rounding, apply_prescale, round_magnitude
from mxref.steps.scale import (
    INFINITY_BITS,
    MANTISSA_BITS,
    MANTISSA_MASK,
    magnitude_bits,
    scale_code,
)


def explain_block(
    x: Any,
    spec: OperandSpec | Dialect | str | None = None,
    rng: Stream | None = None,
    *,
    axis: int = -1,
    index: int = 0,
    pad: bool = False,
    amax: float | None = None,
) -> BlockExplanation:
    """Return how one block of `x` is quantized; only the part of `x` that it depends on is read.

    Args:
        x: float32, bfloat16 or float16, any shape.
        spec: the treatment; default the dialect `ocp`.
        rng: random stream, needed for SR and random signs.
        axis: the block axis.
        index: number of the block in storage order, that is with the block axis last.
        pad: append zeros along the block axis, as in `mxref.quantize`.
        amax: for a format with a scale of the tensor, the largest finite magnitude of the tensor after its transform,
            rounded to float32; default that of `x`, all of which is read then.

    Raises:
        ShapeError: the block does not exist; and all that `mxref.quantize` raises.
        RecipeError: an `amax` that is no finite magnitude, or for a format without a scale of the tensor.
    """
    part = block_part(x, spec, rng, axis=axis, index=index, pad=pad, amax=amax)
    spec, whole, plan, slab, within = part.spec, part.whole, part.plan, part.slab, part.placement
    k, element, r, b = whole.format.k, whole.format.element, part.row, part.block
    q = quantize(slab, spec, axis=whole.axis, placement=within, pad=part.pad)

    x_rows = part.rows()
    y_rows = hadamard(x_rows, plan.rotation) if plan.rotation else x_rows
    here = slice(b * k, (b + 1) * k)
    y = y_rows[r, here]
    byte = int(q.scales.reshape(plan.rows, -1)[r, b])
    random = None
    if plan.stream is not None:
        random = random_integers(
            plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, spec.sr_bits
        )[r, here]
    shared = y_rows[:, here] if spec.block.is_tile else y[None]
    scale = _explain_scale(shared, r if len(shared) > 1 else 0, byte, spec, part)
    codes = unpack(q.codes, element).reshape(plan.rows, -1)[r, here]
    signs = np.tile(plan.rotation.vector(), plan.length // plan.rotation.n) if plan.rotation else None
    elements = _explain_elements(
        x_rows[r, here], y, signs[here] if signs is not None else None, random, codes, scale, spec, part.tensor,
        real=whole.shape[whole.axis] - part.start[whole.axis],
    )  # fmt: skip
    return BlockExplanation(
        spec, rng, plan.rotation, whole.shape, whole.axis, part.index, part.blocks, part.start, scale,
        elements, pack(codes, element).tobytes(),
    )  # fmt: skip


def _explain_scale(
    y: NDArray[np.float32], row: int, byte: int, spec: OperandSpec, part: BlockPart
) -> ScaleExplanation:
    made, t, rule = part.whole.format, part.tensor_scale, spec.scale_rule
    element, grid = made.element, made.scale.values[: made.scale.max_code + 1]
    bits = magnitude_bits(y)  # [rows sharing the scale, k]
    u = bits.max()
    amax = float(np.array(u).view(np.float32))
    at = np.flatnonzero(bits[row] == u)
    exponent_field, mantissa = int(u) >> MANTISSA_BITS, int(u) & MANTISSA_MASK
    ordinary = 0 < u < INFINITY_BITS
    bump, unclamped, over, largest, lower, upper = 0, None, None, None, None, None
    if ordinary and made.scale.powers:
        # Whether the rule adds one to the exponent of FLOOR, found at an exponent that is not clamped.
        probe = np.uint32(128 << MANTISSA_BITS | mantissa)
        bump = int(scale_code(np.array(probe), rule, element)) - (128 - element.max_exponent)
        unclamped = exponent_field - 127 - element.max_exponent + bump
    elif ordinary:
        largest = element.max_value
        if spec.four_over_six is not FourOverSix.OFF:
            six = scale_code_of_quotient(np.array(u).view(np.float32), made, part.tensor)
            largest = largest if byte == six else lower_largest(made)
        over = float(
            block_quotient(np.array(u).view(np.float32), made, part.tensor, spec.arithmetic, largest)
        )
        below = bisect_right(grid, over) - 1
        lower, upper = grid[below], grid[min(below + 1, made.scale.max_code)]
    return ScaleExplanation(
        rule=rule,
        amax=amax,
        amax_bits=int(u),
        amax_at=int(at[0]) if at.size else None,
        exponent_field=exponent_field,
        mantissa=mantissa,
        bump=bump,
        unclamped=unclamped,
        byte=byte,
        value=made.scale.values[byte],
        tensor_amax=part.tensor_amax,
        tensor_scale=t,
        quotient=over,
        lower=lower,
        upper=upper,
        over=largest,
    )


def _explain_elements(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    signs: NDArray[np.float32] | None,
    random: NDArray[np.uint32] | None,
    codes: NDArray[np.uint8],
    scale: ScaleExplanation,
    spec: OperandSpec,
    tensor: TensorScale,
    real: int,
) -> tuple[ElementExplanation, ...]:
    assert isinstance(spec.format, BlockFormat)
    format = spec.format.element
    spoiled = math.isnan(scale.value)
    factor = (scale.tensor_scale or 1.0) / (format.prescale if spec.prescale else 1.0)
    v = _scaled(np.zeros_like(y) if spoiled else np.abs(y), scale, spec, tensor)
    below = round_magnitude(v, Rounding.RTZ, format)
    out = []
    for i in range(len(y)):
        lower = format.magnitudes[below[i]]
        upper = format.magnitudes[min(below[i] + 1, format.max_code)]
        fraction = (float(v[i]) - lower) / (upper - lower) if upper > lower else None
        code = int(codes[i])
        element = format.values[code]
        value = math.nan if spoiled else element * scale.value * factor
        unscaled = spoiled or (scale.value == 0 and y[i] != 0 and v[i] == 0)
        stochastic = random is not None and not unscaled
        out.append(
            ElementExplanation(
                position=i,
                padded=i >= real,
                x=float(x[i]),
                x_bits=int(x.view(np.uint32)[i]),
                d=int(signs[i]) if signs is not None else 1,
                y=float(y[i]),
                y_bits=int(y.view(np.uint32)[i]),
                v=None if unscaled else float(v[i]),
                lower=None if unscaled else lower,
                upper=None if unscaled else upper,
                fraction=None if unscaled else fraction,
                threshold=math.floor(fraction * 2**spec.sr_bits)
                if stochastic and fraction is not None
                else None,
                random=int(random[i]) if stochastic and random is not None else None,
                case=Case.NAN
                if spoiled
                else _case(float(y[i]), float(v[i]), lower, fraction, abs(element), spec, format.max_value),
                code=code,
                element=element,
                value=value,
                error=None if spoiled else abs(value - float(y[i])),
            )
        )
    return tuple(out)


def _scaled(
    magnitude: NDArray[np.float32], scale: ScaleExplanation, spec: OperandSpec, tensor: TensorScale
) -> NDArray[Any]:
    """Return magnitudes over their scale as `mxref.quantize` rounds them, [k]; 0 under a scale of 0, or of NaN."""
    made = spec.format
    assert isinstance(made, BlockFormat)
    if math.isnan(scale.value):
        return np.zeros_like(magnitude)
    if not made.scale.powers:
        return quotient(
            magnitude, np.full(len(magnitude), scale.byte, np.uint8), made, tensor, spec.arithmetic
        )
    with np.errstate(under="ignore"):
        v = (magnitude.astype(np.float64) / scale.value).astype(np.float32)
        return apply_prescale(v, made.element) if spec.prescale else v


def _case(
    y: float,
    v: float,
    lower: float,
    fraction: float | None,
    element: float,
    spec: OperandSpec,
    largest: float,
) -> Case:
    # If y is not zero but v is, v was too small for float32: it is in the grid's first gap, not on the grid.
    if v == lower and (v != 0 or y == 0):
        return Case.EXACT
    if v > largest:
        return Case.SATURATED
    if fraction == 0.5 and spec.rounding in (Rounding.RNE, Rounding.RNA):
        return Case.TIE
    return Case.UP if element > lower else Case.DOWN


@dataclass(frozen=True)
class BlockPart:
    """The part of an array on which the bits of one of its blocks depend: its Hadamard groups, and its tile."""

    spec: OperandSpec
    whole: QuantPlan
    """The plan of the whole array."""
    plan: QuantPlan
    """The plan of the part."""
    slab: NDArray[Any]
    """The part, in the array's axis order."""
    placement: Placement
    """Where the part lies in the array, and the random stream."""
    pad: bool
    index: int
    blocks: int
    """How many blocks the array has."""
    start: tuple[int, ...]
    """Index of the block's first element in the array."""
    row: int
    """Row of the block in the part, block axis last."""
    block: int
    """Number of the block in its row of the part."""
    tensor_amax: float | None
    """A, the largest finite magnitude of the tensor; None for a format without a scale of the tensor."""
    tensor_scale: float | None
    """t, which follows from it."""

    @property
    def tensor(self) -> TensorScale:
        """A and t; where the format has no scale of the tensor, a scale of 1."""
        if self.tensor_amax is None or self.tensor_scale is None:
            return NO_TENSOR_SCALE
        return TensorScale(np.float32(self.tensor_amax), np.float32(self.tensor_scale))

    def rows(self) -> NDArray[np.float32]:
        """Return the rows of the part, padded: float32 [rows, length]."""
        return _rows(self.slab, self.plan)


def block_part(
    x: Any,
    spec: OperandSpec | Dialect | str | None,
    rng: Stream | None,
    *,
    axis: int = -1,
    index: int = 0,
    pad: bool = False,
    amax: float | None = None,
) -> BlockPart:
    """Return the part of `x` on which a block depends; arguments and errors as in `explain_block`."""
    x, spec = as_array(x), as_spec(spec)
    check_input(x)
    placement = Placement(rng)
    index, pad = check_integer("index", index), check_bool("pad", pad)
    whole = plan_quantize(x.shape, spec, axis, placement, pad)
    k = whole.format.k
    per_row = whole.length // k
    if not 0 <= index < whole.rows * per_row:
        raise ShapeError(
            f"block {index} does not exist: shape {tuple(x.shape)} along axis {whole.axis} has "
            f"{whole.rows * per_row} blocks, numbered from 0"
        )
    row, block = divmod(index, per_row)
    row_index = [int(i) for i in np.unravel_index(row, whole.rows_shape)] if whole.rows_shape else []
    start = (*row_index[: whole.axis], block * k, *row_index[whole.axis :])
    origin, slab = _slab(x, whole, start)
    of_tensor = _tensor_amax(x, whole, amax)
    within = Placement(rng, origin, tuple(x.shape), amax=of_tensor)
    plan = plan_quantize(slab.shape, spec, whole.axis, within, pad)
    r = start[_tile_axis(whole)] % spec.block.rows if spec.block.is_tile else 0
    b = block - plan.first // k
    t = None if of_tensor is None else float(plan_tensor_scale(slab, plan, within)[1][0])
    return BlockPart(
        spec, whole, plan, slab, within, pad, index, whole.rows * per_row, start, r, b,
        None if of_tensor is None else float(of_tensor[0]), t,
    )  # fmt: skip


def _tensor_amax(x: NDArray[Any], plan: QuantPlan, amax: float | None) -> NDArray[np.float32] | None:
    """Return the amax of the tensor, float32 [1], given or that of `x`; None where the format has no scale of it."""
    if not plan.format.tensor_scale:
        if amax is not None:
            raise RecipeError(
                f"amax = {amax} with the format {plan.format}: it has no scale of the tensor; leave amax out"
            )
        return None
    if amax is not None:
        with np.errstate(over="ignore"):
            return np.array([amax], np.float32)
    rows = _rows(x, plan)
    bits = magnitude_bits(hadamard(rows, plan.rotation) if plan.rotation else rows)
    return np.array([bits[bits < INFINITY_BITS].max(initial=0)]).view(np.float32)


def _rows(x: NDArray[Any], plan: QuantPlan) -> NDArray[np.float32]:
    """Return the rows of an array along the block axis, padded: float32 [rows, length]."""
    rows = np.moveaxis(x, plan.axis, -1).reshape(plan.rows, -1).astype(np.float32)
    return np.pad(rows, [(0, 0), (0, plan.length - rows.shape[1])])


def _tile_axis(plan: QuantPlan) -> int:
    last = len(plan.shape) - 1
    return last if plan.axis != last else last - 1


def _slab(x: NDArray[Any], plan: QuantPlan, start: tuple[int, ...]) -> tuple[tuple[int, ...], NDArray[Any]]:
    """Return the part of `x` whose values the block depends on, and its origin: Hadamard groups, tiles."""
    sizes = [1] * len(start)
    sizes[plan.axis] = plan.unit
    if plan.spec.block.is_tile:
        sizes[_tile_axis(plan)] = plan.spec.block.rows
    origin = tuple(s // size * size for s, size in zip(start, sizes, strict=True))
    return origin, x[tuple(slice(o, o + size) for o, size in zip(origin, sizes, strict=True))]
