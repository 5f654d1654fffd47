"""How far a quantized operand is from its source: clipped, zeroed, scales, SNR and bias.

Source and result are compared as the rounding sees them: block axis last, padded with zeros to whole blocks, and after
the Hadamard transform if there is one. A prescale, which the GEMM undoes, is undone. All sums are in float64.
"""

from __future__ import annotations

import math
from collections import Counter
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


class Totals:
    """Sums over the elements and blocks of an operand, and over all micro-batches of a step."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._scales: list[float] = []  # the smallest and the largest of each micro-batch

    def add(self, operand: Operand, seen: Rounded, spec: OperandSpec) -> None:
        """Add an operand; `seen` is what `as_rounded` returned for it."""
        for slab in seen.slabs():
            self._add_elements(*slab)
        if isinstance(operand, BlockOperand):
            assert isinstance(spec.format, BlockFormat)
            self._add_scales(operand.scales, seen.source, spec, spec.format)
        elif isinstance(operand, Fp8Operand):
            scale = operand.inverse.double().reciprocal().item()
            usable = math.isfinite(scale)
            self._sums.update(blocks=1, spoiled=not usable)
            self._scales += [scale] if usable else []

    def _add_elements(
        self, v: torch.Tensor, q: torch.Tensor, limit: torch.Tensor, valid: torch.Tensor
    ) -> None:
        v = torch.where(valid, v, 0.0)
        error = torch.where(valid, q - v, 0.0)
        size, real = v.abs(), v != 0
        sums = {
            "nonzero": real.sum(),
            "clipped": (real & (size > limit)).sum(),
            "zeroed": (real & (q == 0)).sum(),
            "signal": v.square().sum(),
            "noise": error.square().sum(),
            "signed": (error * v.sign()).sum(),
            "magnitude": size.sum(),
        }
        values = torch.stack([each.double() for each in sums.values()]).tolist()
        self._sums.update(dict(zip(sums, values, strict=True)), elements=v.numel())

    def _add_scales(
        self, scales: torch.Tensor, source: torch.Tensor, spec: OperandSpec, format: BlockFormat
    ) -> None:
        """Add the bytes of the scales; a block of zeros has no scale of its own and does not count."""
        own = source.view(*scales.shape, format.k).ne(0).any(dim=2)  # NaN counts as a value
        spoiled = scales == format.scale.nan_code
        counted = scales[own & ~spoiled]
        self._sums.update(blocks=int(own.sum()), spoiled=int(spoiled.sum()))
        if counted.numel():
            self._scales += [int(counted.min()), int(counted.max())]
            high = int((counted >= highest_scale(spec.scale_rule, format)).sum())
            self._sums.update(low=int((counted == 0).sum()), high=high)

    def numbers(self, blocks: bool) -> dict[str, float | None]:
        """Return the numbers of an operand as its row of telemetry has them; `blocks`: it is in a block format."""
        s, snr = self._sums, None
        if s["noise"] and s["signal"] and math.isfinite(s["noise"]):
            snr = finite(10 * math.log10(s["signal"] / s["noise"]))
        return {
            "elements": s["elements"],
            "nonzero": int(s["nonzero"]),
            "clipped": _percent(s["clipped"], s["nonzero"]),
            "zeroed": _percent(s["zeroed"], s["nonzero"]),
            "snr": snr,
            "bias": finite(s["signed"] / s["magnitude"]) if s["magnitude"] else None,
            "scale_min": min(self._scales, default=None),
            "scale_max": max(self._scales, default=None),
            "scale_low": _percent(s["low"], s["blocks"]) if blocks else None,
            "scale_high": _percent(s["high"], s["blocks"]) if blocks else None,
            "nonfinite": _percent(s["spoiled"], s["blocks"]),
        }


def finite(value: float) -> float | None:
    """Return a number; None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


Slab = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Some rows of an operand: source, result, limit and validity, float64 and bool."""


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
    """Return operand number `which` of a layer's GEMM beside its source.

    `values` is the high-precision source [rows, columns], and random signs come from the optimizer step `step`.
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
    packed = to_backend(operand.codes, impl), to_backend(operand.scales, impl)
    stored = MXArray(*packed, (rows, length), 1, spec.block, spec.prescale, format=format)
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


def highest_scale(rule: ScaleRule, format: BlockFormat) -> int:
    """Return the largest byte that a scale rule gives, that of the largest finite float32."""
    return int(scale_code(_LARGEST_BITS, rule, format.element)[0])


def _slabs(unit: int, elements: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same rows of several tensors, as many multiples of `unit` at a time as hold so many elements."""
    rows = max(1, elements // max(1, tensors[0].shape[-1]) // unit) * unit
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
