"""One block, step by step: what quantization did to each of its elements, and why.

Codes and scale codes are those that `mxref.quantize` returns; the steps between are computed by the
same functions that it calls, so an explanation always agrees with the quantization.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.dialects import Dialect
from mxref.explain.part import block_part
from mxref.formats import E8M0, BlockFormat, BlockShape, ElementFormat
from mxref.layouts.packed import pack, unpack
from mxref.quantization import quantize
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation, hadamard
from mxref.steps.random import Stream, random_integers
from mxref.steps.rounding import Rounding, apply_prescale, round_magnitude
from mxref.steps.scale import (
    INFINITY_BITS,
    MANTISSA_BITS,
    MANTISSA_MASK,
    ScaleRule,
    magnitude_bits,
    scale_code,
)


class Case(StrEnum):
    """The result of rounding for an element."""

    EXACT = "exact"
    """The scaled value lies on the grid."""
    TIE = "tie"
    """Halfway between two grid points, under a rounding to nearest."""
    UP = "up"
    DOWN = "down"
    SATURATED = "saturated"
    """Above the largest magnitude of the format."""
    NAN = "nan"
    """Not rounded: the block is a NaN block."""


@dataclass(frozen=True)
class ElementExplanation:
    """The quantization of one element; all values but `v`, `lower` and `upper` are in the units of the tensor."""

    position: int
    """Place in the block, from 0."""
    padded: bool
    """Whether it is a zero appended by padding."""
    x: float
    x_bits: int
    d: int
    """The random sign, +1 or -1."""
    y: float
    """The value after signs and Hadamard transform; `x` without a transform."""
    y_bits: int
    v: float | None
    """|y| / X, times the prescale if the treatment has one; None in a NaN block, as the fields derived from it."""
    lower: float | None
    upper: float | None
    fraction: float | None
    """(v - lower) / (upper - lower), in [0, 1); None from the largest magnitude on."""
    threshold: int | None
    """For SR: T = floor(fraction * 2^R)."""
    random: int | None
    """For SR: r; the element is rounded up if T + r >= 2^R."""
    case: Case
    code: int
    element: float
    """The value P of the code."""
    value: float
    """P * X, divided by the prescale as in a GEMM; NaN in a NaN block."""
    error: float | None
    """|value - y|."""


@dataclass(frozen=True)
class ScaleExplanation:
    """The choice of the shared scale from the block's amax."""

    rule: ScaleRule
    amax: float
    amax_bits: int
    amax_at: int | None
    """Position of the first element that has amax; None if amax is in another row of a tile."""
    exponent_field: int
    """E, the biased exponent of amax."""
    mantissa: int
    """m, the 23 mantissa bits of amax."""
    bump: int
    """1 if the exponent is one more than that of FLOOR."""
    unclamped: int | None
    """e before clamping to [-127, 127]; None for a zero or NaN block."""
    byte: int
    value: float
    """X; NaN for byte 255."""


@dataclass(frozen=True)
class BlockExplanation:
    """Everything about one block."""

    spec: OperandSpec
    stream: Stream | None
    rotation: Rotation | None
    shape: tuple[int, ...]
    axis: int
    index: int
    """Number of the block in storage order, block axis last."""
    blocks: int
    """How many blocks the array has."""
    start: tuple[int, ...]
    """Index of the block's first element in the array."""
    scale: ScaleExplanation
    elements: tuple[ElementExplanation, ...]
    packed: bytes
    """The bytes of codes as stored."""

    @property
    def format(self) -> BlockFormat:
        """The block format that the quantization makes."""
        made = self.spec.format
        assert isinstance(made, BlockFormat)  # checked when the quantization was planned
        return made

    @property
    def sqnr_db(self) -> float | None:
        """The ratio of signal to quantization noise in dB, 10 log10(sum y^2 / sum error^2).

        It is infinite without an error, and None for a block of zeros or of NaN.
        """
        signal = math.fsum(e.y**2 for e in self.elements)
        noise = math.fsum(e.error**2 for e in self.elements if e.error is not None)
        if self.scale.byte == E8M0.nan_code or signal == 0:
            return None
        return 10 * math.log10(signal / noise) if noise else math.inf

    @property
    def max_error(self) -> float | None:
        """The largest absolute error; None for a NaN block."""
        errors = [e.error for e in self.elements if e.error is not None]
        return max(errors) if errors else None


def explain_block(
    x: Any,
    spec: OperandSpec | Dialect | str | None = None,
    rng: Stream | None = None,
    *,
    axis: int = -1,
    index: int = 0,
    pad: bool = False,
) -> BlockExplanation:
    """Return how one block of `x` is quantized; only the part of `x` that it depends on is read.

    Args:
        x: float32, bfloat16 or float16, any shape.
        spec: the treatment; default the dialect `ocp`.
        rng: random stream, needed for SR and random signs.
        axis: the block axis.
        index: number of the block in storage order, that is with the block axis last.
        pad: append zeros along the block axis, as in `mxref.quantize`.

    Raises:
        ShapeError: the block does not exist; and all that `mxref.quantize` raises.
    """
    part = block_part(x, spec, rng, axis=axis, index=index, pad=pad)
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
    shared = y_rows[:, here] if spec.block is BlockShape.TILE else y[None]
    scale = _explain_scale(shared, r if len(shared) > 1 else 0, byte, spec.scale_rule, element)
    codes = unpack(q.codes, element).reshape(plan.rows, -1)[r, here]
    signs = np.tile(plan.rotation.vector(), plan.length // plan.rotation.n) if plan.rotation else None
    elements = _explain_elements(
        x_rows[r, here], y, signs[here] if signs is not None else None, random, codes, scale, spec, element,
        real=whole.shape[whole.axis] - part.start[whole.axis],
    )  # fmt: skip
    return BlockExplanation(
        spec, rng, plan.rotation, whole.shape, whole.axis, part.index, part.blocks, part.start, scale,
        elements, pack(codes, element).tobytes(),
    )  # fmt: skip


def _explain_scale(
    y: NDArray[np.float32], row: int, byte: int, rule: ScaleRule, element: ElementFormat
) -> ScaleExplanation:
    bits = magnitude_bits(y)  # [rows sharing the scale, k]
    u = bits.max()
    at = np.flatnonzero(bits[row] == u)
    exponent_field, mantissa = int(u) >> MANTISSA_BITS, int(u) & MANTISSA_MASK
    # Whether the rule adds one to the exponent of FLOOR, found at an exponent that is not clamped.
    probe = np.uint32(128 << MANTISSA_BITS | mantissa)
    bump = int(scale_code(np.array(probe), rule, element)) - (128 - element.max_exponent)
    ordinary = 0 < u < INFINITY_BITS
    return ScaleExplanation(
        rule=rule,
        amax=float(np.array(u).view(np.float32)),
        amax_bits=int(u),
        amax_at=int(at[0]) if at.size else None,
        exponent_field=exponent_field,
        mantissa=mantissa,
        bump=bump if ordinary else 0,
        unclamped=exponent_field - 127 - element.max_exponent + bump if ordinary else None,
        byte=byte,
        value=math.nan if byte == E8M0.nan_code else math.ldexp(1.0, byte - E8M0.bias),
    )


def _explain_elements(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    signs: NDArray[np.float32] | None,
    random: NDArray[np.uint32] | None,
    codes: NDArray[np.uint8],
    scale: ScaleExplanation,
    spec: OperandSpec,
    format: ElementFormat,
    real: int,
) -> tuple[ElementExplanation, ...]:
    spoiled = scale.byte == E8M0.nan_code
    undo = 1 / format.prescale if spec.prescale else 1.0
    magnitude = np.zeros_like(y) if spoiled else np.abs(y)
    with np.errstate(under="ignore"):
        exponent = 0 if spoiled else scale.byte - E8M0.bias
        v = np.ldexp(magnitude.astype(np.float64), -exponent).astype(np.float32)
        v = apply_prescale(v, format) if spec.prescale else v
    below = round_magnitude(v, Rounding.RTZ, format)
    out = []
    for i in range(len(y)):
        lower = format.magnitudes[below[i]]
        upper = format.magnitudes[min(below[i] + 1, format.max_code)]
        fraction = (float(v[i]) - lower) / (upper - lower) if upper > lower else None
        code = int(codes[i])
        element = format.values[code]
        value = math.nan if spoiled else element * scale.value * undo
        stochastic = random is not None and not spoiled
        out.append(
            ElementExplanation(
                position=i,
                padded=i >= real,
                x=float(x[i]),
                x_bits=int(x.view(np.uint32)[i]),
                d=int(signs[i]) if signs is not None else 1,
                y=float(y[i]),
                y_bits=int(y.view(np.uint32)[i]),
                v=None if spoiled else float(v[i]),
                lower=None if spoiled else lower,
                upper=None if spoiled else upper,
                fraction=None if spoiled else fraction,
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
