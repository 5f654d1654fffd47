"""Check that linear layers can be replaced: each must run the forward method of `nn.Linear`."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from mxref_torch.errors import LayerError
from mxref_torch.layer import MXLinear
from mxref_torch.names import named_modules


def check_replaceable(model: nn.Module) -> None:
    """Raise LayerError where a converted layer would not compute what the layer computed, naming the module."""
    for name, module in named_modules(model):
        if isinstance(module, nn.MultiheadAttention):
            raise LayerError(
                f"{name or 'the model'} is an nn.MultiheadAttention, which multiplies with the weights of its out_proj "
                "and in_proj itself: converted layers would never run; build the attention of nn.Linear layers and "
                "torch.nn.functional.scaled_dot_product_attention, or convert the other parts of the model one by one"
            )
        for child_name, child in module._modules.items():
            if child_name == "_orig_mod" and isinstance(child, nn.Linear):
                raise LayerError(
                    f"{name} is a linear layer that was compiled by itself, and would go on running its compiled "
                    "code; call convert first, then torch.compile"
                )
        if isinstance(module, nn.Linear):
            _check_linear(name, module)


def _check_linear(name: str, linear: nn.Linear) -> None:
    """Raise LayerError unless the layer is a plain one with a weight of its own."""
    weight = linear._parameters.get("weight")
    if weight is None:
        raise LayerError(
            f"{name}: its weight is computed from other Parameters (a parametrization or pruning), which would be "
            "computed no more; remove it first, as torch.nn.utils.parametrize.remove_parametrizations does"
        )
    if is_lazy(weight):
        raise LayerError(f"{name} is a lazy layer without a shape yet; run the model once before convert")
    if hasattr(weight, "to_local"):
        raise LayerError(
            f"{name}: its weight is sharded already, so that the layer that convert makes would get no whole one; "
            "call convert first, then fully_shard"
        )
    own = type(linear).forward is not nn.Linear.forward or "forward" in vars(linear)
    if own and not isinstance(linear, MXLinear):
        raise LayerError(
            f"{name} is a {type(linear).__name__} with a forward of its own, which would run no more; replace it by "
            "an nn.Linear, or by a module that holds one"
        )
