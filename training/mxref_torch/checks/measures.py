"""Telemetry: what the formats of a step do to the operands of its GEMMs, and to the gradients of the weights.

Within `telemetry(model)` every converted layer gets a node in the graph behind its output. In the backward pass the
node has X, the weight and dY. It makes their operands again and compares them with their sources. The same place and
step give the same random bits, so these are the operands that the step multiplies. Nothing of the step is changed.

`Rounded` has an operand beside its source as the rounding sees them: block axis last, padded with zeros to whole
blocks, and after the Hadamard transform if there is one. A prescale, which the GEMM undoes, is undone. All sums are in
float64.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mxref.formats import BlockFormat, OperandFormat
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation
from mxref.steps.random import Stream
from mxref.steps.scale import ScaleRule, scale_code
from mxref_torch import operators
from mxref_torch.bridge import from_backend, to_backend
from mxref_torch.layer.fp8 import FORMATS
from mxref_torch.layer.linear import MXLinear, require_converted
from mxref_torch.layer.operands import READERS, Bf16Operand, BlockOperand, Fp8Operand, Operand
from mxref_torch.operators import blocks

_SLAB = 1 << 22
"""Elements compared at a time: float64 copies of a whole tensor would need several times its memory."""

_SLACK = 1 + 2.0**-20
"""The scale of a tensor and its inverse are rounded to float32, so its largest element may seem to be beyond it."""


class Totals:
    """Sums over the elements and blocks of an operand, and over all micro-batches of a step."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._scales: list[float] = []  # the smallest and the largest of each micro-batch

    def add(self, seen: Rounded, rule: ScaleRule) -> None:
        """Add an operand whose scales are made by a rule."""
        for v, q, limit, valid in seen.slabs():
            v, error = torch.where(valid, v, 0.0), torch.where(valid, q - v, 0.0)
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
        if seen.scales is None:  # FP8, with one scale
            scale = torch.as_tensor(seen.inverse).reciprocal()
            counted = scale[torch.isfinite(scale)]
            self._sums.update(blocks=1, spoiled=1 - counted.numel())
        else:
            format = seen.format
            assert isinstance(format, BlockFormat)
            # A block of zeros has no scale of its own and does not count. NaN counts as a value.
            own = seen.source.view(*seen.scales.shape, format.k).ne(0).any(dim=2)
            spoiled = seen.scales == format.scale.nan_code
            counted = seen.scales[own & ~spoiled]
            self._sums.update(
                blocks=int(own.sum()), spoiled=int(spoiled.sum()), low=int((counted == 0).sum())
            )
            self._sums.update(high=int((counted >= highest_scale(rule, format)).sum()))
        if counted.numel():
            self._scales += [counted.min().item(), counted.max().item()]

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
    """The same after the rounding, in a type that holds it exactly; under a scale of the tensor rounded to float32."""
    format: OperandFormat
    largest: float
    """Largest magnitude of an element, in its own units."""
    inverse: torch.Tensor | float = 1.0
    """Factor that makes a result without blocks comparable with the source."""
    prescale: float = 1.0
    """Divisor that makes a result in blocks comparable with the source."""
    scales: torch.Tensor | None = None
    """Scale codes [rows, columns / k] of a block format."""
    tensor_scale: torch.Tensor | float = 1.0
    """The scale of the tensor above them, made larger by the slack of its rounding."""

    def slabs(self, unit: int = 1, elements: int = _SLAB) -> Iterator[Slab]:
        """Yield the rows in parts of about so many elements, a multiple of `unit` rows each but for the last.

        Parts of a block format are [rows, blocks, k], and have limit and validity of their blocks.
        """
        rows = max(1, elements // max(1, self.source.shape[-1]) // unit) * unit
        format, limit = self.format, torch.as_tensor(self.largest * self.inverse * _SLACK)
        if isinstance(format, BlockFormat):
            values = torch.tensor(format.scale.values, dtype=torch.float64, device=self.source.device)
        for at in range(0, len(self.source), rows):
            v, q = self.source[at : at + rows], self.result[at : at + rows]
            if self.scales is None:
                v, q = v.double(), q.float().double() * self.inverse
                yield v, q, limit, torch.isfinite(v) & torch.isfinite(q)
            else:
                assert isinstance(format, BlockFormat)
                scales = self.scales[at : at + rows].unsqueeze(2)  # [rows, blocks, 1]
                limits = values[scales.long()] * (self.largest / self.prescale) * self.tensor_scale
                v, q = (torch.unflatten(each, 1, (-1, format.k)).double() for each in (v, q))
                yield v, q / self.prescale, limits, scales != format.scale.nan_code


def as_rounded(
    operand: Operand,
    spec: OperandSpec,
    layer: MXLinear,
    role: GemmRole,
    which: int,
    values: torch.Tensor,
    step: int,
) -> Rounded:
    """Return operand number `which` of a layer's GEMM beside its source, made at the optimizer step `step`.

    `values` is the high-precision source [rows, columns].
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
    length = operand.scales.shape[1] * format.k
    text = operators.spec_text(spec)
    result = blocks.dequantize(operand.saved(), layer.context.backend_key, text)  # [rows, K]
    own = OPERANDS[role][which]
    source = (values.t() if own.axis == 0 else values).float()
    source = torch.nn.functional.pad(source, (0, length - source.shape[1])).contiguous()  # [rows, K]
    if spec.hadamard:
        stream = Stream(layer.context.seed, step, layer.index, own.id)
        rotation = draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector)
        turned = impl.hadamard(to_backend(source, impl), rotation.n, rotation.signs, axis=1)
        source = from_backend(turned, impl)
    prescale = format.element.prescale if spec.prescale else 1.0
    scale = 1.0 if operand.tensor_scale is None else operand.tensor_scale.double() * _SLACK
    return Rounded(
        source, result, format, format.element.max_value, prescale=prescale, scales=operand.scales,
        tensor_scale=scale,
    )  # fmt: skip


def highest_scale(rule: ScaleRule, format: BlockFormat) -> int:
    """Return the largest byte that a scale rule gives, as that of the largest finite float32 for powers of two."""
    if not format.scale.powers:
        return format.scale.max_code
    return int(scale_code(np.array([0x7F7FFFFF], np.uint32), rule, format.element)[0])


Row = dict[str, Any]
"""A line of telemetry: its keys are in the reference of the files of a run."""


@dataclass
class _LayerSums:
    """The measurements of one layer."""

    operands: dict[tuple[GemmRole, int, OperandFormat], Totals] = field(default_factory=dict)
    gradients: dict[str, Counter[str]] = field(default_factory=dict)
    """
    Sums of the products of two gradients of the weight, the exact one e and the quantized one q, by the formats of the
    two operands: a recipe may change within the block.
    """
    weights: set[tuple[int, Recipe]] = field(default_factory=set)
    """The steps and recipes whose weight was measured: it is the same in all micro-batches."""


def _alignment(sums: Counter[str]) -> Row:
    """Return the cosine of two gradients and the ratio of their norms; None where one is zero or not finite."""
    norm = math.sqrt(sums["ee"]) * math.sqrt(sums["qq"])
    return {
        "cosine": finite(sums["eq"] / norm) if norm else None,
        "norm_ratio": finite(math.sqrt(sums["qq"] / sums["ee"])) if sums["ee"] else None,
    }


class Telemetry:
    """What was measured within a block of `telemetry`."""

    def __init__(self, layers: dict[str, MXLinear]) -> None:
        self._layers = layers
        self._sums = {layer: _LayerSums() for layer in layers.values()}

    @property
    def rows(self) -> list[Row]:
        """One row for each operand that is not in BF16, and one for each weight's gradient, layer by layer.

        Only what a backward pass went through has rows. docs/reference/training.rst describes their keys.
        """
        found: list[Row] = []
        for name, layer in self._layers.items():
            sums, roles = self._sums[layer], list(GemmRole)
            for role, which, format in sorted(sums.operands, key=lambda key: (roles.index(key[0]), key[1])):
                numbers = sums.operands[role, which, format].numbers(format.kind == "block")
                head = {"layer": name, "role": role.value, "operand": OPERANDS[role][which].tensor}
                found.append({**head, "format": format.name, **numbers})
            for formats, gradient in sums.gradients.items():
                head = {"layer": name, "role": GemmRole.WGRAD.value, "operand": "dw"}
                found.append({**head, "format": formats, **_alignment(gradient)})
        return found

    def tapped(
        self, layer: MXLinear, arguments: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Put the measuring node behind a layer's output; a forward hook of PyTorch."""
        if not (output.requires_grad and layer.low_precision):
            return None
        x = (*arguments, *named.values())[0]
        given = x.detach()
        if torch.is_autocast_enabled(x.device.type):  # the layer casts its input
            given = given.to(torch.get_autocast_dtype(x.device.type))
        tapped: torch.Tensor = _Tap.apply(output, given, self, layer, x.requires_grad)  # type: ignore[no-untyped-call]
        return tapped

    def measure(self, tap: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Measure all operands of a layer for one micro-batch, under the recipe and the GEMMs of the forward pass.

        `tap` is the node behind the layer's output, `x` is [tokens, inputs] and `dy` [tokens, outputs].
        """
        layer, recipe, place = tap.layer, tap.recipe, tap.batch_place
        sums, step = self._sums[layer], int(place[0])
        runs = {GemmRole.DGRAD: tap.needs_dx, GemmRole.WGRAD: layer.weight.requires_grad}
        roles = [role for role in GemmRole if runs.get(role, True) and recipe.kind(role) != "bf16"]
        sources = {"x": x, "dy": dy}
        if (step, recipe) not in sums.weights:
            sources["w"] = layer.weight.detach()
            sums.weights.add((step, recipe))
        made: dict[tuple[GemmRole, str], Operand] = {}
        for tensor, values in sources.items():
            read = layer.as_read(values) if tensor == "w" else values
            operands = layer.operands(tensor, values, place, [tap.gemms[role] for role in roles])
            for role, operand in operands.items():
                made[role, tensor] = operand
                which = dict(READERS[tensor])[role]
                spec = recipe.operands(role)[which]
                totals = sums.operands.setdefault((role, which, spec.format), Totals())
                totals.add(as_rounded(operand, spec, layer, role, which, read, step), spec.scale_rule)
        if GemmRole.WGRAD in roles:
            a, b = (made[GemmRole.WGRAD, tensor] for tensor in ("dy", "x"))
            uncounted = replace(tap.gemms[GemmRole.WGRAD], tally=None)  # it does not belong to the step
            q = a.product(b, uncounted, x.shape[0], torch.float32).double().flatten()
            e = (dy.float().t() @ x.float()).double().flatten()
            products = torch.stack([e @ q, e @ e, q @ q]).tolist()
            formats = operators.formats_text(*recipe.formats(GemmRole.WGRAD))
            gradient = sums.gradients.setdefault(formats, Counter())
            gradient.update(dict(zip(("eq", "ee", "qq"), products, strict=True)))


class _Tap(torch.autograd.Function):
    """The identity, whose backward pass measures a layer.

    X is a saved tensor like any other: activation checkpointing recomputes it, and each backward pass finds its own.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, seen: Telemetry, layer: MXLinear, needs_dx: bool
    ) -> torch.Tensor:
        # The output is the argument itself and no view of it, so that later code may still change it in place.
        ctx.mark_dirty(y)
        ctx.save_for_backward(x)
        ctx.seen, ctx.layer, ctx.batch_place, ctx.needs_dx = seen, layer, layer.context.batch_place, needs_dx
        # A region may have ended before the backward pass runs.
        ctx.recipe, ctx.gemms = layer.recipe, layer.gemms
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
            ctx.seen.measure(ctx, x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features))
        return dy, None, None, None, None


@contextlib.contextmanager
def telemetry(model: Any) -> Iterator[Telemetry]:
    """Measure what quantization does to each operand of each converted layer, in the steps within the block.

    Forward and backward passes have to lie within the block. They run eagerly, also where the model is compiled, and
    give the same bits as without telemetry. Several micro-batches are added up. A step with telemetry takes about
    three times as long, and X is kept for the backward pass in high precision.

    Args:
        model: a converted model, or the handle that `convert` returned for it.

    Yields:
        What is measured; read its `rows` at the end.

    Raises:
        LayerError: not a model, or none of its layers is converted.
    """
    layers = require_converted(model)
    seen = Telemetry(layers)
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            # Compiled code would not run the hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers.values():
            stack.callback(layer.register_forward_hook(seen.tapped, with_kwargs=True).remove)
        yield seen
