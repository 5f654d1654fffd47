"""Regions of a program in which a model computes by another recipe, or holds its quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.conversion.convert import recipe_of_layers
from mxref_torch.conversion.handle import Handle
from mxref_torch.layer.linear import converted
from mxref_torch.names import is_sharded, model_of


@contextmanager
def recipe(recipe: Recipe | str | Path, model: nn.Module | Handle) -> Iterator[None]:
    """Let all converted layers of a model compute by another recipe within a `with` statement.

    A forward pass within the region uses the recipe, and so does its backward pass, wherever it runs: wrap the
    forward pass alone, or both. With activation checkpointing, wrap both: a recomputation outside is refused.
    `use_reentrant=True` hides such a recomputation. `keep_bf16` and `layers` of this recipe apply inside the region.
    Regions may be nested. The history of FP8's scales is kept. Leave the region before the model's recipe enters
    another phase.

    Args:
        recipe: a recipe, the name of a shipped recipe, or a file.
        model: a converted model, or its handle.

    Raises:
        LayerError: a model that is not converted, a recipe with a schedule, or a width that blocks do not divide.
        UnsupportedError: the recipe asks for what the backend of the layers does not declare.
    """
    handle = model if isinstance(model, Handle) else Handle(model)
    layers = converted(handle.model)
    recipes = recipe_of_layers(layers, load_recipe(recipe), handle.context.backend, handle.context.seed)
    before = {name: (layer.recipe, layer.in_region) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.switch(recipes[name], in_region=True)
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.switch(*before[name])


@contextmanager
def weights_held(model: nn.Module | Handle) -> Iterator[None]:
    """Quantize each weight once, on entry, for all passes of training within a `with` statement.

    Wrap the micro-batches of one optimizer step, without the optimizer's own step. Outside, a layer quantizes its
    weight anew in each forward and each backward pass. The bits are the same, unless somebody writes a weight within
    the statement: passes of training compute with the weight of the entry. Forward passes without a gradient never
    use what is held. It ends early with `advance`, `restart` and `load_state_dict`. A layer whose weight is sharded,
    split or BF16 holds nothing.

    Args:
        model: a converted model, or its handle.
    """
    module = model_of(model)
    layers = () if is_sharded(module) else converted(module).values()
    held = [gemm for layer in layers for gemm in layer.hold_weight()]
    try:
        yield
    finally:
        for gemm in held:
            gemm.held = None
