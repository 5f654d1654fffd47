"""Check that linear layers can be replaced: each must run the forward method of `nn.Linear`, and all that reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_modules, plain_class

_READERS: tuple[tuple[str, str], ...] = (
    (
        "MultiheadAttention",
        "multiplies with the weights of its out_proj and in_proj itself: converted layers would never run; build the "
        "attention of nn.Linear layers and torch.nn.functional.scaled_dot_product_attention, or leave its layers out "
        "by filter_fn",
    ),
    (
        "TransformerEncoderLayer",
        "has a fast path in evaluation that reads the weights of linear1 and linear2 itself: evaluation would run in "
        "another precision; call torch.backends.mha.set_fastpath_enabled(False) before convert, or leave its layers "
        "out by filter_fn",
    ),
    (
        "LinearCrossEntropyLoss",
        "multiplies with the weight of its linear layer itself: a converted layer would never run; use an nn.Linear "
        "and nn.CrossEntropyLoss, or leave the layer out by filter_fn",
    ),
)
"""Modules of torch.nn that read the weight of an inner linear layer directly, and what to do."""


def check_replaceable(model: nn.Module, chosen: Mapping[str, nn.Linear]) -> None:
    """Raise LayerError where a converted layer would not compute what the layer computed, naming the module.

    Args:
        model: the whole model.
        chosen: the layers to convert, by their names.
    """
    layers = set(chosen.values())
    for reader, why in _READERS:
        for name, module in named_modules(model):
            if (
                isinstance(module, getattr(nn, reader, ()))
                and layers & set(module.children())
                and _reads(module)
            ):
                raise LayerError(f"{name or 'the model'} is an nn.{reader}, which {why}")
    for name, module in named_modules(model):
        for child_name, child in module._modules.items():
            if child_name == "_orig_mod" and child in layers:
                raise LayerError(
                    f"{name} is a linear layer that was compiled by itself, and would go on running its compiled "
                    "code; call convert first, then torch.compile"
                )
        if module in layers:
            _check_linear(name, module)


def _reads(module: nn.Module) -> bool:
    """Return whether a module of `_READERS` reads weights as things are set now."""
    return not isinstance(module, nn.TransformerEncoderLayer) or torch.backends.mha.get_fastpath_enabled()


def check_sole_readers(model: nn.Module, chosen: Mapping[str, nn.Linear], low: Collection[str]) -> None:
    """Raise LayerError where a module reads a weight in one precision, and a low-precision layer the same weight.

    Args:
        model: the whole model.
        chosen: the layers to convert, by their names.
        low: names of those that compute in low precision.
    """
    same = {id(chosen[name]) for name in low}
    readers = {id(chosen[name].weight): name for name in low}
    for name, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if id(parameter) in readers and id(module) not in same:
                low_name = readers[id(parameter)]
                raise LayerError(
                    f"{low_name} shares its weight with {name}.{key}, which reads it in full precision: the two would "
                    f"compute with different values; add {low_name!r} to keep_bf16, leave it out by filter_fn, or "
                    "untie the weights"
                )


def _check_linear(name: str, linear: nn.Module) -> None:
    """Raise LayerError unless the layer is a plain one with a weight of its own."""
    weight = linear._parameters.get("weight")
    if weight is None:
        raise LayerError(
            f"{name}: its weight is computed from other Parameters (a parametrization or pruning), which would no "
            "longer be computed; remove it first, as torch.nn.utils.parametrize.remove_parametrizations does"
        )
    if is_lazy(weight):
        raise LayerError(f"{name} is a lazy layer without a shape yet; run the model once before convert")
    if hasattr(weight, "to_local"):
        raise LayerError(
            f"{name}: its weight is sharded already, so the converted layer would not get the whole weight; "
            "call convert first, then fully_shard"
        )
    plain = plain_class(linear)
    own = plain is None or type(linear).forward is not plain.forward or "forward" in vars(linear)
    if own and not isinstance(linear, MXLinear):
        raise LayerError(
            f"{name} is a {type(linear).__name__} with a forward of its own, which would no longer run; replace it "
            "by an nn.Linear, or by a module that holds one"
        )
