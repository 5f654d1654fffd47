"""The history of FP8's scales, which is state of training and no part of a layer's state dict."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.names import named_modules


def fp8_history(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the scales of delayed scaling and the amaxes of the step by name, as in `layers.0.fp8.scale`.

    The tensors are the model's own: float32 [3], for X, W and dY. Names have no wrappers in them.
    """
    return {
        f"{name}.{key}": getattr(module, key)
        for name, module in named_modules(model)
        if isinstance(module, Fp8Scales) and module.delayed
        for key in ("scale", "amax")
    }


def load_fp8_history(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set what `fp8_history` returned; LayerError, and nothing is changed, unless the names are the model's."""
    own = fp8_history(model)
    if own.keys() != tensors.keys():
        for what, names in (
            ("has none for", own.keys() - tensors.keys()),
            ("names", tensors.keys() - own.keys()),
        ):
            if names:
                raise LayerError(
                    f"the saved FP8 history {what} {min(names)!r}, so it is of another model or recipe; "
                    "convert the model to the recipe that was saved"
                )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise LayerError(
                f"the saved {name} is {tensor.dtype} {list(tensor.shape)}, and "
                f"{own[name].dtype} {list(own[name].shape)} is expected"
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
