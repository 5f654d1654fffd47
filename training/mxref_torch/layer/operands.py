"""The operands of a layer's three GEMMs: a class for BF16, for FP8 and for block formats.

Each class makes a tensor into what its GEMM reads, says what forward saves of it, and multiplies two of its kind. A
new format of elements or scales is data, and needs no class; a new way to quantize or to multiply does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import torch

from mxref.backend import Backend
from mxref.recipe import GemmProfile, OperandSource, OperandSpec, Recipe, ResultType
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.operators import blocks, dense
from mxref_torch.step_context import StepContext

READERS = {
    "x": ((GemmRole.FPROP, 0), (GemmRole.WGRAD, 1)),
    "w": ((GemmRole.FPROP, 1), (GemmRole.DGRAD, 1)),
    "dy": ((GemmRole.DGRAD, 0), (GemmRole.WGRAD, 0)),
}
"""The two GEMMs that read a tensor, along axis 1 and along axis 0, and which of their operands it is."""


@dataclass(eq=False)
class LayerGemm:
    """One of a layer's three GEMMs: how its operands are made and multiplied."""

    role: GemmRole
    kind: type[Operand]
    """The class of its two operands."""
    texts: list[str]
    """Treatments of the two operands, from `spec_text`."""
    streams: list[torch.Tensor]
    """Their random streams, from `stream_words`."""
    tensor_scales: list[bool]
    """Whether their formats have a scale of the tensor."""
    common: list[bool]
    """Whether layers may have them in common, and a GEMM reads a layout of its first operand too."""
    profile: GemmProfile
    context: StepContext
    tally: torch.Tensor | None
    """The layer's census, from `register_census`; None counts nowhere."""
    scales: Fp8Scales | None
    """The scales of a layer with FP8."""
    gain: float
    """By which the product is multiplied, a float32."""
    out: ResultType
    """The type to which the product is rounded."""
    requantizes: LayerGemm | None = None
    """Fprop, where the second operand is made of the values of Fprop's operand; None: it is made of the tensor."""
    held: Operand | None = None
    """W, where the step was opened by `mxref_torch.weights_held`; None: it is made of the weight each time."""

    @property
    def plain(self) -> bool:
        """Whether the product is the result: it has no gain, and no type of its own."""
        return self.gain == 1 and self.out is ResultType.TENSOR

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which the product is computed where the result has the type `dtype`."""
        if self.gain != 1:
            return torch.float32
        return dtype if self.out is ResultType.TENSOR else torch.bfloat16

    def result(self, product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product times the gain, rounded to the GEMM's output type, in the type `dtype`."""
        if self.gain == 1:
            return cast(product, dtype)
        narrow = self.out is ResultType.BF16
        gained: torch.Tensor = blocks.gained(product, self.gain, narrow, type_name(dtype))
        return gained


Reader = tuple[LayerGemm, int]
"""A GEMM that reads a tensor, and which of its operands the tensor is."""


class Operand(ABC):
    """An operand as its GEMM reads it. It is made anew of what `saved` returns, by its class."""

    @abstractmethod
    def __init__(self, *saved: torch.Tensor) -> None: ...

    @classmethod
    @abstractmethod
    def make(
        cls, layer: Any, name: str, values: torch.Tensor, batch_place: torch.Tensor, readers: Sequence[Reader]
    ) -> Sequence[Self]:
        """Return X, W or dY as each of one or two GEMMs of this kind reads it, in their order.

        Args:
            layer: the `LayerState`, which knows where its tensors lie.
            name: `x`, `w` or `dy`.
            values: [tokens, features], or the weight [outputs, inputs].
            batch_place: step and tokens of the micro-batch, from `operators.batch_place`.
            readers: the GEMMs.
        """

    @classmethod
    def draws(cls, spec: OperandSpec, backend: Backend) -> bool:
        """Return whether an operand depends on the step's random bits."""
        return False

    @abstractmethod
    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that forward saves so that backward can multiply this operand."""

    def record_amax(self, tensor: str, gemm: LayerGemm) -> None:  # noqa: B027 - most kinds have no history
        """Record in the layer's history of scales, if there is one, that training read this operand."""

    def prepared(self, gemm: LayerGemm, length: int) -> Self:
        """Return a second operand with the layout that the backend's GEMM reads, if it has one."""
        return self

    @abstractmethod
    def product(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the result [M, N] of a GEMM of this operand and a second one, in float32 or bfloat16.

        `length` is the GEMM's contraction length.
        """


class Bf16Operand(Operand):
    """A tensor in bfloat16, which both of its GEMMs read."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @classmethod
    def make(
        cls, layer: Any, name: str, values: torch.Tensor, batch_place: torch.Tensor, readers: Sequence[Reader]
    ) -> Sequence[Self]:
        """Round to bfloat16 once for all readers."""
        return [cls(cast(values, torch.bfloat16))] * len(readers)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the data."""
        return (self.data,)

    def product(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply in bfloat16 with float32 accumulation, rounded to bfloat16."""
        product = _dense(self.data, other.data, gemm)
        return gemm.result(cast(product, gemm.product_type(dtype)), dtype)


class Fp8Operand(Operand):
    """A tensor in FP8 under one scale, which both of its GEMMs read."""

    def __init__(self, data: torch.Tensor, inverse: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        self.data, self.inverse, self.amax = data, inverse, amax

    @classmethod
    def make(
        cls, layer: Any, name: str, values: torch.Tensor, batch_place: torch.Tensor, readers: Sequence[Reader]
    ) -> Sequence[Self]:
        """Round once for all readers, under the scale in force."""
        of_ranks = layer.split is not None and name in layer.split.tensors
        largest = layer.split.largest if of_ranks else None
        quantized = _scales(readers[0][0]).quantize(name, values, largest)
        return [cls(*quantized)] * len(readers)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the data and fl32(1 / scale)."""
        return self.data, self.inverse

    def record_amax(self, tensor: str, gemm: LayerGemm) -> None:
        """Take the tensor's amax into this step's history."""
        if self.amax is not None:
            _scales(gemm).record_amax(tensor, self.amax)

    def product(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply the FP8 values in float32, then by both inverse scales."""
        if gemm.product_type(dtype) is torch.bfloat16:
            product = _dense(self.data, other.data, gemm, self.inverse, other.inverse)
        else:
            product = _dense(self.data, other.data, gemm) * self.inverse * other.inverse
        return gemm.result(product, dtype)


class BlockOperand(Operand):
    """A tensor in a block format, packed along the contraction axis of its GEMM."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        tensor_scale: torch.Tensor | None = None,
        layout: Sequence[torch.Tensor] = (),
    ) -> None:
        self.codes, self.scales, self.tensor_scale, self.layout = codes, scales, tensor_scale, list(layout)

    @classmethod
    def make(
        cls, layer: Any, name: str, values: torch.Tensor, batch_place: torch.Tensor, readers: Sequence[Reader]
    ) -> Sequence[Self]:
        """Quantize along the axis of each reader; two readers share one read of the tensor.

        Implements: linear.tensor_scale
        """
        texts, streams = {1: "", 0: ""}, dict.fromkeys((1, 0))
        for gemm, which in readers:
            axis = OPERANDS[gemm.role][which].axis
            texts[axis], streams[axis] = gemm.texts[which], gemm.streams[which]
        key, tokens = readers[0][0].context.backend_key, name != "w"
        request = (
            values, batch_place, key, *texts.values(), *streams.values(), layer.regions[name], tokens
        )  # fmt: skip
        scaled = [gemm.tensor_scales[which] for gemm, which in readers]
        amax = None
        if any(scaled) and layer.split is not None and name in layer.split.tensors:
            amax = layer.split.largest(blocks.tensor_amax(*request))
        stored = iter(blocks.quantize(*request, amax))
        made = [cls(*islice(stored, 2 + with_scale)) for with_scale in scaled]
        first = readers[0][0]
        if name == "x" and first.role is GemmRole.FPROP and _is_common(values, readers):
            made[0].layout = made[0]._laid_out(first, 0, values.shape[1])
        return made

    @classmethod
    def draws(cls, spec: OperandSpec, backend: Backend) -> bool:
        """Return whether the signs or the rounding are random."""
        signs = spec.signs in (SignPolicy.PER_STEP, SignPolicy.PER_STEP_LAYER)
        return signs or (spec.rounding is Rounding.SR and not backend.capabilities.native_sr)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return codes and scale codes, and the scale of the tensor where there is one."""
        stored = self.codes, self.scales
        return stored if self.tensor_scale is None else (*stored, self.tensor_scale)

    def prepared(self, gemm: LayerGemm, length: int) -> Self:
        """Add the layout that the backend's GEMM reads in place of the codes, if it has one."""
        layout = self._laid_out(gemm, 1, length)
        return type(self)(self.codes, self.scales, self.tensor_scale, layout)

    def _laid_out(self, gemm: LayerGemm, which: int, length: int) -> Any:
        treatment = gemm.context.backend_key, gemm.texts[which], length, gemm.profile.value
        return blocks.prepare(self.saved(), *treatment)

    def values(self, gemm: LayerGemm, which: int) -> Any:
        """Return the values of Fprop's operand number `which`, float32."""
        return blocks.dequantize(self.saved(), gemm.context.backend_key, gemm.texts[which])

    def product(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply by the backend's scaled GEMM."""
        pair, name = self._pair(other, gemm, length), type_name(gemm.product_type(dtype))
        return gemm.result(blocks.scaled_gemm(*pair, name, gemm.role.value, gemm.tally), dtype)

    def add_product(self, onto: torch.Tensor, other: Self, gemm: LayerGemm, length: int) -> None:
        """Add the product to a contiguous float32 array [M, N] in place; the rest as in `product`."""
        blocks.add_product(onto, *self._pair(other, gemm, length), gemm.role.value, gemm.tally)

    def _pair(self, other: Self, gemm: LayerGemm, length: int) -> tuple[Any, ...]:
        """Return both operands as the operators of products take them, and how they were made."""
        a, b = ([*operand.saved(), *operand.layout] for operand in (self, other))
        return a, b, gemm.context.backend_key, *gemm.texts, length, gemm.profile.value


KINDS: dict[str, type[Operand]] = {"bf16": Bf16Operand, "fp8": Fp8Operand, "block": BlockOperand}
"""The class of operands of each kind of format, as `Recipe.kind` names it."""


_WIDTHS = {"w": (0, 1), "x": (1,), "dy": (0,)}
"""The layer's widths that a tensor has: axes of the weight [outputs, inputs]."""
_CONTRACTED = {GemmRole.FPROP: 1, GemmRole.DGRAD: 0}
"""The width over which a GEMM contracts; Wgrad contracts over tokens."""


def width_units(recipe: Recipe) -> Iterator[tuple[int, int, GemmRole, OperandSpec]]:
    """Yield of what a recipe needs each width to be a multiple: axis of [outputs, inputs], unit, and who needs it."""
    for role in GemmRole:
        if recipe.kind(role) != "block":
            continue
        for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
            tiled = _WIDTHS[operand.tensor] if spec.block.is_tile else ()
            needs = dict.fromkeys(tiled, spec.block.rows)
            if role in _CONTRACTED:
                needs[_CONTRACTED[role]] = operators.block_unit(spec)
            for axis, unit in needs.items():
                yield axis, unit, role, spec


def layer_gemms(
    recipe: Recipe, index: int, context: StepContext, tally: torch.Tensor, scales: Fp8Scales | None
) -> dict[GemmRole, LayerGemm]:
    """Return a layer's three GEMMs under a recipe."""
    gemms: dict[GemmRole, LayerGemm] = {}
    for role in GemmRole:
        specs, whole = recipe.operands(role), recipe.gemm_spec(role)
        gemms[role] = LayerGemm(
            role,
            KINDS[recipe.kind(role)],
            texts=[operators.spec_text(spec) for spec in specs],
            streams=[
                context.stream(index, o.id, spec) for o, spec in zip(OPERANDS[role], specs, strict=True)
            ],
            tensor_scales=[getattr(spec.format, "tensor_scale", False) for spec in specs],
            common=[
                context.backend.reads_left_layouts and not operators.draws_by_layer(spec) for spec in specs
            ],
            profile=recipe.gemm,
            context=context,
            tally=tally,
            scales=scales,
            gain=float(np.float32(whole.gain)),
            out=whole.out,
            requantizes=gemms[GemmRole.FPROP] if recipe.source(role) is OperandSource.FPROP else None,
        )
    return gemms


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `t` in a type, and `t` itself where it has that type already.

    `t.to(dtype)` gives the same tensor, but the compiler of torch 2.11 takes it for a second one. A traced
    autograd function then returns one tensor as two results, and its gradient is lost: zeros arrive.
    """
    return t if t.dtype is dtype else t.to(dtype)


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type as operators take it, as in `float32`."""
    return str(dtype).removeprefix("torch.")


def _is_common(x: torch.Tensor, readers: Sequence[Reader]) -> bool:
    """Return whether a compiler merges the layouts that several layers make of their common X into one.

    It merges equal calls. The shape of a layout must be known, and must not be a symbol of the compiler.
    """
    if not torch.compiler.is_compiling() or not all(gemm.common[which] for gemm, which in readers):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # has been imported by the compiler

    return has_static_value(x.shape[0])


def _dense(a: torch.Tensor, b: torch.Tensor, gemm: LayerGemm, *inverses: torch.Tensor) -> torch.Tensor:
    """Return the product of two tensors that have no blocks, the contraction axis of each turned last.

    A GPU's FP8 units read rows along that axis alone: turned here, and not in the operator, a compiler can turn the
    tensor where it casts it.
    """
    turns = a.device.type == "cuda" and a.dtype is not torch.bfloat16
    rows, columns = (
        t if operand.axis == 1 else (t.t().contiguous() if turns else t.t())
        for operand, t in zip(OPERANDS[gemm.role], (a, b), strict=True)
    )
    product: torch.Tensor = dense.dense_gemm(rows, columns, gemm.role.value, gemm.tally, *inverses)
    return product


def _scales(gemm: LayerGemm) -> Fp8Scales:
    """Return the FP8 scales of a GEMM's layer, which has them if any of its GEMMs is in FP8."""
    assert gemm.scales is not None
    return gemm.scales
