"""A region of a program in which a model computes by another recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.conversion import recipe_of_layers
from mxref_torch.handle import Handle, converted


@contextmanager
def recipe(recipe: Recipe | str | Path, model: nn.Module | Handle) -> Iterator[None]:
    """Let all converted layers of a model compute by another recipe within a `with` statement.

    A forward pass within the region uses the recipe, and so does its backward pass, wherever it runs: wrap the
    forward pass alone, or both. With activation checkpointing, wrap both: a
    recomputation outside is refused, but `use_reentrant=True` hides it. `keep_bf16` of this recipe says which
    layers compute in BF16 meanwhile. Regions may be nested. FP8's history lives on between regions.

    Args:
        recipe: a recipe, the name of a shipped recipe, or a file.
        model: a converted model, or its handle.

    Raises:
        LayerError: a model that is not converted, or a width that blocks do not divide.
        UnsupportedError: the recipe asks for what the backend of the layers does not declare.
    """
    handle = model if isinstance(model, Handle) else Handle(model)
    layers = converted(handle.model)
    context = handle.context
    recipes = recipe_of_layers(layers, load_recipe(recipe), context.backend, context.seed)
    before = {name: layer.recipe for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.switch(recipes[name])
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.switch(before[name])
