"""Checkpoints of a model that is split over ranks, as one process writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.tensors import part_of

Groups = Mapping[str, Mapping[str, Tensor]]
"""The tensors of a checkpoint by group and name."""


@torch.no_grad()
def gathered(groups: Groups, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Return tensors as the first rank saves them: split ones whole, on the CPU; collective, nothing on others."""
    found: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
            if ranks.first:
                found[group][name] = whole
    return found


def split_like(groups: Groups, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return whole tensors, each split as the weight of its name is, or as the weight it belongs to."""
    like = {name: p for name, p in model.state_dict().items() if isinstance(p, DTensor)}

    def split(name: str, tensor: Tensor) -> Tensor:
        weight = like.get(name.partition("/")[2] or name)
        if weight is None or tensor.shape != weight.shape:
            return tensor
        part = part_of(tensor, weight).contiguous().to(weight.device)  # fused AdamW reads no strides
        return DTensor.from_local(
            part, weight.device_mesh, weight.placements, shape=tensor.shape, stride=tensor.stride()
        )

    return {
        group: {name: split(name, tensor) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }
