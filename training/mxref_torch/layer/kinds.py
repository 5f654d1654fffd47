"""The kinds of operands: a class for BF16, for FP8 and for block formats, which makes, keeps and multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from mxref.backend import Backend
from mxref.formats import BlockFormat, OperandFormat
from mxref.recipe import OperandSource, OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.operand import LayerGemm, Operand, Reader, SourceTensor
from mxref_torch.shared.context import StepContext


class Bf16Operand(Operand):
    """A tensor in bfloat16."""

    worth_holding = False

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @classmethod
    def make(cls, source: SourceTensor, readers: Sequence[Reader]) -> Sequence[Self]:
        """Round to bfloat16 once for all readers."""
        return [cls(cast(source.values, torch.bfloat16))] * len(readers)

    @classmethod
    def element_bytes(cls, format: OperandFormat) -> float:
        """Return the bytes of a bfloat16: 2."""
        return 2.0

    @classmethod
    def restored(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Take the tensors of `saved`."""
        return cls(*tensors)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the data."""
        return (self.data,)

    def multiply(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply in bfloat16 with float32 accumulation, rounded to bfloat16."""
        return cast(_dense(self.data, other.data, gemm), dtype)


class Fp8Operand(Operand):
    """A tensor in FP8 under one scale. All roles read it alike."""

    def __init__(self, data: torch.Tensor, inverse: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        self.data, self.inverse, self.amax = data, inverse, amax

    @classmethod
    def make(cls, source: SourceTensor, readers: Sequence[Reader]) -> Sequence[Self]:
        """Round once for all readers, under the scale in force."""
        return [cls(*_scales(readers[0][0]).quantize(source.tensor, source.values, source.largest))] * len(
            readers
        )

    @classmethod
    def element_bytes(cls, format: OperandFormat) -> float:
        """Return the bytes of an element: 1, because the scale is one number for the whole tensor."""
        return 1.0

    @classmethod
    def restored(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Take the tensors of `saved`."""
        return cls(*tensors)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return the data and fl32(1 / scale)."""
        return self.data, self.inverse

    def observe(self, tensor: str, gemm: LayerGemm) -> None:
        """Take the tensor's amax into this step's history."""
        if self.amax is not None:
            _scales(gemm).observe(tensor, self.amax)

    def multiply(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply the FP8 values in float32, then by both inverse scales."""
        if dtype is torch.bfloat16:
            return _dense(self.data, other.data, gemm, self.inverse, other.inverse)
        return cast(_dense(self.data, other.data, gemm) * self.inverse * other.inverse, dtype)


class BlockOperand(Operand):
    """A tensor in a block format, packed along the contraction axis of its GEMM."""

    adds_in_place = True

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, layout: Sequence[torch.Tensor] = ()
    ) -> None:
        self.codes, self.scales, self.layout = codes, scales, list(layout)

    @classmethod
    def make(cls, source: SourceTensor, readers: Sequence[Reader]) -> Sequence[Self]:
        """Quantize along the axis of each reader; two readers share one read of the tensor."""
        given = source.values, source.place, readers[0][0].context.backend_key
        texts = [gemm.texts[which] for gemm, which in readers]
        streams = [gemm.streams[which] for gemm, which in readers]
        where = source.region, source.tensor != "w"
        if len(readers) == 2:
            row_codes, row_scales, *column = operators.quantize_dual(*given, *texts, *streams, *where)
            made = [cls(row_codes, row_scales), cls.restored(column)]
        else:
            ((gemm, which),) = readers
            axis = OPERANDS[gemm.role][which].axis
            made = [cls(*operators.quantize(*given, *texts, axis, *streams, *where))]
        first = readers[0][0]
        if source.tensor == "x" and first.role is GemmRole.FPROP and _is_common(source.values, readers):
            made[0].layout = made[0]._laid_out(first, 0, source.values.shape[1])
        return made

    @classmethod
    def element_bytes(cls, format: OperandFormat) -> float:
        """Return the bytes of a code and its share of the block's scale byte."""
        assert isinstance(format, BlockFormat)
        return format.element.bits / 8 + 1 / format.k

    @classmethod
    def draws(cls, spec: OperandSpec, backend: Backend) -> bool:
        """Return whether the signs or the rounding are random."""
        signs = spec.signs in (SignPolicy.PER_STEP, SignPolicy.PER_STEP_LAYER)
        return signs or (spec.rounding is Rounding.SR and not backend.capabilities.native_sr)

    @classmethod
    def restored(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Take the tensors of `saved`."""
        codes, scales = tensors
        return cls(codes, scales)

    def saved(self) -> tuple[torch.Tensor, ...]:
        """Return codes and scale codes."""
        return self.codes, self.scales

    def prepared(self, gemm: LayerGemm, length: int) -> Self:
        """Add the layout that the backend's GEMM reads in place of the codes, if it has one."""
        return type(self)(self.codes, self.scales, self._laid_out(gemm, 1, length))

    def _laid_out(self, gemm: LayerGemm, which: int, length: int) -> list[torch.Tensor]:
        treatment = gemm.context.backend_key, gemm.texts[which], length, gemm.profile.value
        layout: list[torch.Tensor] = operators.prepare(self.codes, self.scales, *treatment)
        return layout

    def values(self, gemm: LayerGemm, which: int) -> torch.Tensor:
        """Dequantize the codes."""
        treatment = gemm.context.backend_key, gemm.texts[which]
        values: torch.Tensor = operators.dequantize(self.codes, self.scales, *treatment)
        return values

    def multiply(self, other: Self, gemm: LayerGemm, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Multiply by the backend's scaled GEMM."""
        name = str(dtype).removeprefix("torch.")
        product: torch.Tensor = operators.scaled_gemm(
            *self._pair(other, gemm, length), name, gemm.role.value, gemm.tally
        )
        return product

    def multiply_onto(self, onto: torch.Tensor, other: Self, gemm: LayerGemm, length: int) -> None:
        """Add the product in place."""
        operators.add_product(onto, *self._pair(other, gemm, length), gemm.role.value, gemm.tally)

    def _pair(self, other: Self, gemm: LayerGemm, length: int) -> tuple[Any, ...]:
        """Return both operands as the operators of products take them, and how they were made."""
        treatment = gemm.context.backend_key, *gemm.texts, length, gemm.profile.value
        return self.codes, self.scales, self.layout, other.codes, other.scales, other.layout, *treatment


KINDS: dict[str, type[Operand]] = {"bf16": Bf16Operand, "fp8": Fp8Operand, "block": BlockOperand}
"""The class of operands of each kind of format, as `Recipe.kind` names it."""


def layer_gemms(
    recipe: Recipe, index: int, context: StepContext, tally: torch.Tensor, scales: Fp8Scales | None
) -> dict[GemmRole, LayerGemm]:
    """Return a layer's three GEMMs under a recipe."""
    gemms = {role: _layer_gemm(recipe, role, index, context, tally, scales) for role in GemmRole}
    for role, gemm in gemms.items():
        gemm.source = gemms[GemmRole.FPROP] if recipe.source(role) is OperandSource.FPROP else None
    return gemms


def _layer_gemm(
    recipe: Recipe,
    role: GemmRole,
    index: int,
    context: StepContext,
    tally: torch.Tensor,
    scales: Fp8Scales | None,
) -> LayerGemm:
    specs, whole = recipe.operands(role), recipe.gemm_spec(role)
    texts = [operators.spec_text(spec) for spec in specs]
    streams = [
        context.stream(index, operand.id, spec) for operand, spec in zip(OPERANDS[role], specs, strict=True)
    ]
    by_layer = [operators.draws_by_layer(spec) for spec in specs]
    kind = KINDS[recipe.kind(role)]
    lays_out_first = context.backend.reads_left_layouts
    gain = float(np.float32(whole.gain))
    return LayerGemm(
        role,
        kind,
        texts,
        streams,
        by_layer,
        recipe.gemm,
        context,
        tally,
        scales,
        lays_out_first,
        gain,
        whole.out,
    )


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `t` in a type, and `t` itself where it has that type already.

    `t.to(dtype)` gives the same tensor, but the compiler of torch 2.11 takes it for a second one. A traced
    autograd function then returns one tensor as two results, and its gradient is lost: zeros arrive.
    """
    return t if t.dtype is dtype else t.to(dtype)


def _is_common(x: torch.Tensor, readers: Sequence[Reader]) -> bool:
    """Return whether a compiler merges the layouts that several layers make of their common X into one.

    It merges equal calls. The shape of a layout must be known, and must not be a symbol of the compiler.
    """
    if not torch.compiler.is_compiling() or not readers[0][0].lays_out_first:
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # has been imported by the compiler

    return has_static_value(x.shape[0]) and not any(gemm.by_layer[which] for gemm, which in readers)


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
    product: torch.Tensor = operators.dense_gemm(rows, columns, gemm.role.value, gemm.tally, *inverses)
    return product


def _scales(gemm: LayerGemm) -> Fp8Scales:
    """Return the FP8 scales of a GEMM's layer, which has them if any of its GEMMs is in FP8."""
    assert gemm.scales is not None
    return gemm.scales
