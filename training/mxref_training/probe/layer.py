"""Every recipe's operands and products of one layer, by the operators that training uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxref.formats import BlockFormat
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import draw_rotation
from mxref.steps.random import Stream
from mxref_torch import operators
from mxref_torch.checks.measures import Rounded, as_rounded
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import READERS, BlockOperand, LayerGemm, Operand, layer_gemms
from mxref_training.probe.errors import ErrorSplit, MeanSplit, ProductError, at_once, exact_product
from mxref_training.probe.results import Row

Gemms = dict[GemmRole, LayerGemm]


@dataclass(frozen=True)
class Captured:
    """A layer and what its GEMMs read in one backward pass."""

    name: str
    layer: MXLinear
    x: Tensor
    """[tokens, inputs]."""
    dy: Tensor
    """[tokens, outputs]."""
    step: int
    """Optimizer step from which random bits come."""

    @property
    def batch_place(self) -> Tensor:
        """Where the batch lies in training: it is the whole of its step."""
        return operators.batch_place(self.step, 0, self.x.shape[0])

    def values(self, tensor: str) -> Tensor:
        """Return `x`, `w` or `dy`."""
        return {"x": self.x, "w": self.layer.weight.detach(), "dy": self.dy}[tensor]

    def length(self, role: GemmRole) -> int:
        """Return the contraction length of a GEMM."""
        operand = OPERANDS[role][0]
        return self.values(operand.tensor).shape[operand.axis]

    def gemms(self, recipe: Recipe) -> Gemms:
        """Return the layer's GEMMs under a recipe. FP8 takes each tensor's own amax: there is no history here."""
        context, tally = self.layer.context, operators.register_census(Counter())
        scales = Fp8Scales(recipe.fp8_scaling, self.x.device)
        return layer_gemms(recipe, self.layer.index, context, tally, scales)


def treatment(gemm: LayerGemm, which: int) -> Hashable:
    """Return a key of an operand's treatment: with equal source and role, equal keys give equal operands."""
    own = (gemm.kind, gemm.texts[which]) if issubclass(gemm.kind, BlockOperand) else (gemm.kind,)
    return (*own, *gemm.requantizes.texts) if gemm.requantizes and which else own


class LayerProbe:
    """The measurements of one layer; what two recipes share is computed once."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._operands: dict[Hashable, Operand] = {}
        self._operand_rows: dict[Hashable, Row] = {}
        self._product_rows: dict[Hashable, Row] = {}
        self._exact: dict[GemmRole, Tensor] = {}

    def rows(self, recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, list[Row], list[Row]]]:
        """Yield for each recipe by its name the rows of the three products and of the six operands."""
        for name, recipe in recipes.items():
            gemms = self.captured.gemms(recipe)
            self._make(gemms)
            head = {"recipe": name, "layer": self.captured.name}
            products, operands = [], []
            for role in GemmRole:
                own = head | {"role": role.value}
                formats = operators.formats_text(*recipe.formats(role))
                products.append(own | {"formats": formats} | self._product(gemms[role]))
                for which, (operand, spec) in enumerate(
                    zip(OPERANDS[role], recipe.operands(role), strict=True)
                ):
                    about = own | {"operand": operand.tensor, "format": spec.format.name}
                    operands.append(about | self._operand(gemms[role], which, spec))
            yield name, products, operands

    def _make(self, gemms: Gemms) -> None:
        """Make the operands that no earlier recipe shares, both of a tensor in one read as training does."""
        layer = self.captured.layer
        for tensor, readers in READERS.items():
            keys = {role: _key(gemms[role], which) for role, which in readers}
            reading = [gemms[role] for role, key in keys.items() if key not in self._operands]
            made = layer.operands(tensor, self.captured.values(tensor), self.captured.batch_place, reading)
            self._operands |= {keys[role]: operand for role, operand in made.items()}

    def _product(self, gemm: LayerGemm) -> Row:
        keys = _key(gemm, 0), _key(gemm, 1)
        found = (*keys, gemm.profile, gemm.gain, gemm.out)
        if found not in self._product_rows:
            a, b = (self._operands[key] for key in keys)
            computed = self._in_range(a, b, gemm)
            self._product_rows[found] = ProductError.of(self._exact_of(gemm.role), computed).row()
        return self._product_rows[found]

    def _in_range(self, a: Operand, b: Operand, gemm: LayerGemm) -> Tensor:
        """Return a product in the layer's type; it is repeated if it left the backend's fast range."""
        backend, length = gemm.context.backend, self.captured.length(gemm.role)
        dtype = torch.float32 if gemm.role is GemmRole.WGRAD else self.captured.x.dtype
        product = a.product(b, gemm, length, dtype)
        if backend.range_exceeded():
            with backend.widened():
                product = a.product(b, gemm, length, dtype)
        return product

    def _exact_of(self, role: GemmRole) -> Tensor:
        if role not in self._exact:
            a, b = (self.captured.values(operand.tensor) for operand in OPERANDS[role])
            self._exact[role] = exact_product(role, a, b)
        return self._exact[role]

    def _operand(self, gemm: LayerGemm, which: int, spec: OperandSpec) -> Row:
        key = _key(gemm, which)
        if key not in self._operand_rows:
            seen = rounded(self.captured, self._operands[key], spec, gemm.role, which)
            self._operand_rows[key] = split_row(self.captured, seen, spec, gemm.role, which)
        return self._operand_rows[key]


def _key(gemm: LayerGemm, which: int) -> Hashable:
    return gemm.role, which, treatment(gemm, which)


def rounded(captured: Captured, operand: Operand, spec: OperandSpec, role: GemmRole, which: int) -> Rounded:
    """Return an operand beside its source, the contraction axis last."""
    which_tensor = OPERANDS[role][which]
    values = captured.values(which_tensor.tensor)
    seen = as_rounded(operand, spec, captured.layer, role, which, values, captured.step)
    if seen.scales is None and which_tensor.axis == 0:
        return replace(seen, source=seen.source.t(), result=seen.result.t())
    return seen


def split_row(captured: Captured, seen: Rounded, spec: OperandSpec, role: GemmRole, which: int) -> Row:
    """Return the error of an operand: by cause, and in the mean of its Hadamard groups."""
    height, rotation = 1, None
    if isinstance(spec.format, BlockFormat):
        height = spec.block.rows
        if spec.hadamard:
            layer, operand = captured.layer, OPERANDS[role][which]
            stream = Stream(layer.context.seed, captured.step, layer.index, operand.id)
            rotation = draw_rotation(spec.hadamard, spec.signs, stream, spec.sign_vector)
    split, mean = ErrorSplit(seen.scales is not None, height), MeanSplit(rotation)
    for slab in seen.slabs(height, at_once(seen.source)):
        mean.add(*split.add(slab))
    return split.row() | mean.row(split.sums)
