"""How far a quantized operand is from its source: clipped, zeroed, scales, SNR and bias.

Source and result are compared as the rounding sees them: block axis last, padded with zeros to whole blocks, and after
the Hadamard transform if there is one. A prescale, which the GEMM undoes, is undone. All sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mxref.formats import BlockFormat, OperandFormat
from mxref.mxarray import MXArray
from mxref.recipe import OperandSpec
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation
from mxref.steps.random import Stream
from mxref.steps.scale import ScaleRule, scale_code
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.layer.fp8 import FORMATS
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import Bf16Operand, BlockOperand, Fp8Operand, Operand

_SLAB = 1 << 22
"""Elements compared at a time: float64 copies of a whole tensor would need several times its memory."""

_FP8_SLACK = 1 + 2.0**-20
"""The scale of a tensor and its inverse are rounded to float32, so its largest element may seem to be beyond it."""

_LARGEST_BITS = np.array([0x7F7FFFFF], np.uint32)
"""The largest finite float32."""


@dataclass
class Totals:
    """Sums over the elements and blocks of an operand, and over all micro-batches of a step."""

    elements: int = 0
    """With the padding."""
    nonzero: int = 0
    """Finite source elements that are not zero."""
    clipped: int = 0
    zeroed: int = 0
    signal: float = 0.0
    """Sum of v^2."""
    noise: float = 0.0
    """Sum of (q - v)^2."""
    signed: float = 0.0
    """Sum of sign(v) (q - v)."""
    magnitude: float = 0.0
    """Sum of |v|."""
    blocks: int = 0
    """Scales stored."""
    spoiled: int = 0
    """Scales that are NaN."""
    at_low: int = 0
    at_high: int = 0
    scale_min: float | None = None
    scale_max: float | None = None

    def add(self, v: torch.Tensor, q: torch.Tensor, limit: torch.Tensor, valid: torch.Tensor) -> None:
        """Add elements: source, result, the magnitude above which the source is clipped, and which ones count.

        All are float64 of one shape, or can be expanded to it; `valid` is bool.
        """
        v = torch.where(valid, v, 0.0)
        error = torch.where(valid, q - v, 0.0)
        size, real = v.abs(), v != 0
        sums = (
            real.sum(),
            (real & (size > limit)).sum(),
            (real & (q == 0)).sum(),
            v.square().sum(),
            error.square().sum(),
            (error * v.sign()).sum(),
            size.sum(),
        )
        nonzero, clipped, zeroed, signal, noise, signed, magnitude = torch.stack(
            [each.double() for each in sums]
        ).tolist()
        self.elements += v.numel()
        self.nonzero += int(nonzero)
        self.clipped += int(clipped)
        self.zeroed += int(zeroed)
        self.signal += signal
        self.noise += noise
        self.signed += signed
        self.magnitude += magnitude

    def widen(self, low: float, high: float) -> None:
        """Extend the range of scales."""
        self.scale_min = low if self.scale_min is None else min(low, self.scale_min)
        self.scale_max = high if self.scale_max is None else max(high, self.scale_max)

    @property
    def snr(self) -> float | None:
        """Signal to noise in dB; None without signal, without noise, or where a sum overflowed."""
        if not self.noise or not self.signal:
            return None
        return finite(10 * math.log10(self.signal / self.noise)) if math.isfinite(self.noise) else None

    @property
    def bias(self) -> float | None:
        """Relative error with its sign, each element weighted by its magnitude; None if all elements are zero."""
        return finite(self.signed / self.magnitude) if self.magnitude else None


def finite(value: float) -> float | None:
    """Return a number; None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def percent(part: int, whole: int) -> float:
    """Return a share in per cent; 0 if the whole is 0."""
    return 100.0 * part / whole if whole else 0.0


def measure(totals: Totals, operand: Operand, seen: Rounded, spec: OperandSpec) -> None:
    """Add an operand to its totals; `seen` is what `as_rounded` returned for it."""
    for slab in seen.slabs():
        totals.add(*slab)
    if isinstance(operand, BlockOperand):
        assert isinstance(spec.format, BlockFormat)
        _add_scales(totals, operand.scales, seen.source, spec, spec.format)
    elif isinstance(operand, Fp8Operand):
        scale = operand.inverse.double().reciprocal().item()
        totals.blocks += 1
        if math.isfinite(scale):
            totals.widen(scale, scale)
        else:
            totals.spoiled += 1


Slab = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Some rows of an operand as `Totals.add` takes them: source, result, limit and validity, float64 and bool."""


@dataclass(frozen=True)
class Rounded:
    """An operand and its source, both as they are at the rounding."""

    source: torch.Tensor
    """[rows, columns] before the rounding. Of a block format the contraction axis is the last, padded and transformed.
    Of other formats the axes are those of the tensor."""
    result: torch.Tensor
    """The same after the rounding, in a type that holds it exactly."""
    format: OperandFormat
    largest: float
    """Largest magnitude of an element, in its own units."""
    inverse: torch.Tensor | float = 1.0
    """Factor that makes a result without blocks comparable with the source."""
    prescale: float = 1.0
    """Divisor that makes a result in blocks comparable with the source."""
    scales: torch.Tensor | None = None
    """Scale codes [rows, columns / k] of a block format."""

    def slabs(self, unit: int = 1, elements: int = _SLAB) -> Iterator[Slab]:
        """Yield the rows in parts of about so many elements, a multiple of `unit` rows each but for the last.

        Parts of a block format have three axes: rows, blocks, and the elements of a block. Limit and validity are those
        of the blocks.
        """
        if self.scales is None:
            limit = torch.as_tensor(self.largest * self.inverse * _FP8_SLACK)
            for v, q in _slabs(unit, elements, self.source, self.result):
                v, q = v.double(), q.float().double() * self.inverse
                yield v, q, limit, torch.isfinite(v) & torch.isfinite(q)
            return
        format = self.format
        assert isinstance(format, BlockFormat)
        for v, q, scales in _slabs(unit, elements, self.source, self.result, self.scales):
            scales = scales.unsqueeze(2)  # [rows, blocks, 1]
            limit = torch.exp2(scales.double() - format.scale.bias) * (self.largest / self.prescale)
            v, q = (torch.unflatten(each, 1, (-1, format.k)).double() for each in (v, q))
            yield v, q / self.prescale, limit, scales != format.scale.nan_code


def as_rounded(
    operand: Operand,
    spec: OperandSpec,
    layer: MXLinear,
    role: GemmRole,
    which: int,
    values: torch.Tensor,
    step: int,
) -> Rounded:
    """Return an operand of a layer's GEMM beside its source.

    Args:
        operand: as the GEMM reads it.
        spec: its treatment.
        layer: the layer.
        role: the GEMM.
        which: 0 for its first operand, 1 for its second.
        values: the high-precision source [rows, columns], float32 or bfloat16.
        step: the optimizer step from which random signs come.
    """
    if isinstance(operand, Fp8Operand):
        data = operand.data.reshape(-1, operand.data.shape[-1])
        largest = FORMATS[OPERANDS[role][which].tensor].max_value
        return Rounded(values.reshape(data.shape), data, spec.format, largest, operand.inverse.double())
    if isinstance(operand, Bf16Operand):
        return Rounded(values, operand.data, spec.format, math.inf)
    assert isinstance(operand, BlockOperand)
    assert isinstance(spec.format, BlockFormat)
    format, impl = spec.format, layer.context.backend
    rows, length = operand.codes.shape[0], operand.scales.shape[1] * format.k
    stored = MXArray(
        to_backend(operand.codes, impl),
        to_backend(operand.scales, impl),
        (rows, length),
        1,
        spec.block,
        spec.prescale,
        format=format,
    )
    result = from_backend(impl.dequantize(stored, "float32"), impl)  # [rows, K]
    source = _before_rounding(values, spec, layer, role, which, length, step)  # [rows, K]
    prescale = format.element.prescale if spec.prescale else 1.0
    return Rounded(source, result, format, format.element.max_value, prescale=prescale, scales=operand.scales)


def _before_rounding(
    values: torch.Tensor,
    spec: OperandSpec,
    layer: MXLinear,
    role: GemmRole,
    which: int,
    length: int,
    step: int,
) -> torch.Tensor:
    """Return the source of an operand in float32, block axis last, padded and transformed: [rows, length]."""
    operand, context = OPERANDS[role][which], layer.context
    v = (values.t() if operand.axis == 0 else values).float()
    v = torch.nn.functional.pad(v, (0, length - v.shape[1])).contiguous()
    if not spec.hadamard:
        return v
    stream = Stream(context.seed, step, layer.index, operand.id)
    rotation = draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector)
    impl = context.backend
    return from_backend(impl.hadamard(to_backend(v, impl), rotation.n, rotation.signs, axis=1), impl)


def _add_scales(
    totals: Totals, scales: torch.Tensor, source: torch.Tensor, spec: OperandSpec, format: BlockFormat
) -> None:
    """Add the bytes of the scales; a block of zeros has no scale of its own and does not count."""
    own = source.view(*scales.shape, format.k).ne(0).any(dim=2)  # NaN counts as a value
    spoiled = scales == format.scale.nan_code
    counted = scales[own & ~spoiled]
    totals.blocks += int(own.sum())
    totals.spoiled += int(spoiled.sum())
    if counted.numel():
        totals.widen(int(counted.min()), int(counted.max()))
        totals.at_low += int((counted == 0).sum())
        totals.at_high += int((counted >= highest_scale(spec.scale_rule, format)).sum())


def highest_scale(rule: ScaleRule, format: BlockFormat) -> int:
    """Return the largest byte that a scale rule gives, that of the largest finite float32."""
    return int(scale_code(_LARGEST_BITS, rule, format.element)[0])


def _slabs(unit: int, elements: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same rows of several tensors, as many multiples of `unit` at a time as hold so many elements."""
    rows = max(1, elements // max(1, tensors[0].shape[-1]) // unit) * unit
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
