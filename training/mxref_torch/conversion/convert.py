"""Convert a model: its linear layers are replaced by ones that compute by a recipe; and regions of another recipe.

`convert`, `recipe` and `weights_held` are doors for users. All that can be wrong with a model, a recipe and a backend
is checked here, before a layer is touched; a layer checks its inputs alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mxref.backend import Backend
from mxref.discovery import choose, get_backend
from mxref.errors import BackendError, UnsupportedError
from mxref.placement import Placement
from mxref.recipe import BF16_RECIPE, OperandSource, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.random import Stream
from mxref_torch import operators
from mxref_torch.conversion.candidates import (
    Coverage,
    Filter,
    check_replaceable,
    check_sole_readers,
    check_widths,
    chosen_linears,
    grouped,
)
from mxref_torch.conversion.handle import Handle, keep_plain
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.names import is_sharded, model_of, named_linears, replace_modules
from mxref_torch.optimizer_step import check_master_weights
from mxref_torch.step_context import RecipeSchedule, StepContext, recipe_by_layer


def convert(
    model: nn.Module,
    recipe: Recipe | str | Path,
    *,
    filter_fn: Filter = None,
    backend: Backend | str | None = None,
    seed: int = 0,
    steps: int | None = None,
    layer_class: type[MXLinear] = MXLinear,
) -> Handle:
    """Replace the `nn.Linear` modules of a model by MXLinear that hold the same Parameters, in place.

    So it does with the `Conv1D` of Transformers. Weights that other modules hold, such as stacked experts, stay in
    their own precision, and a warning names them. A layer whose name matches a glob of `recipe.keep_bf16` gets BF16
    GEMMs. A layer's index in the random streams is its index among all linear modules in definition order, kept or not.

    Convert before `fully_shard`. A converted model can be converted again; FP8's history then starts anew. The layers
    of a copy use a copy of the context: `Handle(copy)` is its handle. A recipe with a schedule is followed: setting
    the step gives every layer its recipe at that step.

    Let the handle `follow` the optimizer, or call its `advance` after each optimizer step. Only these report layers
    that never ran. In a compiled or sharded model, and where weights change through `.data`, only `advance` notices a
    `step` that was not increased.

    Args:
        model: holds float32 Parameters; a frozen one outside the chosen layers may have another type.
        recipe: the treatment of the three GEMMs; or the name of a shipped recipe, or a file.
        filter_fn: which layers to replace: a glob over their names, a list of globs, or a function of a module and its
            name that returns True for them; default all. The others stay as they are, in their own precision.
        backend: computes the block formats; or its name; default that of `mxref.discovery.choose` for the device
            on which the model's first weight lies.
        seed: of the random bits, 0 to 2^64 - 1.
        steps: optimizer steps of the run, of which a schedule may name shares.
        layer_class: class of the new layers, for a framework whose modules follow a protocol of its own.

    Raises:
        LayerError: a Parameter that is not float32, a width that blocks do not divide, a glob or filter that matches
            nothing, a low-precision weight that another module reads too, a layer that would not run as converted, or
            no matrix of the model's blocks in the layers that the recipe quantizes; the model is then unchanged.
        RecipeError: a schedule that does not fit `steps`.
        UnsupportedError: the recipe asks for what the backend does not declare.
    """
    recipe = load_recipe(recipe)
    linears = named_linears(model)
    backend = require_backend(choose(device=_device(linears.values()))[0] if backend is None else backend)
    if not linears or isinstance(model, nn.Linear):
        way_out = "; put it into a module, as in nn.Sequential(layer)" if linears else ""
        raise LayerError(
            f"convert replaces the linear layers inside a module, and this {type(model).__name__} has none "
            f"inside{way_out}"
        )
    chosen = chosen_linears(linears, filter_fn)
    check_master_weights(model, chosen.values())
    check_replaceable(model, chosen)
    schedule = RecipeSchedule(recipe, linears, steps)
    _check_fit(schedule.recipes, recipe, chosen, backend, seed)
    for recipes in schedule.recipes:
        check_sole_readers(model, chosen, {name for name in chosen if recipes[name] is not BF16_RECIPE})
    low = {name for name in chosen if _quantizes(recipes[name] for recipes in schedule.recipes)}
    _report_coverage(Coverage(model), recipe, low, filter_fn is not None)
    context = StepContext(backend, seed, schedule=schedule)
    replacements: dict[nn.Module, MXLinear] = {}
    for index, (name, linear) in enumerate(linears.items()):
        if name in chosen:
            replacements[linear] = layer_class(linear, schedule.recipes[0][name], context, index)
            keep_plain(replacements[linear], linear, name)
            replacements[linear].census.name = name
    replace_modules(model, replacements)
    return Handle(model)


def _quantizes(recipes: Iterable[Recipe]) -> bool:
    """Return whether a GEMM of one of these recipes has an operand of low precision."""
    return any(recipe.kind(role) != "bf16" for recipe in recipes for role in GemmRole)


def _report_coverage(coverage: Coverage, recipe: Recipe, low: Collection[str], filtered: bool) -> None:
    """Warn of matrices that are in no linear layer; LayerError if those of low precision are none, or in no block."""
    share, others = coverage.share(low), coverage.others
    if _quantizes(recipe.treatments()) and not (low if filtered else share or not coverage.sizes):
        reasons = [f"{grouped(others)}: in no nn.Linear"] if others else []
        kept = [name for name in coverage.linears if name not in low]
        reasons += [f"{grouped(kept)}: kept in BF16 by the recipe, or left out by filter_fn"] if kept else []
        raise LayerError(
            f"the recipe would quantize no matrix of the model's blocks ({'; '.join(reasons)}); build the blocks of "
            "nn.Linear, change keep_bf16, or choose layers outside the blocks by filter_fn"
        )
    if others:
        warnings.warn(
            f"the recipe quantizes {share:.1f} % of the weights in the matrices of the model's blocks. These "
            f"parameters are in no nn.Linear and stay in their own precision: {grouped(others)}",
            stacklevel=3,  # of the caller of `convert`
        )


def recipe_of_layers(
    linears: Mapping[str, nn.Linear], recipe: Recipe, backend: Backend, seed: int
) -> dict[str, Recipe]:
    """Return the recipe of each layer by its name, for a recipe without a schedule, after the checks of `recipe`."""
    spans = recipe.spans(None)
    if len(spans) > 1:
        raise LayerError(
            f"a recipe with a schedule has {len(spans)} phases, and a region has one recipe; give one without a "
            "schedule"
        )
    recipes = recipe_by_layer(spans[0].recipe, linears)
    _check_fit((recipes,), recipe, linears, backend, seed)
    return recipes


def _check_fit(
    phases: Iterable[Mapping[str, Recipe]],
    recipe: Recipe,
    linears: Mapping[str, nn.Linear],
    backend: Backend,
    seed: int,
) -> None:
    """Check that a backend computes a recipe, and that layers have the widths that it needs in each phase."""
    for treatment in recipe.treatments():
        require_supported(backend, treatment, seed)
    for recipes in phases:
        for name, linear in linears.items():
            check_widths(name, linear, recipes[name])


def _device(linears: Iterable[nn.Linear]) -> str:
    """Return the type of the device on which layers compute; those without memory get it where a GPU is, if one is."""
    found = next((linear.weight.device.type for linear in linears), "cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if found == "meta" else found


def require_backend(backend: Any) -> Backend:
    """Return a backend, or that of a name; BackendError for anything else."""
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise BackendError(f"expected a backend or its name, got {type(backend).__name__}")
    return get_backend(backend)


def require_supported(backend: Backend, recipe: Recipe, seed: int = 0) -> None:
    """Raise UnsupportedError unless a backend declares every block format and GEMM that a recipe asks for."""
    for role in GemmRole:
        if recipe.source(role) is OperandSource.FPROP:
            backend.capabilities.require(backend.name, "dequantize_dtypes", "float32")
        if recipe.kind(role) != "block":
            continue
        a, b = (operators.block_format(spec) for spec in recipe.operands(role))
        profiles = backend.capabilities.profiles(a, b)
        if profiles and recipe.gemm not in profiles:
            raise UnsupportedError(
                f"backend {backend.name!r} does not declare {recipe.gemm} of {operators.formats_text(a, b)} in gemms, "
                f"which {role.value} needs; set gemm = {min(profiles).value!r} in the recipe, or choose another backend"
            )
        backend.capabilities.require(backend.name, "gemms", (recipe.gemm, a, b))
        for operand, spec in zip(OPERANDS[role], recipe.operands(role), strict=True):
            unit = operators.block_unit(spec)
            source = torch.empty((unit, unit), device="meta")
            amax = None
            if operators.block_format(spec).tensor_scale:
                amax = backend.from_numpy(np.zeros(1, np.float32))  # there are no values
            placement = Placement(Stream(seed, 0, 0, operand.id), amax=amax)
            backend.plan(source, spec, axis=operand.axis, placement=placement)


@contextmanager
def recipe(recipe: Recipe | str | Path, model: nn.Module | Handle) -> Iterator[None]:
    """Let all converted layers of a model compute by another recipe within a `with` statement.

    A forward pass within the region uses the recipe, and so does its backward pass, wherever it runs. With activation
    checkpointing, wrap both: a recomputation outside is refused, and `use_reentrant=True` hides it. `keep_bf16` and
    `layers` of this recipe apply inside the region. Regions may be nested. The history of FP8's scales is kept. Leave
    the region before the model's recipe enters another phase.

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
