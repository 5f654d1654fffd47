"""From one optimizer step to the next: the master weights, the end of a step, and the history of FP8's scales."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import FORMATS, Fp8Scales
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.names import is_sharded, named_modules, named_parameters, some


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
    layers = list(converted(model).values())
    check_master_weights(model, layers)
    for context in {id(layer.context): layer.context for layer in layers}.values():
        first = context.close_step(any(layer.draws for layer in layers if layer.context is context))
        if first and (names := _never_ran(model)):
            warnings.warn(
                f"converted layers that never ran in the first step: {some(names)}; a module that reads "
                "their weights directly computes in its own precision (check_census raises an error instead)",
                stacklevel=2,
            )
    for layer in layers:
        layer.advance()


def restart(model: nn.Module) -> None:
    """Discard what the current step has left in a converted model, so that the step can be repeated.

    Call it too when weights were changed by something other than an optimizer step or `load_state_dict`, before a
    forward pass under a step number that was trained before.
    """
    for layer in converted(model).values():
        layer.context.reopen_step()
        layer.restart()


def _never_ran(model: nn.Module) -> list[str]:
    """Return the names of the low-precision layers none of whose GEMMs ever ran."""
    return [name for name, own in converted(model).items() if own.low_precision and not own.census.ran]


KEYS = ("scale", "amax")
"""The tensors of a layer's history."""


def fp8_history(model: nn.Module, of_regions: bool | None = None) -> dict[str, torch.Tensor]:
    """Return the scales of delayed scaling and the amaxes of the step by name, as in `layers.0.fp8.scale`.

    The tensors are the model's own: float32 [3], for X, W and dY. `of_regions` selects what only regions of another
    recipe have used (True), or what layers have by their own recipe (False).
    """
    return {
        f"{name}.{key}": getattr(module, key)
        for name, module in named_modules(model)
        if isinstance(module, Fp8Scales) and module.delayed and of_regions in (None, module.of_region)
        for key in KEYS
    }


def load_fp8_history(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], regions: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Restore what `fp8_history` returned.

    Args:
        model: converted.
        tensors: the history that layers have by their own recipe.
        regions: the history that only regions have used. A layer that has none gets one, and one that is not given is
            forgotten.

    Raises:
        LayerError: names or shapes that are not the model's; nothing is then changed.
    """
    regions, own = regions or {}, fp8_history(model, of_regions=False)
    layers = {f"{name}.fp8": layer for name, layer in converted(model).items()}
    foreign = {name for name in regions if not _of_a_region(name, layers, own)}
    for what, names in (
        ("has none for", own.keys() - tensors.keys()),
        ("names", (tensors.keys() - own.keys()) | foreign),
    ):
        if names:
            raise LayerError(
                f"the saved FP8 history {what} {min(names)!r}, so it is of another model or recipe; "
                "convert the model to the recipe that was saved"
            )
    for name, tensor in (*tensors.items(), *regions.items()):
        if tensor.shape != (len(FORMATS),) or tensor.dtype != torch.float32:
            raise LayerError(
                f"the saved {name} is {tensor.dtype} {list(tensor.shape)}, and {torch.float32} {[len(FORMATS)]} is "
                "expected"
            )
    for name in regions:
        layers[name.rpartition(".")[0]].history()
    for module in model.modules():
        if isinstance(module, Fp8Scales) and module.of_region:
            module.reset_parameters()
    own = fp8_history(model)
    for name, tensor in (*tensors.items(), *regions.items()):
        own[name].copy_(tensor)


def _of_a_region(name: str, layers: Mapping[str, MXLinear], own: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a name can be of a history that only regions have used."""
    owner, _, key = name.rpartition(".")
    return owner in layers and key in KEYS and name not in own
