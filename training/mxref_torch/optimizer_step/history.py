"""The history of FP8's scales, which is state of training and no part of a layer's state dict."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import FORMATS, Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_modules

KEYS = ("scale", "amax")
"""The tensors of a layer's history."""


def fp8_history(model: nn.Module, of_regions: bool | None = None) -> dict[str, torch.Tensor]:
    """Return the scales of delayed scaling and the amaxes of the step by name, as in `layers.0.fp8.scale`.

    The tensors are the model's own: float32 [3], for X, W and dY. Names have no wrappers in them.

    Args:
        model: converted.
        of_regions: True: only what regions of another recipe have used; False: only what layers have by their own
            recipe; None: both.
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
    layers = {f"{name}.fp8": m for name, m in named_modules(model) if isinstance(m, MXLinear)}
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
