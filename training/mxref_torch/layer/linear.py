"""A linear layer of microscaled training: three GEMMs, six operands, and what the forward pass saves.

=====  ===========  ========  ============  =============
GEMM   computes     reads     blocks along  runs in
=====  ===========  ========  ============  =============
Fprop  Y = X W^T    X and W   inputs        forward pass
Dgrad  dX = dY W    dY and W  outputs       backward pass
Wgrad  dW = dY^T X  dY and X  tokens        backward pass
=====  ===========  ========  ============  =============

X, W and dY are each read by two GEMMs, along different axes: these are the six operands. Each GEMM has its own format,
BF16, FP8 or blocks, in any combination. Both operands of X are made in the forward pass, those of W and dY when their
GEMM needs them: from the tensor in high precision, or, under `source = "fprop"`, from the values of Fprop's operand.
The Parameter stays float32 and never changes format.

The forward pass saves X as Wgrad will read it, or, under that source, as Fprop has read it: MXFP4 takes a quarter of
BF16's memory, FP8 half. It saves the weight itself, from which Dgrad's operand is made in the backward pass.

`LinearFunction` is the definition, and the order of its operations decides bits. `operands` has what an operand is in
each format, and `state` what a layer is between its passes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from mxref.errors import DtypeError, ShapeError
from mxref.roles import GemmRole
from mxref_torch.errors import LayerError
from mxref_torch.layer.operands import BlockOperand, LayerGemm
from mxref_torch.layer.state import LayerState, check_recomputation
from mxref_torch.names import named_linears

_FPROP, _DGRAD, _WGRAD = GemmRole
_TYPES = (torch.float32, torch.bfloat16)
"""Of a layer's input."""


class LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format.

    No torch function called here may return one of its own arguments (see `operands.cast`): no cast to the same type,
    no operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, batch_place: torch.Tensor, layer: MXLinear
    ) -> torch.Tensor:
        """Return Y [tokens, outputs] of X [tokens, inputs] and the Parameter; save what the backward pass reads."""
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        fprop, wgrad = layer.gemms[_FPROP], layer.gemms[_WGRAD]
        saving = wgrad.requantizes or wgrad  # the GEMM whose X is saved
        reading = [fprop, saving] if needs_dw else [fprop]
        x_as = layer.operands("x", x, batch_place, reading, record_amax=True)
        w_as = layer.operands("w", weight, batch_place, [fprop], record_amax=True)
        y = x_as[_FPROP].product(w_as[_FPROP], fprop, layer.in_features, x.dtype)
        saved_x = x_as[saving.role].saved() if needs_dw else ()
        recipe_id = None if torch.compiler.is_compiling() else layer.recipe_id
        # The Parameter itself, never a view of it: sharded training frees and refills its storage.
        ctx.save_for_backward(batch_place, recipe_id, weight if needs_dx else None, *saved_x)
        ctx.recipe_id = recipe_id
        ctx.batch_place = batch_place if layer.draws and not torch.compiler.is_compiling() else None
        ctx.layer, ctx.gemms, ctx.dtypes = layer, layer.gemms, (x.dtype, weight.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return dX [tokens, inputs] and dW, where needed, of dY [tokens, outputs], by the forward pass's recipe."""
        layer, (x_dtype, w_dtype) = ctx.layer, ctx.dtypes
        batch_place, recipe_id, weight, *saved_x = ctx.saved_tensors
        check_recomputation(ctx, recipe_id, batch_place)
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dgrad, wgrad = ctx.gemms[_DGRAD], ctx.gemms[_WGRAD]
        reading = [*([dgrad] if needs_dx else []), *([wgrad] if needs_dw else [])]
        dy_as = layer.operands("dy", dy, batch_place, reading, record_amax=True)
        dx = dw = None
        if needs_dx:
            w_as = layer.operands("w", weight, batch_place, [dgrad], record_amax=True)
            dx = dy_as[_DGRAD].product(w_as[_DGRAD], dgrad, layer.out_features, x_dtype)
        if needs_dw:
            x = (wgrad.requantizes or wgrad).kind(*saved_x)
            if wgrad.requantizes:
                x = layer.requantized("x", x, batch_place, wgrad)
            gradient = None if torch.compiler.is_compiling() else _gradient_in_place(ctx, layer, wgrad)
            if gradient is None:
                dw = layer.as_read(dy_as[_WGRAD].product(x, wgrad, dy.shape[0], w_dtype))
            else:
                dy_as[_WGRAD].add_product(gradient, x, wgrad, dy.shape[0])
        return dx, dw, None, None


class MXLinear(LayerState):
    """A linear layer that holds the Parameters of the `nn.Linear`, or Transformers' `Conv1D`, that it replaces.

    Takes x [..., in_features] in float32 or bfloat16 and returns [..., out_features] in the same type; under
    autocast, in autocast's type. Weight gradients have the weight's type. Raises ShapeError and DtypeError on anything
    else.

    Implements: fp8.gemm, linear.formats
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias of the input x; under autocast x is cast first, as `nn.Linear` casts it."""
        x, split, device = input, self.split, input.device.type
        if torch.is_autocast_enabled(device) and x.dtype in _TYPES:
            x = x.to(torch.get_autocast_dtype(device))
        if x.dtype not in _TYPES:
            raise DtypeError(
                f"MXLinear takes float32 or bfloat16, got {x.dtype}; cast its input, or autocast to bfloat16"
            )
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"MXLinear: input has {x.shape[-1]} features, the weight {self.in_features}")
        tokens, weight = x.reshape(-1, self.in_features), self.weight  # [tokens, inputs]
        if split is not None:
            tokens, weight = split.read(tokens), split.own(weight)
        if not torch.compiler.is_compiling() and hasattr(weight, "placements"):
            raise LayerError(
                "the weight of a converted layer is a DTensor, and the operators of block formats take plain tensors: "
                "split the layer by mxref_torch.layer.split.split_layer before fully_shard, and call a sharded model "
                "through its own forward"
            )
        if torch.is_grad_enabled() and (tokens.requires_grad or weight.requires_grad):
            if not torch.compiler.is_compiling():
                self.check_pass()
                if self.census.listener is not None:
                    self.census.listener(None, 0)  # may set another place
            y: torch.Tensor = LinearFunction.apply(tokens, weight, self.context.batch_place, self)  # type: ignore[no-untyped-call]
        else:
            fprop, batch_place = self.evaluation, self.context.batch_place
            x_as, w_as = (
                self.operands(name, t, batch_place, [fprop]) for name, t in (("x", tokens), ("w", weight))
            )
            y = x_as[_FPROP].product(w_as[_FPROP], fprop, self.in_features, tokens.dtype)
        if split is not None:
            y = split.summed(y).to(x.dtype)
        # As in torch's own linear layer, the result is not a view; FSDP2 would warn about one.
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def converted(model: Any) -> dict[str, MXLinear]:
    """Return the converted layers of a model, or of its handle, by their names."""
    return {name: layer for name, layer in named_linears(model).items() if isinstance(layer, MXLinear)}


def require_converted(model: Any) -> dict[str, MXLinear]:
    """Return what `converted` returns; LayerError if no layer is converted."""
    if not (layers := converted(model)):
        raise LayerError("no layer of the model is converted; call mxref_torch.convert(model, recipe) first")
    return layers


# Micro-batches: Wgrad adds to the gradient itself, which saves autograd one more pass over it.


def sole_uses(loss: torch.Tensor) -> dict[Any, torch.Tensor]:
    """Map each node of a linear layer that is its weight's only reader in the graph of a micro-batch's loss to it.

    Assign the result to `handle.context.sole_uses`. The backward pass of this graph then adds each Wgrad product of a
    block format to the existing `.grad` and gives autograd nothing to add. Autograd still adds a gradient that does
    not exist yet, is not float32 and contiguous, or has hooks, and it adds everything in compiled code. Take gradients
    by `backward()` of the whole graph: `torch.autograd.grad` would get none for these weights.
    """
    # Of several readers autograd first sums the gradients, and then adds the sum: added one by one they would be
    # rounded in another order.
    readers: dict[Any, list[Any]] = defaultdict(list)
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for source, _ in node.next_functions:
            if hasattr(source, "variable"):
                readers[source].append(node)
            else:
                waiting.append(source)
    return {
        nodes[0]: leaf.variable
        for leaf, nodes in readers.items()
        if len(nodes) == 1
        and isinstance(getattr(nodes[0], "layer", None), MXLinear)
        and nodes[0].next_functions[1][0] is leaf
    }


def _gradient_in_place(node: Any, layer: MXLinear, wgrad: LayerGemm) -> torch.Tensor | None:
    """Return the gradient to which Wgrad may add in place, as autograd would; None if autograd has to."""
    weight = layer.context.sole_uses.get(node)
    if weight is None or wgrad.kind is not BlockOperand or not wgrad.plain or layer.inputs_first:
        return None
    # Hooks need a real gradient.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    held = weight.grad
    if held is None or held.layout is not torch.strided or held.requires_grad:
        return None
    return held if held.dtype is torch.float32 and held.is_contiguous() else None
