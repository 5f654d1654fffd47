"""The part of an array on which the bits of one of its blocks depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.arguments import as_spec, check_bool, check_integer
from mxref.arrays import as_array
from mxref.dialects import Dialect
from mxref.errors import ShapeError
from mxref.formats import BlockShape
from mxref.placement import Placement
from mxref.plan import QuantPlan, check_input, plan_quantize
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream


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

    def rows(self) -> NDArray[np.float32]:
        """Return the rows of the part, padded: float32 [rows, length]."""
        rows = np.moveaxis(self.slab, self.plan.axis, -1).reshape(self.plan.rows, -1).astype(np.float32)
        return np.pad(rows, [(0, 0), (0, self.plan.length - rows.shape[1])])


def block_part(
    x: Any,
    spec: OperandSpec | Dialect | str | None,
    rng: Stream | None,
    *,
    axis: int = -1,
    index: int = 0,
    pad: bool = False,
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
    within = Placement(rng, origin, tuple(x.shape))
    plan = plan_quantize(slab.shape, spec, whole.axis, within, pad)
    r, b = (start[_tile_axis(whole)] % k if spec.block is BlockShape.TILE else 0), block - plan.first // k
    return BlockPart(spec, whole, plan, slab, within, pad, index, whole.rows * per_row, start, r, b)


def _tile_axis(plan: QuantPlan) -> int:
    last = len(plan.shape) - 1
    return last if plan.axis != last else last - 1


def _slab(x: NDArray[Any], plan: QuantPlan, start: tuple[int, ...]) -> tuple[tuple[int, ...], NDArray[Any]]:
    """Return the part of `x` whose values the block depends on, and its origin: Hadamard groups, tiles."""
    sizes = [1] * len(start)
    sizes[plan.axis] = plan.unit
    if plan.spec.block is BlockShape.TILE:
        sizes[_tile_axis(plan)] = plan.format.k
    origin = tuple(s // size * size for s, size in zip(start, sizes, strict=True))
    return origin, x[tuple(slice(o, o + size) for o, size in zip(origin, sizes, strict=True))]
