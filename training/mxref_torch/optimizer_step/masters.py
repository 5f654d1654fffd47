"""Master weights stay float32: in BF16 most updates are smaller than half a unit in the last place, and are lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.names import is_sharded, named_parameters


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
