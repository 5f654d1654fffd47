"""Which linear layers of a model are converted, whether each can be, and how much of the model they are.

The share of a model that a recipe reaches is counted in the matrices of its blocks. A block is what a number in a name
tells apart, as in `layers.3.mlp.up.weight`; a model without numbers is one block. A matrix is a Parameter with two or
more dimensions longer than 1, experts and convolutions too, but no embedding and no bias, because no GEMM reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mxref.recipe import Recipe
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import width_units
from mxref_torch.names import named_linears, named_modules, named_parameters, plain_class, some, widths
from mxref_torch.operators import block_format

Filter = Callable[[nn.Module, str], bool] | Sequence[str] | str | None
"""A function of a linear module and its name, a glob over names, a list of globs, or None for all layers."""


def chosen_linears(linears: Mapping[str, nn.Linear], filter_fn: Filter) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that a filter of `convert` chooses, in their order; LayerError if none."""
    if filter_fn is None:
        return dict(linears)
    first = f"the first linear layer is named {next(iter(linears))!r}"
    if callable(filter_fn):
        chosen = {name: linear for name, linear in linears.items() if filter_fn(linear, name)}
        if not chosen:
            raise LayerError(f"filter_fn chose none of {len(linears)} linear layers; {first}")
        return chosen
    globs = [filter_fn] if isinstance(filter_fn, str) else filter_fn
    if not isinstance(globs, Sequence) or not globs or not all(isinstance(glob, str) for glob in globs):
        raise LayerError(f"filter_fn is a function, a glob or a list of globs, got {filter_fn!r}; {first}")
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in linears):
            raise LayerError(f"filter_fn: {glob!r} matches no linear layer; {first}")
    return {name: own for name, own in linears.items() if any(fnmatchcase(name, glob) for glob in globs)}


_READERS = {
    "MultiheadAttention": "multiplies with the weights of its out_proj and in_proj itself: converted layers would "
    "never run; build the attention of nn.Linear layers and torch.nn.functional.scaled_dot_product_attention, or leave "
    "its layers out by filter_fn",
    "TransformerEncoderLayer": "has a fast path in evaluation that reads the weights of linear1 and linear2 itself: "
    "evaluation would run in another precision; call torch.backends.mha.set_fastpath_enabled(False) before convert, or "
    "leave its layers out by filter_fn",
    "LinearCrossEntropyLoss": "multiplies with the weight of its linear layer itself: a converted layer would never "
    "run; use an nn.Linear and nn.CrossEntropyLoss, or leave the layer out by filter_fn",
}
"""Modules of torch.nn that read the weight of an inner linear layer directly, and what to do."""


def check_replaceable(model: nn.Module, chosen: Mapping[str, nn.Linear]) -> None:
    """Raise LayerError where a converted layer would not compute what the layer computed, naming the module."""
    layers = set(chosen.values())
    for reader, why in _READERS.items():
        for name, module in named_modules(model):
            # The encoder reads weights on its fast path alone.
            fast = reader != "TransformerEncoderLayer" or torch.backends.mha.get_fastpath_enabled()
            if isinstance(module, getattr(nn, reader, ())) and layers & set(module.children()) and fast:
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


def check_sole_readers(model: nn.Module, chosen: Mapping[str, nn.Linear], low: Collection[str]) -> None:
    """Raise LayerError where a chosen layer of low precision shares its weight with another module."""
    readers = {chosen[name].weight: name for name in low}
    same = {chosen[name] for name in low}
    for name, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter in readers and module not in same:
                low_name = readers[parameter]
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


def check_widths(name: str, linear: nn.Linear, recipe: Recipe) -> None:
    """Raise LayerError unless the layer's widths hold whole blocks."""
    for axis, unit, role, spec in width_units(recipe):
        if (width := widths(linear)[axis]) % unit:
            raise LayerError(
                f"{name}: {('out_features', 'in_features')[axis]} = {width} is not a multiple of {unit}, which "
                f"{role.value} needs (k = {block_format(spec).k}, Hadamard size {spec.hadamard or 'none'}, block "
                f"{spec.block}); add {name!r} to keep_bf16 or change the width"
            )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def starred(name: str) -> str:
    """Return a name with a star for each number in it."""
    return _NUMBER.sub("*", name)


def grouped(names: Iterable[str]) -> str:
    """Return names in a line; those that differ in numbers alone are one, with how many they are."""
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(starred(name), []).append(name)
    return some([f"{row} (x{len(alike)})" if len(alike) > 1 else alike[0] for row, alike in rows.items()])


class Coverage:
    """The matrices of a model's blocks, as the model is now."""

    def __init__(self, model: nn.Module) -> None:
        self.linears = named_linears(model)
        modules, found = dict(named_modules(model)), {}
        for name, parameter in named_parameters(model):
            is_matrix = sum(size > 1 for size in parameter.shape) >= 2 and not name.endswith("bias")
            if is_matrix and not isinstance(modules[name.rpartition(".")[0]], nn.Embedding | nn.EmbeddingBag):
                found[name] = parameter.numel()
        self.sizes = {name: size for name, size in found.items() if _NUMBER.search(name)} or found
        """Elements of each matrix, by the name of its Parameter."""
        self._layers = {f"{name}.weight".lstrip("."): name for name in self.linears}

    @property
    def others(self) -> list[str]:
        """Names of the matrices that no linear layer holds, which `convert` therefore cannot reach."""
        return [name for name in self.sizes if name not in self._layers]

    def share(self, layers: Collection[str]) -> float:
        """Return the share of all elements, in per cent, that is in the weights of these linear layers."""
        within = sum(size for name, size in self.sizes.items() if self._layers.get(name) in layers)
        return 100 * within / max(1, sum(self.sizes.values()))
