"""The census: the GEMMs that ran in a step, held to those that the recipe asks for, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_linears, some
from mxref_torch.step_context import StepContext, recipe_by_layer


def expected_census(
    model: nn.Module,
    recipe: Recipe | str | Path,
    micro_batches: int = 1,
    *,
    without_dgrad: Collection[str] = (),
    calls: Mapping[str, int] = MappingProxyType({}),
    layers: Collection[str] | None = None,
) -> operators.Census:
    """Return the GEMMs that forward and backward of one optimizer step run, by role and formats.

    It follows from module names and the recipe alone, not from what `convert` made of them. GEMMs that
    activation checkpointing recomputes are not counted.

    Args:
        model: converted or not.
        recipe: the treatment of the three GEMMs; of one with a schedule, `recipe.at(step, steps)`.
        micro_batches: forward and backward passes of the step.
        without_dgrad: names of layers whose input needs no gradient, such as a first layer fed with data;
            Dgrad is not run for them. (In a language model the embedding needs gradients, so there is none.)
        calls: how often a layer runs in one forward pass, by its first name, for those that do not run once:
            a block that several depths share runs at each of them.
        layers: names of the layers that `filter_fn` chose; default all.

    Raises:
        LayerError: a name in `without_dgrad`, `calls` or `layers` that is no linear layer; a recipe that does not fit.
    """
    return sum(_by_layer(model, recipe, micro_batches, without_dgrad, calls, layers).values(), Counter())


def _by_layer(
    model: nn.Module,
    recipe: Recipe | str | Path,
    micro_batches: int,
    without_dgrad: Collection[str],
    calls: Mapping[str, int],
    layers: Collection[str] | None,
) -> dict[str, operators.Census]:
    """Return the GEMMs that each layer runs, by its name; arguments and errors as in `expected_census`."""
    linears = named_linears(model)
    recipes = recipe_by_layer(load_recipe(recipe), linears)
    for what, names in (("without_dgrad", without_dgrad), ("calls", calls), ("layers", layers or ())):
        for name in names:
            if name not in linears:
                first = next(iter(linears), "")
                raise LayerError(f"{what}: no linear layer is named {name!r}; the first is named {first!r}")
    expected: dict[str, operators.Census] = {}
    for name in linears if layers is None else layers:
        never = {
            GemmRole.DGRAD: name in without_dgrad,
            GemmRole.WGRAD: not linears[name].weight.requires_grad,
        }
        times = micro_batches * calls.get(name, 1)
        expected[name] = Counter(
            {(role, *recipes[name].formats(role)): times for role in GemmRole if not never.get(role)}
        )
    return expected


def check_census(
    context: Any,
    model: nn.Module,
    recipe: Recipe | str | Path,
    micro_batches: int = 1,
    *,
    without_dgrad: Collection[str] = (),
    calls: Mapping[str, int] = MappingProxyType({}),
    layers: Collection[str] | None = None,
) -> None:
    """Raise LayerError unless exactly the GEMMs of one optimizer step ran since the census was reset.

    The message names every role and format that differs, and the layers. `context` is the handle that `convert`
    returned, or its context; the other arguments are as in `expected_census`, and `layers` are those of the handle.
    """
    if layers is None and not isinstance(context, StepContext):
        # A part of the handle's model has other names.
        own: tuple[str, ...] = getattr(context, "layers", ())
        layers = own if own and set(own) <= set(named_linears(model)) else None
    context = getattr(context, "context", context)
    if not isinstance(context, StepContext):
        raise LayerError(f"expected the handle that convert returned, got {type(context).__name__}")
    by_layer = _by_layer(model, recipe, micro_batches, without_dgrad, calls, layers)
    ran, expected = context.census, sum(by_layer.values(), Counter())
    differing = [
        f"{operators.gemm_text(gemm)}: {ran[gemm]} ran, {expected[gemm]} expected"
        for gemm in operators.in_order({*ran, *expected})
        if ran[gemm] != expected[gemm]
    ]
    counts = f" ({'; '.join(differing)})" if differing else ""
    listed = _differing_layers(model, by_layer)
    if counts or listed:
        raise LayerError(
            f"the GEMMs that ran are not the recipe's{counts}{listed}: a layer that convert has not replaced, or "
            "whose forward is bypassed, runs in another precision; a layer that does not run exactly once in a "
            "forward pass must be named in `calls`"
        )


def _differing_layers(model: nn.Module, expected: Mapping[str, operators.Census]) -> str:
    """Return which layers are not converted, never ran, or ran other GEMMs than expected, as part of a sentence."""
    found: dict[str, list[str]] = {"not converted": [], "never ran": [], "ran other GEMMs": []}
    for name, linear in named_linears(model).items():
        if name not in expected:
            continue
        if not isinstance(linear, MXLinear):
            found["not converted"].append(name)
        elif +linear.census != +expected[name]:
            found["ran other GEMMs" if linear.census else "never ran"].append(name)
    return "".join(f"; {what}: {some(names)}" for what, names in found.items() if names)
