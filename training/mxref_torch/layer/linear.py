"""The linear layer whose three GEMMs each run in the format that the recipe gives them.

Fprop Y = X W^T, Dgrad dX = dY W and Wgrad dW = dY^T X, each in BF16, FP8 or block formats, in any combination.
Parameters stay float32 and never change format. Every operand is made from its high-precision source when a GEMM
needs it. Forward saves X for Wgrad as Wgrad will read it: MXFP4 takes a quarter of BF16's memory, FP8 half.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxref.errors import DtypeError, ShapeError
from mxref.placement import Placement
from mxref.recipe import Fp8Scaling, Recipe
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.operand import KINDS, LayerGemm, Operand, Source
from mxref_torch.shared.context import StepContext, another_place, in_backward, repeated, stood_still
from mxref_torch.shared.inputs import Made

WeightKey = tuple[int, int, int, bool]
"""Step, version and address of a weight, of which an operand was made; and whether evaluation made it."""

RECOMPUTED = (
    "activation checkpointing computes a forward pass again, and the recipe has changed since; run the "
    "backward pass within the same `with mxref_torch.recipe(...)`, and before the recipe is changed"
)

READERS = {
    "x": ((GemmRole.FPROP, 0), (GemmRole.WGRAD, 1)),
    "w": ((GemmRole.FPROP, 1), (GemmRole.DGRAD, 1)),
    "dy": ((GemmRole.DGRAD, 0), (GemmRole.WGRAD, 0)),
}
"""The two GEMMs that read a tensor, along axis 1 and along axis 0, and which of their operands it is."""


def _note_update(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Give updated weights another version: torch's fused optimizers leave it as it was."""
    if torch.compiler.is_compiling():
        return
    groups = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    torch.autograd.graph.increment_version([p for params in groups for p in params if p.grad is not None])


register_optimizer_step_post_hook(_note_update)


class MXLinear(nn.Linear):
    """A linear layer that holds the Parameters of the `nn.Linear` it replaces.

    Takes x [..., in_features] in float32 or bfloat16 and returns [..., out_features] in the same type; under
    autocast, in autocast's type. Weight gradients have the weight's type. Raises ShapeError and DtypeError on anything
    else.

    Implements: fp8.gemm, linear.formats
    """

    def __init__(self, source: nn.Linear, recipe: Recipe, context: StepContext, index: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate new weights
        self.training = source.training
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.context, self.index = context, index
        self.census = operators.LayerCensus()
        self.census.whole = context.census
        context.layers.append(self.census)
        self.tally = operators.register_census(self.census)
        self._has_scales = False
        self.regions: dict[str, torch.Tensor] = dict.fromkeys(READERS, operators.WHOLE)
        self._lengths = {GemmRole.FPROP: self.in_features, GemmRole.DGRAD: self.out_features}
        self._converted = weakref.ref(self.weight)
        self._trained: tuple[int, int] | None = None  # step and version of the weight that a forward saw
        self._weights: dict[str, tuple[WeightKey, Operand]] = {}
        self._held: dict[str, Operand] = {}
        self.switch(recipe)
        self._forward_recipe = recipe  # that of the last forward pass in training
        self._join_schedule()

    def _join_schedule(self) -> None:
        if self.context.schedule is not None:
            self.context.schedule.join(self.index, self)

    def use(self, recipe: Recipe) -> None:
        """Compute by another recipe from now on; the weight, the index in the random streams and the census stay.

        Call it between optimizer steps, after `advance`. The history of FP8's scales starts anew: the first step uses
        each tensor's own amax. Nothing happens if the layer has this recipe already.

        Args:
            recipe: the treatment of the three GEMMs. Its `keep_bf16` is not read.

        Raises:
            StepError: a backward pass has run since the last `advance`.
        """
        if replace(recipe, keep_bf16=self.recipe.keep_bf16) == self.recipe:
            return
        if self.census.trained:
            raise StepError(
                f"a layer's recipe changed inside the optimizer step {self.context.step}, of which a backward pass has "
                "run: change it after mxref_torch.advance(model)"
            )
        if self._has_scales:
            del self.fp8
            self._has_scales = False
        self._forget()
        self.switch(recipe)

    def switch(self, recipe: Recipe) -> None:
        """Compute by another recipe from the next forward pass on; a backward pass has the recipe of its forward pass.

        FP8's history stays, and goes on when a recipe with delayed scaling is used again.
        """
        kinds = {recipe.kind(role) for role in GemmRole}
        scales = None
        if "fp8" in kinds and recipe.fp8_scaling is Fp8Scaling.CURRENT:
            scales = Fp8Scales(recipe.fp8_scaling)
        elif "fp8" in kinds:
            if not self._has_scales:
                self.fp8 = Fp8Scales(recipe.fp8_scaling, self.weight.device)
                self._has_scales = True
            scales = self.fp8
        self.recipe = recipe
        self.marker = torch.tensor(int(recipe.digest[:12], 16), device="cpu")
        given = self.index, self.context, self.tally, scales
        self.gemms = {role: LayerGemm.of(recipe, role, *given) for role in GemmRole}
        self.low_precision = kinds != {"bf16"}
        self.draws = self.would_draw(recipe)
        self._weights.clear()
        self._held.clear()

    def would_draw(self, recipe: Recipe) -> bool:
        """Return whether the layer draws random bits under a recipe."""
        return any(
            KINDS[recipe.kind(role)].draws(spec, self.context.backend)
            for role in GemmRole
            for spec in recipe.operands(role)
        )

    @contextmanager
    def under(self, gemms: dict[GemmRole, LayerGemm]) -> Iterator[None]:
        """Compute with the GEMMs of an earlier forward pass."""
        now, self.gemms = self.gemms, gemms
        self._weights.clear()
        self._held.clear()
        try:
            yield
        finally:
            self.gemms = now
            self._weights.clear()
            self._held.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; under autocast x is cast first, as `nn.Linear` casts it."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            # Autocast would reach the products inside the operators too.
            with torch.autocast(device, enabled=False):
                return self._forward(x.to(dtype) if x.dtype in (torch.float32, torch.bfloat16) else x)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise DtypeError(
                f"MXLinear takes float32 or bfloat16, got {x.dtype}; cast its input, or autocast to bfloat16"
            )
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"MXLinear: input has {x.shape[-1]} features, the weight {self.in_features}")
        tokens = x.reshape(-1, self.in_features)  # [tokens, in]
        place = self.context.place
        shared = None if torch.compiler.is_compiling() else self.context.shared.of(x, self)
        if torch.is_grad_enabled() and (tokens.requires_grad or self.weight.requires_grad):
            if (self.low_precision or self.context.follows_schedule) and not torch.compiler.is_compiling():
                self._check_recomputation()
                self._check_step()
            y: torch.Tensor = _LinearFunction.apply(tokens, self.weight, place, self, shared)  # type: ignore[no-untyped-call]
        else:
            role = GemmRole.FPROP
            a = self.operands("x", tokens, place, (role,), shared=shared)[role]
            w = self.weight_operand(role, self.weight, place, None)
            y = a.multiply(w, self.gemms[role], self.in_features, x.dtype)
        # As torch's own linear layer: the result is no view, which FSDP2 would warn of.
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _check_recomputation(self) -> None:
        """Raise LayerError if a backward pass recomputes a forward pass that ran under another recipe."""
        if self._forward_recipe is self.recipe:
            return
        if in_backward() and self._forward_recipe != self.recipe:
            raise LayerError(RECOMPUTED)
        self._forward_recipe = self.recipe

    def _check_step(self) -> None:
        """Raise StepError if the weight has changed since the forward before, and the step of random bits has not."""
        # A weight that is refilled by its owner keeps its version: nothing can be said of it here.
        if not self._has_own_weight(self.weight):
            return
        now = self.context.step, self.weight._version
        if self._trained is not None and self._trained[1] != now[1]:
            if self._trained[0] != now[0]:
                self.context.note_next_step()
            elif self.draws:
                raise StepError(repeated(now[0]))
            elif self.context.follows_schedule:
                raise StepError(stood_still(now[0]))
            elif self.census.listener is None:  # a handle that follows an optimizer closes the step itself
                self.context.note_next_step()
        self._trained = now

    def _has_own_weight(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is the Parameter that was converted, whose version tells of every change.

        FSDP2 puts another one in its place and refills it before each forward under an unchanged version.
        """
        return self._converted() is weight

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: nothing that was made of the weight, nor a reference to it."""
        kept = {key: value for key, value in vars(self).items() if key != "_converted"}
        return kept | {"_weights": {}, "_held": {}, "_trained": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._converted = weakref.ref(self.weight)
        self.census.whole = self.context.census
        self._join_schedule()
        # A copy counts for itself.
        self.tally.copy_(operators.register_census(self.census))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._forget()
        self.context.reopen_step()

    def train(self, mode: bool = True) -> MXLinear:
        """Set the mode; what was made of the weight is forgotten, which may change unseen in between."""
        if mode != self.training:
            self._weights.clear()
        super().train(mode)
        return self

    def _forget(self) -> None:
        """Forget what is known of the weight and of the step that trained it."""
        self._weights.clear()
        self._held.clear()
        self.context.shared.clear()
        self._trained = None

    def lies_at(self, tensor: str, placement: Placement) -> None:
        """Say which part of a larger layer's tensor this layer's is, so that SR draws the bits of that part.

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
        self._forget()

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
        source = Source(tensor, values, place, self.regions[tensor])
        readers = [(self.gemms[role], which) for role, which in READERS[tensor] if role in roles]
        made: dict[GemmRole, Operand] = {}
        while readers:
            kind = readers[0][0].kind
            alike = [reader for reader in readers if reader[0].kind is kind]
            readers = [reader for reader in readers if reader[0].kind is not kind]
            key = None if shared is None else kind.shared_as(source, alike)
            if shared is None or key is None:
                operands = kind.make(source, alike)
            else:
                operands = shared.get(key) or shared.setdefault(key, kind.make(source, alike))
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
            weight: float32 [outputs, inputs].
            place: where the micro-batch lies in training.
            tokens: of the micro-batch; None in evaluation, of which FP8's history takes no note.
            ahead: roles that will read W in this step too; theirs is made from the same read of it.
        """
        gemm = self.gemms[role]
        slot = gemm.kind.slot(role)
        # A compiled graph cannot ask for a tensor's version, and a sharded weight has none: the operand is made anew.
        if slot in self._held:
            operand = self._held[slot]
        elif slot is None or torch.compiler.is_compiling() or not self._has_own_weight(weight):
            operand = self.operands("w", weight, place, (role,))[role]
        else:
            step, _, total = place.tolist()
            # What evaluation made is not for training: averages of weights are put in place through `.data`.
            key = step, weight._version, weight.data_ptr(), tokens is None
            if not self._keeps(slot, key):
                # One GEMM alone gains nothing from a layout: it would make the same on its way.
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
        if not self._has_own_weight(self.weight):
            return
        for role in (GemmRole.FPROP, GemmRole.DGRAD):
            wanted = {
                slot: each
                for each in (role, GemmRole.DGRAD)
                if self.gemms[each].kind is self.gemms[role].kind
                and (slot := self.gemms[each].kind.slot(each)) is not None
                and slot not in self._held
            }
            made = self.operands("w", self.weight.detach(), place, list(wanted.values())) if wanted else {}
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
        made = self.operands("w", weight, place, list(wanted.values()))
        for slot, role in wanted.items():
            operand = made[role]
            if again:
                operand = operand.prepared(self.gemms[role], self._lengths[role])
            self._weights[slot] = key, operand

    def _keeps(self, slot: str, key: WeightKey) -> bool:
        """Return whether what is kept of the weight is of that step and version, and may be used there."""
        if slot not in self._weights:
            return False
        *made_of, by_evaluation = self._weights[slot][0]
        return tuple(made_of) == key[:3] and (key[3] or not by_evaluation)

    def advance(self, held: torch.Tensor | None = None) -> None:
        """Close an optimizer step: the next FP8 scales, and no quantized weight of this step.

        Args:
            held: as in `Fp8Scales.advance`.
        """
        self._weights.clear()
        self._held.clear()
        self.context.shared.clear()
        if self._has_scales:
            self.fp8.advance(held)

    def restart(self) -> None:
        """Forget this step's quantized weights and FP8 history: the step is done over."""
        self._forget()
        if self._has_scales:
            self.fp8.restart()


class _LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format.

    No torch function called here may return one of its own arguments (see `operand.cast`): no cast to the same type,
    no operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        place: torch.Tensor,
        layer: MXLinear,
        shared: Made | None,
    ) -> torch.Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        roles = [GemmRole.FPROP, *([GemmRole.WGRAD] if needs_dw else [])]
        made = layer.operands("x", x, place, roles, observe=True, shared=shared)
        kept = made[GemmRole.WGRAD].saved() if needs_dw else ()
        # The Parameter itself, never a view of it: sharded training frees and refills its storage.
        marker = None if torch.compiler.is_compiling() else layer.marker
        ctx.save_for_backward(place, marker, weight if needs_dx else None, *kept)
        ctx.marker = marker
        ctx.layer, ctx.gemms, ctx.dtypes = layer, layer.gemms, (x.dtype, weight.dtype)
        ctx.place = place if layer.draws and not torch.compiler.is_compiling() else None
        ahead = [GemmRole.DGRAD] if needs_dx else []
        w = layer.weight_operand(GemmRole.FPROP, weight, place, x.shape[0], ahead)
        gemm = layer.gemms[GemmRole.FPROP]
        return made[GemmRole.FPROP].multiply(w, gemm, layer.in_features, x.dtype)

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        if ctx.gemms is ctx.layer.gemms:
            return _LinearFunction._gradients(ctx, dy)
        with ctx.layer.under(ctx.gemms):
            return _LinearFunction._gradients(ctx, dy)

    @staticmethod
    def _gradients(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        layer = ctx.layer
        place, marker, weight, *saved = ctx.saved_tensors
        # As with the place: the marker of a recomputation says by which recipe it ran.
        if marker is not None and marker is not ctx.marker and not torch.equal(marker, ctx.marker):
            raise LayerError(RECOMPUTED)
        # Activation checkpointing has saved the place anew: that of the forward pass it computed again.
        if ctx.place is not None and ctx.place is not place:
            _check_place(ctx.place, place)
        x_dtype, w_dtype = ctx.dtypes
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        roles = [*([GemmRole.DGRAD] if needs_dx else []), *([GemmRole.WGRAD] if needs_dw else [])]
        made = layer.operands("dy", dy, place, roles, observe=True)
        dx = dw = None
        if needs_dx:
            role = GemmRole.DGRAD
            w = layer.weight_operand(role, weight, place, dy.shape[0])
            dx = made[role].multiply(w, layer.gemms[role], layer.out_features, x_dtype)
        if needs_dw:
            role, gemm = GemmRole.WGRAD, layer.gemms[GemmRole.WGRAD]
            x = gemm.kind.restored(saved)
            gradient = None if torch.compiler.is_compiling() else _held_gradient(ctx, layer)
            if gradient is None:
                dw = made[role].multiply(x, gemm, dy.shape[0], w_dtype)
            else:
                made[role].multiply_onto(gradient, x, gemm, dy.shape[0])
        return dx, dw, None, None, None


def _check_place(forward: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Raise StepError unless a recomputation drew the random bits of its forward pass."""
    if forward.tolist() != recomputed.tolist():
        raise StepError(another_place(forward.tolist(), recomputed.tolist()))


def _held_gradient(node: Any, layer: MXLinear) -> torch.Tensor | None:
    """Return the gradient to which Wgrad may add in place, as autograd would; None if autograd has to."""
    weight = layer.context.sole_uses.get(node)
    if weight is None or not layer.gemms[GemmRole.WGRAD].kind.adds_in_place:
        return None
    # Hooks need a real gradient.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    held = weight.grad
    if held is None or held.layout is not torch.strided or held.requires_grad:
        return None
    return held if held.dtype is torch.float32 and held.is_contiguous() else None
