"""From one optimizer step to the next: the master weights, the end of a step, and the history of FP8's scales."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import advance_scales
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.names import is_sharded, named_parameters, some


def check_master_weights(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Raise LayerError unless each Parameter that is trained or belongs to one of the layers is float32.

    FSDP2 may gather weights in another type. Of a model that it shards, the sharded ones are the master weights.
    """
    read = {id(parameter) for layer in layers for parameter in layer.parameters()}
    sharded = is_sharded(model)
    require_float32(
        (name, parameter)
        for name, parameter in named_parameters(model)
        if (parameter.requires_grad or id(parameter) in read)
        and (not sharded or hasattr(parameter, "to_local"))
    )


def require_float32(masters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise LayerError unless each of these Parameters that has a floating type is float32."""
    for name, parameter in masters:
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise LayerError(
                f"{name} is {parameter.dtype}: master weights must be float32, or small updates are lost; call "
                "model.float() before convert, and cast no weight after it; to compute in another type, use "
                "torch.autocast; weights that were cast are rounded, so load them again"
            )


def advance(model: nn.Module) -> None:
    """Close an optimizer step of a converted model: compute the next FP8 scales and drop the quantized weights.

    Call it once after each optimizer step. The caller sets the context's `step`. The first call warns of layers that
    never ran. After a skipped update, call `restart` instead.

    Raises:
        LayerError: a Parameter that is trained or converted is not float32 any more.
        StepError: the recipe draws random bits or has a schedule, and the training step before this one had the same
            number.
    """
    layers = converted(model)
    check_master_weights(model, layers.values())
    for context in {id(layer.context): layer.context for layer in layers.values()}.values():
        draws = any(layer.draws for layer in layers.values() if layer.context is context)
        silent = [name for name, own in layers.items() if own.low_precision and not own.census.ran]
        if context.close_step(draws) and silent:
            warnings.warn(
                f"converted layers that never ran in the first step: {some(silent)}; a module that reads "
                "their weights directly computes in its own precision (check_census raises an error instead)",
                stacklevel=2,
            )
    for layer in layers.values():
        layer.release_weight()
    advance_scales(layer.fp8 for layer in layers.values() if hasattr(layer, "fp8"))


def restart(model: nn.Module) -> None:
    """Discard what the current step has left in a converted model, so that the step can be repeated.

    Call it too when weights were changed by something other than an optimizer step or `load_state_dict`.
    """
    for layer in converted(model).values():
        layer.context.reopen_step()
        layer.restart()


KEYS = ("scale", "amax")
"""The tensors of a layer's history."""


def fp8_history(model: nn.Module, of_regions: bool | None = None) -> dict[str, torch.Tensor]:
    """Return the scales of delayed scaling and the amaxes of the step by name, as in `layers.0.fp8.scale`.

    The tensors are the model's own: float32 [3], for X, W and dY. `of_regions` selects what only regions of another
    recipe have used (True), or what layers have by their own recipe (False).
    """
    return {
        f"{name}.fp8.{key}": getattr(layer.fp8, key)
        for name, layer in converted(model).items()
        if hasattr(layer, "fp8") and of_regions in (None, _of_region(layer))
        for key in KEYS
    }


def _of_region(layer: MXLinear) -> bool:
    """Return whether only regions have used a layer's history: none of its own GEMMs reads it."""
    return all(gemm.scales is not layer.fp8 for gemm in layer.gemms.values())


def load_fp8_history(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], regions: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Restore what `fp8_history` returned: what layers have by their own recipe, and what only regions have used.

    A layer that has no history of regions gets one, and one that is not given is forgotten.

    Raises:
        LayerError: names that are not the model's; nothing is then changed.
    """
    regions, own, layers = regions or {}, fp8_history(model, of_regions=False), converted(model)
    possible = {f"{name}.fp8.{key}" for name in layers for key in KEYS} - own.keys()
    for what, names in (
        ("has none for", own.keys() - tensors.keys()),
        ("names", (tensors.keys() - own.keys()) | (regions.keys() - possible)),
    ):
        if names:
            raise LayerError(
                f"the saved FP8 history {what} {min(names)!r}, so it is of another model or recipe; "
                "convert the model to the recipe that was saved"
            )
    given = {**tensors, **regions}
    for name, layer in layers.items():
        if any(f"{name}.fp8.{key}" in regions for key in KEYS):
            layer.history()
        if hasattr(layer, "fp8") and _of_region(layer):
            layer.fp8.reset_parameters()
    held = fp8_history(model)
    for name, tensor in given.items():
        held[name].copy_(tensor)
