"""What a linear layer is between its passes: Parameters, recipe, FP8 history, census, and the checks of a step."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Protocol

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
from mxref_torch.layer.operands import KINDS, READERS, layer_gemms
from mxref_torch.names import widths
from mxref_torch.step_context import WAY_OUT, StepContext, in_backward, stood_still

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


class Split(Protocol):
    """How ranks compute a layer together; `mxref_torch.layer.split` has it."""

    @property
    def tensors(self) -> frozenset[str]:
        """Which of `x`, `w` and `dy` a rank has only a part of."""

    def placements(self, shape: tuple[int, int]) -> dict[str, Placement]:
        """Return where a rank's part lies in each split tensor of a layer whose whole weight has a shape."""

    def own(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of the weight that lies on this rank, a plain tensor through which gradients pass."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return X in float32, as a rank reads it; the backward pass sums dX where each rank has a part of it."""

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """Return Y in float32 from what a rank computes of it: the sum over ranks where each has a part of X."""

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the largest amax of all ranks."""


class LayerState(nn.Linear):
    """The part of `MXLinear` that does not compute."""

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
        self.census.whole = context.census
        context.layers.append(self.census)
        self.tally = operators.register_census(self.census)
        self.evaluation_tally = -self.tally
        self._has_scales = False
        self.split: Split | None = None
        """How ranks compute the layer together; None: this process has all of it."""
        self.regions = dict.fromkeys(READERS, operators.WHOLE)
        """Where each tensor lies in that of the whole layer, from `region_words`."""
        self.last_pass: tuple[Any, int, int, Recipe] | None = None
        """The weight, its version, the step and the recipe of the last forward pass of training."""
        self.switch(recipe)
        self._join_schedule()

    def _join_schedule(self) -> None:
        if self.context.schedule is not None:
            self.context.schedule.join(self.index, self)

    # The recipe.

    def use(self, recipe: Recipe) -> None:
        """Compute by another recipe from now on; the weight, the index in the random streams and the census stay.

        Call it between optimizer steps, after `advance`. The history of FP8's scales starts anew: the first step uses
        each tensor's own amax. Nothing happens if the layer has this recipe already.

        Args:
            recipe: the treatment of the three GEMMs. Its `keep_bf16` is not read.

        Raises:
            StepError: a backward pass has run since the last `advance`.
        """
        if self._has(recipe):
            return
        self.check_use(recipe)
        if self._has_scales:
            del self.fp8
            self._has_scales = False
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

        FP8's history stays, and goes on when a recipe with delayed scaling is used again.

        Args:
            recipe: the treatment of the three GEMMs.
            in_region: whether it is that of a region, and the layer keeps a recipe of its own.
        """
        kinds = {recipe.kind(role) for role in GemmRole}
        scales = None
        if "fp8" in kinds and recipe.fp8_scaling is Fp8Scaling.CURRENT:
            scales = Fp8Scales(recipe.fp8_scaling)
        elif "fp8" in kinds:
            scales = self.history()
            scales.of_region &= in_region
        self.recipe, self.in_region = recipe, in_region
        self.marker = torch.tensor(int(recipe.digest[:12], 16), device="cpu")
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
        """Return the scales of delayed scaling, made for a region if the layer has none."""
        if not self._has_scales:
            self.fp8 = self.scales_class(Fp8Scaling.DELAYED, self.weight.device)
            self.fp8.of_region = self._has_scales = True
        return self.fp8

    # The place in training.

    def check_pass(self) -> None:
        """Check a forward pass of training. Nothing that it remembers decides what the layer computes.

        Raises:
            LayerError: a backward pass recomputes a forward pass that ran under another recipe.
            StepError: the weight has changed since the forward pass before, and the step of random bits has not.
        """
        weight, context = self.weight, self.context
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

    def advance(self) -> None:
        """Close an optimizer step: compute the next FP8 scales, and hold no quantized weight."""
        self.release_weight()
        if self._has_scales:
            self.fp8.advance()

    def restart(self) -> None:
        """Forget this step's quantized weights and FP8 history: the step is done over."""
        self._reopen()
        if self._has_scales:
            self.fp8.restart()

    def _reopen(self) -> None:
        """Forget the step and the version of the weight that it trained."""
        self.release_weight()
        self.last_pass = None

    def release_weight(self) -> None:
        """Hold W no longer."""
        for gemm in self.gemms.values():
            gemm.held = None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._reopen()
        self.context.reopen_step()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, without a reference to the weight."""
        return vars(self) | {"last_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.release_weight()
        self.census.whole = self.context.census
        self._join_schedule()
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
            ShapeError: not two axes.
        """
        if tensor not in READERS:
            raise LayerError(f"no tensor of a linear layer is named {tensor!r}; take {', '.join(READERS)}")
        self.regions[tensor] = operators.region_words(placement)

    def take_part(self, split: Split) -> None:
        """Compute a part of the layer, as `mxref_torch.layer.split.split_layer` has prepared it."""
        whole = self.out_features, self.in_features
        self.split = split
        self.out_features, self.in_features = split.own(self.weight.detach()).shape
        for tensor, placement in split.placements(whole).items():
            self.lies_at(tensor, placement)
