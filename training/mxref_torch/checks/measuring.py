"""Telemetry: what the formats of a step do to the operands of its GEMMs, and to the gradients of the weights.

Within `telemetry(model)` every converted layer gets a node in the graph behind its output. In the backward pass the
node has X, the weight and dY. It makes their operands again and compares them with their sources. The same place and
step give the same random bits, so these are the operands that the step multiplies.
Nothing of the step is changed, and after the block the layers are what they were.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mxref.formats import OperandFormat
from mxref.recipe import Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref_torch import operators
from mxref_torch.checks.measures import Totals, as_rounded, finite
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.layer.operands import READERS, LayerGemm, Operand

Row = dict[str, Any]
"""A line of telemetry: its keys are in the reference of the files of a run."""


@dataclass
class Alignment:
    """Sums of the products of two gradients of a weight: the exact one e, and the quantized one q."""

    both: float = 0.0
    exact: float = 0.0
    quantized: float = 0.0

    def add(self, exact: torch.Tensor, quantized: torch.Tensor) -> None:
        """Add the gradients of a micro-batch, both float32 [outputs, inputs]."""
        e, q = exact.double().flatten(), quantized.double().flatten()
        both, own, theirs = torch.stack([e @ q, e @ e, q @ q]).tolist()
        self.both += both
        self.exact += own
        self.quantized += theirs

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None if one of them is zero or not finite."""
        norm = math.sqrt(self.exact) * math.sqrt(self.quantized)
        return finite(self.both / norm) if norm else None

    @property
    def ratio(self) -> float | None:
        """Norm of the quantized gradient over that of the exact one; None if that is zero or not finite."""
        return finite(math.sqrt(self.quantized / self.exact)) if self.exact else None


@dataclass
class _LayerSums:
    """The measurements of one layer."""

    operands: dict[tuple[GemmRole, int, OperandFormat], Totals] = field(default_factory=dict)
    gradients: dict[str, Alignment] = field(default_factory=dict)
    """By the formats of the two operands: a recipe may change within the block."""
    weights: set[tuple[int, Recipe]] = field(default_factory=set)
    """The steps and recipes whose weight was measured: it is the same in all micro-batches."""


class Telemetry:
    """What was measured within a block of `telemetry`."""

    def __init__(self, layers: dict[str, MXLinear]) -> None:
        self._layers = layers
        self._sums = {layer: _LayerSums() for layer in layers.values()}

    @property
    def rows(self) -> list[Row]:
        """One row for each operand that is not in BF16, and one for each weight's gradient, layer by layer.

        Only what a backward pass went through has rows. The section "Keys of telemetry.jsonl" of
        docs/reference/training.rst describes the keys of a row.
        """
        found: list[Row] = []
        for name, layer in self._layers.items():
            sums = self._sums[layer]
            for role in GemmRole:
                for which, operand in enumerate(OPERANDS[role]):
                    found += [
                        _head(name, role, operand.tensor, format.name)
                        | totals.numbers(format.kind == "block")
                        for (own, place, format), totals in sums.operands.items()
                        if (own, place) == (role, which)
                    ]
            found += [
                _head(name, GemmRole.WGRAD, "dw", formats)
                | {"cosine": gradient.cosine, "norm_ratio": gradient.ratio}
                for formats, gradient in sums.gradients.items()
            ]
        return found

    def tapped(
        self, layer: MXLinear, arguments: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Put the measuring node behind a layer's output; a forward hook of PyTorch."""
        if not (output.requires_grad and layer.low_precision):
            return None
        x = (*arguments, *named.values())[0]
        device = x.device.type
        # The layer casts its input under autocast.
        given = (
            x.detach().to(torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device)
            else x.detach()
        )
        tapped: torch.Tensor = _Tap.apply(output, given, self, layer, x.requires_grad)  # type: ignore[no-untyped-call]
        return tapped

    def measure(
        self,
        layer: MXLinear,
        recipe: Recipe,
        gemms: dict[GemmRole, LayerGemm],
        x: torch.Tensor,
        dy: torch.Tensor,
        place: torch.Tensor,
        needs_dx: bool,
    ) -> None:
        """Measure all operands of a layer for one micro-batch, under the recipe and the GEMMs of the forward pass."""
        sums, step = self._sums[layer], int(place[0])
        runs = {
            GemmRole.FPROP: True,
            GemmRole.DGRAD: needs_dx,
            GemmRole.WGRAD: layer.weight.requires_grad,
        }
        roles = [role for role in GemmRole if runs[role] and recipe.kind(role) != "bf16"]
        reading = [gemms[role] for role in roles]
        sources = {"x": x, "dy": dy}
        if (step, recipe) not in sums.weights:
            sources["w"] = layer.weight.detach()
            sums.weights.add((step, recipe))
        made: dict[tuple[GemmRole, str], Operand] = {}
        for tensor, values in sources.items():
            for role, operand in layer.operands(tensor, values, place, reading).items():
                made[role, tensor] = operand
                which = dict(READERS[tensor])[role]
                spec = recipe.operands(role)[which]
                totals = sums.operands.setdefault((role, which, spec.format), Totals())
                read = layer.as_read(values) if tensor == "w" else values
                rounded = as_rounded(operand, spec, layer, role, which, read, step)
                totals.add(operand, rounded, spec)
        if GemmRole.WGRAD in roles:
            a, b = (made[GemmRole.WGRAD, tensor] for tensor in ("dy", "x"))
            uncounted = replace(gemms[GemmRole.WGRAD], tally=None)  # it does not belong to the step
            quantized = a.product(b, uncounted, x.shape[0], torch.float32)
            formats = operators.formats_text(*recipe.formats(GemmRole.WGRAD))
            sums.gradients.setdefault(formats, Alignment()).add(dy.float().t() @ x.float(), quantized)


def _head(layer: str, role: GemmRole, operand: str, format: str) -> Row:
    return {"layer": layer, "role": role.value, "operand": operand, "format": format}


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
        ctx.seen, ctx.layer, ctx.place, ctx.needs_dx = seen, layer, layer.context.place, needs_dx
        # A region may have ended before the backward pass runs.
        ctx.recipe, ctx.gemms = layer.recipe, layer.gemms
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        with torch.no_grad():
            flat = x.reshape(-1, layer.in_features), dy.reshape(-1, layer.out_features)
            ctx.seen.measure(layer, ctx.recipe, ctx.gemms, *flat, ctx.place, ctx.needs_dx)
        return dy, None, None, None, None


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly; compiled code would not run the hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def telemetry(model: Any) -> Iterator[Telemetry]:
    """Measure what quantization does to each operand of each converted layer, in the steps within the block.

    Forward and backward passes have to lie within the block. They run eagerly, also where the model is compiled, and
    give the same bits as without telemetry. Several micro-batches are added up. A step with telemetry takes about
    three times as long, and X is kept for the backward pass in high precision.

    Args:
        model: a converted model, or the handle that `convert` returned for it.

    Yields:
        What is measured: read its `rows` at the end.

    Raises:
        LayerError: not a model, or none of its layers is converted.
    """
    layers = converted(model)
    if not layers:
        raise LayerError(
            "telemetry measures converted layers, and the model has none; call mxref_torch.convert"
        )
    seen = Telemetry(layers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_eager())
        for layer in layers.values():
            stack.callback(layer.register_forward_hook(seen.tapped, with_kwargs=True).remove)
        yield seen
