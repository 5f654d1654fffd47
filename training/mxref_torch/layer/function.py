"""The three GEMMs of a linear layer as a function that autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch

from mxref.roles import GemmRole
from mxref_torch.layer.passes import check_recomputation
from mxref_torch.layer.reads import OperandMaker
from mxref_torch.shared.inputs import Made


class LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format.

    No torch function called here may return one of its own arguments (see `kinds.cast`): no cast to the same type,
    no operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        place: torch.Tensor,
        layer: OperandMaker,
        shared: Made | None,
    ) -> torch.Tensor:
        """Return Y, and save what the backward pass reads."""
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
        """Return dX and dW where they are needed, by the recipe of the forward pass."""
        if ctx.gemms is ctx.layer.gemms:
            return LinearFunction._gradients(ctx, dy)
        with ctx.layer.under(ctx.gemms):
            return LinearFunction._gradients(ctx, dy)

    @staticmethod
    def _gradients(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        layer = ctx.layer
        place, marker, weight, *saved = ctx.saved_tensors
        check_recomputation(
            None if ctx.marker is None else (ctx.marker, marker),
            None if ctx.place is None else (ctx.place, place),
        )
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
                dw = layer.as_read(made[role].multiply(x, gemm, dy.shape[0], w_dtype))
            else:
                made[role].multiply_onto(gradient, x, gemm, dy.shape[0])
        return dx, dw, None, None, None


def _held_gradient(node: Any, layer: OperandMaker) -> torch.Tensor | None:
    """Return the gradient to which Wgrad may add in place, as autograd would; None if autograd has to."""
    weight = layer.context.sole_uses.get(node)
    if weight is None or not layer.gemms[GemmRole.WGRAD].kind.adds_in_place:
        return None
    if layer.inputs_first:
        return None
    # Hooks need a real gradient.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    held = weight.grad
    if held is None or held.layout is not torch.strided or held.requires_grad:
        return None
    return held if held.dtype is torch.float32 and held.is_contiguous() else None
