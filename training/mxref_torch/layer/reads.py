"""The operands that a linear layer's GEMMs read: made of X, W and dY; those of W are kept for a step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.layer.operand import LayerGemm, Operand, SourceTensor
from mxref_torch.layer.part import Split
from mxref_torch.shared.context import StepContext
from mxref_torch.shared.inputs import Made

WeightKey = tuple[int, int, int, bool]
"""Step, version and address of the weight that an operand was made of, and whether evaluation made it."""

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
    split: Split | None
    """How ranks compute the layer together; None: this process has all of it."""

    def _begin_reads(self) -> None:
        """Begin with no operand of the layer's own weight."""
        self.regions: dict[str, torch.Tensor] = dict.fromkeys(READERS, operators.WHOLE)
        self._lengths = {GemmRole.FPROP: self.in_features, GemmRole.DGRAD: self.out_features}
        self._converted = weakref.ref(self.weight)
        self._weights: dict[str, tuple[WeightKey, Operand]] = {}
        self._held: dict[str, Operand] = {}

    def forget_weights(self) -> None:
        """Forget the operands that were made of the weight."""
        self._weights.clear()
        self._held.clear()

    def as_read(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the Parameter as [outputs, inputs], or a gradient [outputs, inputs] as the Parameter is."""
        return weight.t().contiguous() if self.inputs_first else weight

    def has_own_weight(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is the Parameter that was converted, whose version tells of every change.

        FSDP2 puts another one in its place and refills it before each forward under an unchanged version.
        """
        return self._converted() is weight

    @contextmanager
    def under(self, gemms: dict[GemmRole, LayerGemm]) -> Iterator[None]:
        """Compute with the GEMMs of an earlier forward pass."""
        now, self.gemms = self.gemms, gemms
        self.forget_weights()
        try:
            yield
        finally:
            self.gemms = now
            self.forget_weights()

    def operands(
        self,
        tensor: str,
        values: torch.Tensor,
        place: torch.Tensor,
        roles: Collection[GemmRole],
        observe: bool = False,
        shared: Made | None = None,
    ) -> dict[GemmRole, Operand]:
        """Return X, W or dY as each of the roles reads it.

        Args:
            tensor: `x`, `w` or `dy`.
            values: its values, of high precision.
            place: where the micro-batch lies in training.
            roles: the GEMMs that will read it.
            observe: whether FP8's history takes note of it: in training, not in evaluation.
            shared: operands that other layers made of these values in this step, to which it adds its own.
        """
        if not torch.compiler.is_compiling():
            for watcher in operators.watchers:
                watcher.reading(self.index, tensor)
        split = self.split
        largest = None if split is None or tensor not in split.tensors else split.largest
        source = SourceTensor(tensor, values, place, self.regions[tensor], largest)
        readers = [(self.gemms[role], which) for role, which in READERS[tensor] if role in roles]
        made: dict[GemmRole, Operand] = {}
        while readers:
            kind = readers[0][0].kind
            alike = [reader for reader in readers if reader[0].kind is kind]
            readers = [reader for reader in readers if reader[0].kind is not kind]
            key = kind.shared_as(source, alike)
            if shared is None or key is None:
                operands = kind.make(source, alike)
            else:
                operands = shared.get(key) or shared.setdefault(key, kind.make(source, alike))
            # Compiled code shares operands by eliminating equal calls.
            if key is not None and (shared is not None or torch.compiler.is_compiling()):
                for (gemm, _), operand in zip(alike, operands, strict=True):
                    if gemm.role is GemmRole.FPROP and tensor == "x":
                        operand.prepare_first(gemm, self.in_features)
            if observe:
                operands[0].observe(tensor, alike[0][0])
            made |= {gemm.role: operand for (gemm, _), operand in zip(alike, operands, strict=True)}
        return made

    def weight_operand(
        self,
        role: GemmRole,
        weight: torch.Tensor,
        place: torch.Tensor,
        tokens: int | None,
        ahead: Collection[GemmRole] = (),
    ) -> Operand:
        """Return W as the role reads it, made once per optimizer step and version of the weight.

        Args:
            role: Fprop or Dgrad.
            weight: the Parameter, float32 [outputs, inputs], or [inputs, outputs] where the layer has it so.
            place: where the micro-batch lies in training.
            tokens: of the micro-batch; None in evaluation, of which FP8's history takes no note.
            ahead: roles that will read W in this step too; theirs is made from the same read of it.
        """
        gemm = self.gemms[role]
        slot = gemm.kind.slot(role)
        # A compiled graph cannot ask for a tensor's version, and a sharded weight has none: the operand is made anew.
        if slot in self._held:
            operand = self._held[slot]
        elif slot is None or torch.compiler.is_compiling() or not self.has_own_weight(weight):
            operand = self.operands("w", self.as_read(weight), place, (role,))[role]
        else:
            step, _, total = place.tolist()
            # Training must not use evaluation's operands: averaged weights may be put in place through `.data`.
            key = step, weight._version, weight.data_ptr(), tokens is None
            if not self._keeps(slot, key):
                # A layout does not help a single GEMM, which would make the same layout itself.
                again = tokens is None or tokens < total
                self._keep(key, weight, place, self._wanted(role, ahead, key), again)
            operand = self._weights[slot][1]
        if tokens is not None:
            operand.observe("w", gemm)
        return operand

    def hold_weights(self, place: torch.Tensor) -> None:
        """Make W for Fprop and Dgrad, for all GEMMs up to `advance`: compiled code would make it in each micro-batch.

        The weight must not change before that. A weight that is refilled by its owner is not held.
        """
        if not self.has_own_weight(self.weight):
            return
        for role in (GemmRole.FPROP, GemmRole.DGRAD):
            wanted = {
                slot: each
                for each in (role, GemmRole.DGRAD)
                if self.gemms[each].kind is self.gemms[role].kind
                and (slot := self.gemms[each].kind.slot(each)) is not None
                and slot not in self._held
            }
            if not wanted:
                continue
            made = self.operands("w", self.as_read(self.weight.detach()), place, list(wanted.values()))
            for slot, each in wanted.items():
                self._held[slot] = made[each].prepared(self.gemms[each], self._lengths[each])

    def _wanted(self, role: GemmRole, ahead: Collection[GemmRole], key: WeightKey) -> dict[str, GemmRole]:
        """Return the role and those of `ahead` whose weight has its kind and is not kept yet, by their slots."""
        kind = self.gemms[role].kind
        wanted: dict[str, GemmRole] = {}
        for each in (role, *ahead):
            slot = kind.slot(each)
            if slot is not None and self.gemms[each].kind is kind and not self._keeps(slot, key):
                wanted.setdefault(slot, each)
        return wanted

    def _keep(
        self,
        key: WeightKey,
        weight: torch.Tensor,
        place: torch.Tensor,
        wanted: dict[str, GemmRole],
        again: bool,
    ) -> None:
        """Make W for the wanted roles and keep it; `again` says whether several GEMMs will read it."""
        made = self.operands("w", self.as_read(weight), place, list(wanted.values()))
        for slot, role in wanted.items():
            operand = made[role]
            if again:
                operand = operand.prepared(self.gemms[role], self._lengths[role])
            self._weights[slot] = key, operand

    def _keeps(self, slot: str, key: WeightKey) -> bool:
        """Return whether the kept operands of the weight belong to that step and version, and may be used."""
        if slot not in self._weights:
            return False
        *made_of, by_evaluation = self._weights[slot][0]
        return tuple(made_of) == key[:3] and (key[3] or not by_evaluation)
