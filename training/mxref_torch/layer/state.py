"""What a linear layer is between its passes: Parameters, recipe, FP8 history, census, and the checks of a step.

What a layer computes depends on its arguments, on its weight as it is now, and on the step that was opened. What else
is kept here, such as the last pass, only decides which errors are raised: nothing may be added that decides a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxref.placement import Placement
from mxref.recipe import Fp8Scaling, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_torch import operators
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.operands import (
    KINDS,
    READERS,
    Bf16Operand,
    BlockOperand,
    LayerGemm,
    Operand,
    Reader,
    layer_gemms,
)
from mxref_torch.names import widths
from mxref_torch.step_context import WAY_OUT, StepContext, in_backward, stood_still

_FPROP = GemmRole.FPROP

RECOMPUTED = (
    "activation checkpointing computes a forward pass again, and the recipe has changed since; run the "
    "backward pass within the same `with mxref_torch.recipe(...)`, and before the recipe is changed"
)


def _note_update(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Give updated weights another version: fused optimizers, and those of bitsandbytes, leave it as it was."""
    if not torch.compiler.is_compiling():
        groups = [group["params"] for group in optimizer.param_groups]
        torch.autograd.graph.increment_version([p for params in groups for p in params if p.grad is not None])


register_optimizer_step_post_hook(_note_update)


class LayerState(nn.Linear):
    """What `MXLinear` has beside its forward pass: its recipe, its operands, and its place in training."""

    scales_class = Fp8Scales
    """What holds FP8's scales; a subclass may have the protocol of a framework."""

    def __init__(self, source: nn.Linear, recipe: Recipe, context: StepContext, index: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate new weights
        self.training = source.training
        self.out_features, self.in_features = widths(source)
        self.inputs_first: bool = getattr(source, "inputs_first", not isinstance(source, nn.Linear))
        """Whether the Parameter is [inputs, outputs], as that of Transformers' Conv1D."""
        self.weight, self.bias = source.weight, source.bias
        self.context, self.index = context, index
        self.census = operators.LayerCensus()
        self.tally = operators.register_census(self.census)
        self.evaluation_tally = -self.tally
        self.split: Any = None
        """How ranks compute the layer together: a `layer.split.TensorSplit`; None: this process has all of it."""
        self.regions = dict.fromkeys(READERS, operators.WHOLE)
        """Where each tensor lies in that of the whole layer, from `region_words`."""
        self.last_pass: tuple[Any, int, int, Recipe] | None = None
        """The weight, its version, the step and the recipe of the last forward pass of training."""
        self.switch(recipe)
        context.layers[self] = None

    # The recipe.

    def use(self, recipe: Recipe) -> None:
        """Compute by another recipe from now on; the weight, the index in the random streams and the census stay.

        Call it between optimizer steps, after `advance`. The history of FP8's scales starts anew: the first step uses
        each tensor's own amax. Nothing happens if the layer has this recipe already. `keep_bf16` is not read.

        Raises:
            StepError: a backward pass has run since the last `advance`.
        """
        if self._has(recipe):
            return
        self.check_use(recipe)
        if hasattr(self, "fp8"):
            del self.fp8
        self.last_pass = None
        self.switch(recipe)

    def check_use(self, recipe: Recipe) -> None:
        """Raise StepError if a change to this recipe is too late in the step; see `use`."""
        if self.census.trained and not self._has(recipe):
            raise StepError(
                f"a layer's recipe changed inside the optimizer step {self.context.step}, of which a backward pass has "
                "run: change it after mxref_torch.advance(model)"
            )

    def _has(self, recipe: Recipe) -> bool:
        return replace(recipe, keep_bf16=self.recipe.keep_bf16) == self.recipe

    def switch(self, recipe: Recipe, in_region: bool = False) -> None:
        """Compute by another recipe from the next forward pass on; a backward pass has the recipe of its forward pass.

        FP8's history stays, and goes on when a recipe with delayed scaling is used again. `in_region`: the recipe is
        that of a region, and the layer keeps one of its own.
        """
        kinds, scales = {recipe.kind(role) for role in GemmRole}, None
        if "fp8" in kinds:
            delayed = recipe.fp8_scaling is Fp8Scaling.DELAYED
            scales = self.history() if delayed else Fp8Scales(Fp8Scaling.CURRENT)
        self.recipe, self.in_region = recipe, in_region
        self.recipe_id = torch.tensor(int(recipe.digest[:12], 16), device="cpu")
        """Tells recipes apart in compiled code and under activation checkpointing."""
        self.gemms = layer_gemms(recipe, self.index, self.context, self.tally, scales)
        self.evaluation = replace(self.gemms[GemmRole.FPROP], tally=self.evaluation_tally)
        self.low_precision = kinds != {"bf16"}
        self.draws = self.would_draw(recipe)
        self.draws_by_place = self.draws and any(
            spec.rounding is Rounding.SR and operand.tensor != "w"
            for role in GemmRole
            for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True)
        )

    def would_draw(self, recipe: Recipe) -> bool:
        """Return whether the layer draws random bits under a recipe."""
        return any(
            KINDS[recipe.kind(role)].draws(spec, self.context.backend)
            for role in GemmRole
            for spec in recipe.operands(role)
        )

    def history(self) -> Fp8Scales:
        """Return the scales of delayed scaling, made if the layer has none. A region leaves them behind."""
        if not hasattr(self, "fp8"):
            self.fp8 = self.scales_class(Fp8Scaling.DELAYED, self.weight.device)
        return self.fp8

    # The operands.

    def operands(
        self,
        name: str,
        values: torch.Tensor,
        batch_place: torch.Tensor,
        gemms: Collection[LayerGemm],
        record_amax: bool = False,
    ) -> dict[GemmRole, Operand]:
        """Return X, W or dY as each of the GEMMs reads it. Two of one kind share one read of it.

        Args:
            name: `x`, `w` or `dy`.
            values: its values, of high precision: [tokens, features], or the Parameter.
            batch_place: where the micro-batch lies in training, from `operators.batch_place`.
            gemms: in the order of their roles. Those that do not read the tensor get nothing.
            record_amax: whether FP8's history takes note of its amax: in training, not in evaluation.
        """
        self._announce(name)
        made: dict[GemmRole, Operand] = {}
        by_kind: dict[type[Operand], list[Reader]] = {}
        of_fprop: list[LayerGemm] = []
        for gemm in {gemm.role: gemm for gemm in gemms}.values():
            which = dict(READERS[name]).get(gemm.role)
            if which is None:
                continue
            if name == "w" and gemm.held is not None:
                made[gemm.role] = gemm.held
                if record_amax:
                    gemm.held.record_amax(name, gemm)
            elif gemm.requantizes is not None and which == 1:
                of_fprop.append(gemm)
            else:
                by_kind.setdefault(gemm.kind, []).append((gemm, which))
        try:
            for readers in by_kind.values():
                read = self.as_read(values) if name == "w" else values
                operands = readers[0][0].kind.make(self, name, read, batch_place, readers)
                if record_amax:
                    operands[0].record_amax(name, readers[0][0])
                made |= {gemm.role: operand for (gemm, _), operand in zip(readers, operands, strict=True)}
            for gemm in of_fprop:
                assert gemm.requantizes is not None
                first = made.get(_FPROP)
                if first is None:
                    first = self.operands(name, values, batch_place, [gemm.requantizes])[_FPROP]
                made[gemm.role] = self.requantized(name, first, batch_place, gemm)
        except BaseException as err:
            err.add_note(f"{operators.NOTE}{name} of layer {self.census.name or self.index}")
            raise
        return made

    def requantized(self, name: str, first: Operand, batch_place: torch.Tensor, gemm: LayerGemm) -> Operand:
        """Return X or W as a backward GEMM reads it, made of the values of Fprop's operand `first`."""
        self._announce(name)
        (_, which), (_, own) = READERS[name]
        assert gemm.requantizes is not None
        assert isinstance(first, BlockOperand)  # recipes have no other source
        values = first.values(gemm.requantizes, which)
        return gemm.kind.make(self, name, values, batch_place, [(gemm, own)])[0]

    def _announce(self, name: str) -> None:
        """Tell watchers which tensor the next operators read."""
        if not torch.compiler.is_compiling():
            for watcher in operators.watchers:
                watcher.reading(self.index, name)

    def as_read(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the Parameter as [outputs, inputs], or a gradient [outputs, inputs] as the Parameter is."""
        return weight.t().contiguous() if self.inputs_first else weight

    def hold_weight(self) -> list[LayerGemm]:
        """Make W for Fprop and Dgrad of all micro-batches of a step, and return the GEMMs that now hold it."""
        # A part of a split weight is not the Parameter itself.
        if hasattr(self.weight, "to_local"):
            return []
        widths = {GemmRole.FPROP: self.in_features, GemmRole.DGRAD: self.out_features}
        gemms = [self.gemms[role] for role in widths if self.gemms[role].kind is not Bf16Operand]
        made = self.operands("w", self.weight.detach(), self.context.batch_place, gemms)
        for gemm in gemms:
            gemm.held = made[gemm.role].prepared(gemm, widths[gemm.role])
        return gemms

    # The place in training.

    def check_pass(self) -> None:
        """Check a forward pass of training that begins. Nothing that it remembers decides what the layer computes.

        LayerError for a recomputation by another recipe, StepError where random bits would be drawn again.
        """
        weight, context = self.weight, self.context
        if not self.low_precision and not context.follows_schedule:
            return
        now = weakref.ref(weight), weight._version, context.step, self.recipe
        if self.last_pass is not None:
            known, version, step, recipe = self.last_pass
            if in_backward() and recipe != self.recipe:
                raise LayerError(RECOMPUTED)
            if known() is weight and version != weight._version:
                if step == context.step and self.draws:
                    raise StepError(
                        f"the weights have changed since a forward pass of step {step}, and its random bits would be "
                        f"drawn again: {WAY_OUT}; before you repeat the step, or after you loaded weights, call "
                        "mxref_torch.restart(model)"
                    )
                if step == context.step and context.follows_schedule:
                    raise StepError(stood_still(step))
                # A handle that follows an optimizer closes the step itself.
                if step != context.step or self.census.listener is None:
                    context.note_next_step()
        self.last_pass = now

    def restart(self) -> None:
        """Forget what the step has left, which is done over: quantized weights, FP8's amaxes, the weight's version."""
        self.release_weight()
        self.last_pass = None
        if hasattr(self, "fp8"):
            self.fp8.restart()

    def release_weight(self) -> None:
        """Hold W no longer."""
        for gemm in self.gemms.values():
            gemm.held = None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.release_weight()
        self.last_pass = None
        self.context.reopen_step()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, without a reference to the weight."""
        return vars(self) | {"last_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.release_weight()
        self.context.layers[self] = None
        # A copy counts for itself.
        self.tally.copy_(operators.register_census(self.census))
        self.evaluation_tally.copy_(-self.tally)

    # A part of a larger layer.

    def lies_at(self, tensor: str, placement: Placement) -> None:
        """Set which part of a larger layer's tensor this layer has, so that SR draws the bits of that part.

        Args:
            tensor: `x`, `w` or `dy`.
            placement: origin and global shape, [outputs, inputs] for `w` and [tokens, features] for the others, whose
                tokens the context places. The random stream is not read.

        Raises:
            LayerError: no such tensor.
        """
        if tensor not in READERS:
            raise LayerError(f"no tensor of a linear layer is named {tensor!r}; take {', '.join(READERS)}")
        self.regions[tensor] = operators.region_words(placement)


def check_recomputation(ctx: Any, recipe_id: Any, batch_place: torch.Tensor) -> None:
    """Raise LayerError or StepError where activation checkpointing recomputed by another recipe or at another place.

    `ctx` has both as of the forward pass, where they count. The saved tensors are the same unless saved anew.
    """
    first = ctx.recipe_id
    if first is not None and first is not recipe_id and not torch.equal(first, recipe_id):
        raise LayerError(RECOMPUTED)
    place = ctx.batch_place
    if place is None or place is batch_place or torch.equal(place, batch_place):
        return
    (step, token, _), (again, at, _) = place.tolist(), batch_place.tolist()
    raise StepError(
        f"activation checkpointing computed a forward pass again at another place (step {again}, token {at}) "
        f"than it ran at (step {step}, token {token}), with other random bits: run the backward pass of each "
        "micro-batch before the next forward pass, and once"
    )
