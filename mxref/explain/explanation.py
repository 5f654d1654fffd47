"""An explanation of one block as data: each element, the shared scale, and the whole block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref.steps.scale import ScaleRule


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
    """The scaled magnitude: |y| / X, times the prescale if the treatment has one, and over the tensor's scale if the
    format has one; None, as the fields derived from it, in a NaN block, and for a nonzero y under a scale of 0."""
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
    """P * X, divided by the prescale as in a GEMM, and times the tensor's scale; NaN in a NaN block."""
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
    """e before clamping to what the format holds; None for a zero or NaN block, and where scales have a mantissa."""
    byte: int
    value: float
    """X; NaN for the NaN code."""
    tensor_amax: float | None = None
    """A, the largest finite magnitude of the tensor; None for a format without a scale of the tensor."""
    tensor_scale: float | None = None
    """t, the scale of the tensor; None as above."""
    quotient: float | None = None
    """amax / (M t), as a float64; None for a zero or NaN block, and where scales are powers of two."""
    lower: float | None = None
    """The largest scale that is not above the quotient; None as above."""
    upper: float | None = None
    """The next scale; that of the largest scale is itself."""
    over: float | None = None
    """What the quotient divides amax by, beside t: M, or the largest power of two under `four_over_six`."""


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
    def is_nan(self) -> bool:
        """Whether it is a NaN block."""
        return self.scale.byte == self.format.scale.nan_code

    @property
    def sqnr_db(self) -> float | None:
        """The ratio of signal to quantization noise in dB, 10 log10(sum y^2 / sum error^2).

        It is infinite without an error, and None for a block of zeros or of NaN.
        """
        signal = math.fsum(e.y**2 for e in self.elements)
        noise = math.fsum(e.error**2 for e in self.elements if e.error is not None)
        if self.is_nan or signal == 0:
            return None
        return 10 * math.log10(signal / noise) if noise else math.inf

    @property
    def max_error(self) -> float | None:
        """The largest absolute error; None for a NaN block."""
        errors = [e.error for e in self.elements if e.error is not None]
        return max(errors) if errors else None
