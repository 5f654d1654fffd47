"""What a quantization will do, checked and resolved before any element is touched.

Every backend gets its work as a `QuantPlan`, so shapes, padding, origins and signs are decided in one
place and refused with the same words everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import DtypeError, NonfiniteError, RecipeError, ShapeError
from mxref.formats import BLOCK_FORMATS, INPUT_DTYPES, BlockFormat, BlockShape, Nonfinite
from mxref.mxarray import MXArray, on_host
from mxref.placement import Placement, integers
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import LateRotation, Rotation, SignPolicy, draw_rotation, sign_stream
from mxref.steps.random import Stream, check_operand
from mxref.steps.rounding import Rounding


def dtype_name(x: Any) -> str:
    """Return the name of an array's data type without its library's prefix, as in `bfloat16`."""
    return _name(x.dtype)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def check_input(x: Any) -> None:
    """Raise DtypeError unless `x` is an array of float32, bfloat16 or float16 in native byte order.

    Implements: conventions.inputs
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DtypeError(
            f"expected an array, got {type(x).__name__}; make one with numpy.asarray(x, numpy.float32)"
        )
    if dtype_name(x) not in INPUT_DTYPES or not getattr(x.dtype, "isnative", True):
        raise DtypeError(
            f"input type {x.dtype} is not supported: rounding it to float32 first can turn a value into a tie; "
            f"cast it yourself, as in x.astype(numpy.float32) (supported: {', '.join(INPUT_DTYPES)})"
        )


@dataclass(frozen=True)
class QuantPlan:
    """A checked quantization: every backend computes the same codes from it.

    Implements: conformance.plan
    """

    spec: OperandSpec
    shape: tuple[int, ...]
    """Shape of the input."""
    axis: int
    """Block axis of the input; it is moved last in what is stored."""
    length: int
    """Stored length of the block axis: padded with +0 before the Hadamard transform."""
    rotation: Rotation | None
    stream: Stream | None
    """Random stream; set for SR."""
    origin: tuple[int, ...]
    """Where the input lies in the global logical tensor, in the input's axis order."""
    global_shape: tuple[int, ...]
    unit: int
    """Alignment of the block axis: lcm(k, Hadamard size)."""
    step: Any = field(default=None, compare=False)
    """int64 [1] on the device: the step of `stream` and of `signs`, from the placement; set if one of them needs it."""
    tensor_amax: Any = field(default=None, compare=False)
    """float32 [1], the largest finite magnitude of the whole tensor; set where the format has a scale of the tensor."""
    tensor_scale: Any = field(default=None, compare=False)
    """float32 [1], the scale of the tensor that follows from it; set likewise."""
    signs: Stream | None = None
    """Stream of the signs that kernels draw at `step`; set with `step` only, and `rotation` has no signs then."""

    @property
    def format(self) -> BlockFormat:
        """The block format that the quantization makes."""
        made = self.spec.format
        assert isinstance(made, BlockFormat)  # checked when the plan was made
        return made

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Lengths of the other axes, in order."""
        return self._without_axis(self.shape)

    @property
    def rows(self) -> int:
        """Product of the lengths of the other axes."""
        return math.prod(self.rows_shape)

    @property
    def first(self) -> int:
        """Index of the input's first element along the block axis of the global tensor."""
        return self.origin[self.axis]

    @property
    def global_length(self) -> int:
        """Padded length of the block axis of the global tensor."""
        return -(-self.global_shape[self.axis] // self.unit) * self.unit

    def global_rows(self) -> NDArray[np.int64]:
        """Return the global row index of each stored row, int64 [rows].

        Implements: random.index
        """
        rows = np.zeros((), np.int64)
        others = zip(
            self.rows_shape,
            self._without_axis(self.origin),
            self._without_axis(self.global_shape),
            strict=True,
        )
        for length, start, total in others:
            rows = rows[..., None] * total + np.arange(start, start + length, dtype=np.int64)
        return rows.reshape(-1)

    def _without_axis(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return values[: self.axis] + values[self.axis + 1 :]

    def array(self, codes: Any, scales: Any) -> MXArray:
        """Return the MXArray of packed codes [rows..., length * bits / 8] and scale codes [rows..., length / k].

        Raises:
            NonfiniteError: a NaN block under `nonfinite = "raise"`.

        Implements: scale.nonfinite
        """
        if self.spec.nonfinite is Nonfinite.RAISE:
            spoiled = scales == self.format.scale.nan_code
            if bool(spoiled.any()):
                where = tuple(int(i) for i in np.argwhere(on_host(spoiled))[0])
                raise NonfiniteError(
                    f"NaN or Inf in {int(spoiled.sum())} blocks, the first at {where} of the scales (block axis last); "
                    "nonfinite = 'nan_block' would store them as NaN blocks"
                )
        rotation = self.rotation
        late = LateRotation(rotation.n, self.signs) if rotation and self.signs else None
        return MXArray(
            codes, scales, self.shape, self.axis, self.spec.block, self.spec.prescale, late or rotation,
            self.format, self.tensor_scale,
        )  # fmt: skip


def plan_quantize(
    shape: tuple[int, ...],
    spec: OperandSpec,
    axis: int = -1,
    placement: Placement = Placement(),
    pad: bool = False,
) -> QuantPlan:
    """Return the checked plan of a quantization.

    Args:
        shape: shape of the input.
        spec: its treatment; the format must be a block format.
        axis: the block axis.
        placement: the random stream, needed for SR and random signs, and where the input lies in the global
            logical tensor.
        pad: append +0 along the block axis up to a multiple of lcm(k, Hadamard size).

    Raises:
        ShapeError: an axis, length, origin or global shape that does not fit.
        RecipeError: the format has no blocks, or the spec needs the random stream of an operand and there is none.

    Implements: quantize.axis, quantize.length, quantize.padding, scale.block.tile
    """
    plan = _without_bits(
        integers("shape", shape), spec, _integer(axis), placement.origin, placement.global_shape, pad
    )
    stream = placement.stream
    bits: dict[str, Any] = {}
    if spec.rounding is Rounding.SR:
        if stream is None:
            raise RecipeError(
                "rounding = 'sr' needs a random stream: "
                "pass placement=Placement(Stream(seed, step, layer, operand))"
            )
        bits["stream"] = check_operand(stream)
    late = placement.step is not None
    if late and spec.signs in (SignPolicy.PER_STEP, SignPolicy.PER_STEP_LAYER):
        # The plan itself has to serve every step.
        bits["signs"] = replace(sign_stream(spec.signs, stream), step=0)
    elif spec.signs is not SignPolicy.NONE:
        bits["rotation"] = draw_rotation(spec.hadamard, spec.signs, stream)
    if late and ("stream" in bits or "signs" in bits):
        bits["step"] = placement.step
    return replace(plan, **bits) if bits else plan


def _integer(axis: Any) -> int:
    try:
        return index(axis)
    except TypeError:
        raise ShapeError(f"axis must be an integer, got {axis!r}") from None


# A model asks for the same few plans at every step.
@lru_cache(maxsize=1024)
def _without_bits(
    shape: tuple[int, ...],
    spec: OperandSpec,
    axis: int,
    origin: tuple[int, ...] | None,
    global_shape: tuple[int, ...] | None,
    pad: bool,
) -> QuantPlan:
    """Plan everything except the stream and the signs of the Hadamard transform."""
    if not isinstance(spec.format, BlockFormat):
        raise RecipeError(
            f"quantize makes block formats ({', '.join(BLOCK_FORMATS)}), but the operand's format is {spec.format}"
        )
    k = spec.format.k
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"axis {axis} is out of range for shape {shape}")
    axis %= len(shape)
    unit = math.lcm(k, spec.hadamard or 1)
    length = -(-shape[axis] // unit) * unit
    if length != shape[axis] and not pad:
        raise ShapeError(
            f"axis {axis} has length {shape[axis]}, not a multiple of {unit} "
            f"(k = {k}, Hadamard size {spec.hadamard or 'none'}); pass pad=True to append zeros up to {length}"
        )
    origin, global_shape = _check_origin(shape, axis, unit, origin, global_shape)
    if spec.block.is_tile:
        _check_tiles(shape, axis, origin, spec.block)
    # Random signs depend on the stream, and are drawn later.
    given = draw_rotation(spec.hadamard, SignPolicy.NONE, None, spec.sign_vector) if spec.hadamard else None
    return QuantPlan(spec, shape, axis, length, given, None, origin, global_shape, unit)


def _check_origin(
    shape: tuple[int, ...],
    axis: int,
    unit: int,
    origin: tuple[int, ...] | None,
    global_shape: tuple[int, ...] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return origin and global shape, checked and with their defaults.

    Implements: quantize.parts
    """
    if origin is None:
        origin = (0,) * len(shape)
    if global_shape is None:
        if any(origin):
            raise ShapeError(
                f"origin {origin} says where the input lies in a larger tensor: pass its global_shape too"
            )
        global_shape = shape
    if len(origin) != len(shape) or len(global_shape) != len(shape):
        raise ShapeError(
            f"origin {origin} and global_shape {global_shape} must have the {len(shape)} axes of shape {shape}"
        )
    for i, (start, length, total) in enumerate(zip(origin, shape, global_shape, strict=True)):
        if start < 0 or start + length > total:
            raise ShapeError(
                f"axis {i}: origin {start} + length {length} does not lie within the global length {total}"
            )
    ends_inside = origin[axis] + shape[axis] < global_shape[axis]
    if origin[axis] % unit or (shape[axis] % unit and ends_inside):
        raise ShapeError(
            f"axis {axis}: blocks must not straddle shards, so origin {origin[axis]} and length {shape[axis]} "
            f"must be multiples of {unit}"
        )
    return origin, global_shape


def _check_tiles(shape: tuple[int, ...], axis: int, origin: tuple[int, ...], block: BlockShape) -> None:
    if len(shape) < 2:
        raise ShapeError(f"block {block} needs two axes, got shape {shape}")
    other = len(shape) - 1 if axis != len(shape) - 1 else len(shape) - 2
    if shape[other] % block.rows or origin[other] % block.rows:
        raise ShapeError(
            f"block {block}: axis {other} must have length and origin in multiples of {block.rows}, "
            f"got {shape[other]} and {origin[other]}"
        )
