"""The operands that a linear layer's GEMMs read: made of X, W and dY as they are now."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from mxref.recipe import Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref_torch import operators
from mxref_torch.layer.operand import LayerGemm, Operand, Reader, SourceTensor
from mxref_torch.layer.part import Split
from mxref_torch.shared.context import StepContext

READERS = {
    "x": ((GemmRole.FPROP, 0), (GemmRole.WGRAD, 1)),
    "w": ((GemmRole.FPROP, 1), (GemmRole.DGRAD, 1)),
    "dy": ((GemmRole.DGRAD, 0), (GemmRole.WGRAD, 0)),
}
"""The two GEMMs that read a tensor, along axis 1 and along axis 0, and which of their operands it is."""


class OperandMaker(nn.Linear):
    """The part of `MXLinear` that makes operands."""

    context: StepContext
    index: int
    census: operators.LayerCensus
    recipe: Recipe
    gemms: dict[GemmRole, LayerGemm]
    """How each GEMM treats its operands now."""
    marker: torch.Tensor
    """A marker of the recipe, a tensor on the CPU, which tells recipes apart."""
    draws: bool
    """Whether an operand has random bits."""
    inputs_first: bool
    """Whether the Parameter is [inputs, outputs], as that of Transformers' Conv1D."""
    regions: dict[str, torch.Tensor]
    """Where each tensor lies in that of the whole layer, from `region_words`."""
    split: Split | None
    """How ranks compute the layer together; None: this process has all of it."""

    def as_read(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the Parameter as [outputs, inputs], or a gradient [outputs, inputs] as the Parameter is."""
        return weight.t().contiguous() if self.inputs_first else weight

    def operands(
        self,
        tensor: str,
        values: torch.Tensor,
        place: torch.Tensor,
        gemms: Collection[LayerGemm],
        observe: bool = False,
    ) -> dict[GemmRole, Operand]:
        """Return X, W or dY as each of the GEMMs reads it.

        Args:
            tensor: `x`, `w` or `dy`.
            values: its values, of high precision.
            place: where the micro-batch lies in training.
            gemms: the GEMMs that will read it, one or two of a layer with this weight.
            observe: whether FP8's history takes note of it: in training, not in evaluation.
        """
        self._announce(tensor)
        split = self.split
        largest = None if split is None or tensor not in split.tensors else split.largest
        source = SourceTensor(tensor, values, place, self.regions[tensor], largest)
        by_role = {gemm.role: gemm for gemm in gemms}
        readers: dict[type[Operand], list[Reader]] = {}
        of_fprop: list[LayerGemm] = []
        for role, which in READERS[tensor]:
            gemm = by_role.get(role)
            if gemm and gemm.source and which == 1:
                of_fprop.append(gemm)
            elif gemm:
                readers.setdefault(gemm.kind, []).append((gemm, which))
        made: dict[GemmRole, Operand] = {}
        for kind, alike in readers.items():
            operands = kind.make(source, alike)
            if observe:
                operands[0].observe(tensor, alike[0][0])
            made |= {gemm.role: operand for (gemm, _), operand in zip(alike, operands, strict=True)}
        for gemm in of_fprop:
            assert gemm.source is not None
            first = made.get(GemmRole.FPROP)
            if first is None:
                first = self.operands(tensor, values, place, (gemm.source,))[GemmRole.FPROP]
            made[gemm.role] = self.requantized(tensor, first, place, gemm)
        return made

    def requantized(self, tensor: str, first: Operand, place: torch.Tensor, gemm: LayerGemm) -> Operand:
        """Return X or W as a backward GEMM reads it, made of the values of Fprop's operand `first`."""
        assert gemm.source is not None
        self._announce(tensor)
        (_, which), (_, own) = READERS[tensor]
        source = SourceTensor(tensor, first.values(gemm.source, which), place, self.regions[tensor])
        return gemm.kind.make(source, [(gemm, own)])[0]

    def _announce(self, tensor: str) -> None:
        """Tell watchers what the next operators read."""
        if not torch.compiler.is_compiling():
            for watcher in operators.watchers:
                watcher.reading(self.index, tensor)

    def weight_operand(self, gemm: LayerGemm, weight: torch.Tensor, place: torch.Tensor) -> Operand:
        """Return W as a GEMM of training reads it: as the opened step holds it, or else made of the weight.

        Args:
            gemm: Fprop or Dgrad.
            weight: the Parameter, float32 [outputs, inputs], or [inputs, outputs] where the layer has it so.
            place: where the micro-batch lies in training.
        """
        operand = gemm.held
        if operand is None and gemm.source and gemm.source.held:
            operand = self.requantized("w", gemm.source.held, place, gemm)
        elif operand is None:
            operand = self.operands("w", self.as_read(weight), place, (gemm,))[gemm.role]
        operand.observe("w", gemm)
        return operand

    def hold_weight(self) -> list[LayerGemm]:
        """Make W for Fprop and Dgrad of all micro-batches of a step, and return the GEMMs that now hold it."""
        # A part of a split weight is not the Parameter itself.
        if hasattr(self.weight, "to_local"):
            return []
        gemms = [self.gemms[role] for role in (GemmRole.FPROP, GemmRole.DGRAD)]
        gemms = [gemm for gemm in gemms if gemm.kind.worth_holding]
        weight = self.as_read(self.weight.detach())
        made = self.operands("w", weight, self.context.place, gemms)
        for gemm in gemms:
            gemm.held = made[gemm.role].prepared(gemm, weight.shape[OPERANDS[gemm.role][1].axis])
        return gemms

    def release_weight(self) -> None:
        """Hold W no longer."""
        for gemm in self.gemms.values():
            gemm.held = None
