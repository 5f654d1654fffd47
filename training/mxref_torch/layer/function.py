"""The three GEMMs of a linear layer as a function that autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch

from mxref.roles import GemmRole
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.operand import LayerGemm
from mxref_torch.layer.reads import OperandMaker
from mxref_torch.shared.context import another_place

RECOMPUTED = (
    "activation checkpointing computes a forward pass again, and the recipe has changed since; run the "
    "backward pass within the same `with mxref_torch.recipe(...)`, and before the recipe is changed"
)


class LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format.

    No torch function called here may return one of its own arguments (see `kinds.cast`): no cast to the same type,
    no operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, layer: OperandMaker
    ) -> torch.Tensor:
        """Return Y, and save what the backward pass reads."""
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        gemms = layer.gemms
        fprop, wgrad = gemms[GemmRole.FPROP], gemms[GemmRole.WGRAD]
        keeper = (
            wgrad.source or wgrad
        )  # whose X is saved: where Wgrad is made of Fprop's, that is packed already
        made = layer.operands("x", x, place, (fprop, keeper) if needs_dw else (fprop,), observe=True)
        kept = made[keeper.role].saved() if needs_dw else ()
        # The Parameter itself, never a view of it: sharded training frees and refills its storage.
        marker = None if torch.compiler.is_compiling() else layer.marker
        ctx.save_for_backward(place, marker, weight if needs_dx else None, *kept)
        ctx.marker = marker
        ctx.layer, ctx.gemms, ctx.dtypes = layer, gemms, (x.dtype, weight.dtype)
        ctx.place = place if layer.draws and not torch.compiler.is_compiling() else None
        w = layer.weight_operand(fprop, weight, place)
        return made[GemmRole.FPROP].product(w, fprop, layer.in_features, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return dX and dW where they are needed, by the recipe of the forward pass."""
        layer, gemms = ctx.layer, ctx.gemms
        place, marker, weight, *saved = ctx.saved_tensors
        _check_recomputation(
            None if ctx.marker is None else (ctx.marker, marker),
            None if ctx.place is None else (ctx.place, place),
        )
        x_dtype, w_dtype = ctx.dtypes
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dgrad, wgrad = gemms[GemmRole.DGRAD], gemms[GemmRole.WGRAD]
        reading = [*([dgrad] if needs_dx else []), *([wgrad] if needs_dw else [])]
        made = layer.operands("dy", dy, place, reading, observe=True)
        dx = dw = None
        if needs_dx:
            w = layer.weight_operand(dgrad, weight, place)
            dx = made[GemmRole.DGRAD].product(w, dgrad, layer.out_features, x_dtype)
        if needs_dw:
            x = (wgrad.source or wgrad).kind.restored(saved)
            if wgrad.source:
                x = layer.requantized("x", x, place, wgrad)
            gradient = None if torch.compiler.is_compiling() else _held_gradient(ctx, layer, wgrad)
            if gradient is None:
                dw = layer.as_read(made[GemmRole.WGRAD].product(x, wgrad, dy.shape[0], w_dtype))
            else:
                made[GemmRole.WGRAD].multiply_onto(gradient, x, wgrad, dy.shape[0])
        return dx, dw, None, None


def _check_recomputation(
    recipes: tuple[torch.Tensor, torch.Tensor] | None,
    places: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Check that activation checkpointing, where it computed a forward pass again, computed the same.

    Args:
        recipes: markers of the recipes of the forward pass and of what it saved, one tensor unless that was saved
            anew; None where nothing is compared.
        places: the same for the places of the micro-batch, which decide random bits.

    Raises:
        LayerError: the recipes differ.
        StepError: the places differ.
    """
    if recipes is not None and recipes[0] is not recipes[1] and not torch.equal(*recipes):
        raise LayerError(RECOMPUTED)
    if places is not None and places[0] is not places[1]:
        forward, recomputed = (place.tolist() for place in places)
        if forward != recomputed:
            raise StepError(another_place(forward, recomputed))


def _held_gradient(node: Any, layer: OperandMaker, wgrad: LayerGemm) -> torch.Tensor | None:
    """Return the gradient to which Wgrad may add in place, as autograd would; None if autograd has to."""
    weight = layer.context.sole_uses.get(node)
    if weight is None or not wgrad.kind.adds_in_place or not wgrad.plain or layer.inputs_first:
        return None
    # Hooks need a real gradient.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    held = weight.grad
    if held is None or held.layout is not torch.strided or held.requires_grad:
        return None
    return held if held.dtype is torch.float32 and held.is_contiguous() else None
