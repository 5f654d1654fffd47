"""Tensors that are split over ranks: this rank's part of one, and its values out of whole ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank: all of it unless it is split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Copy values into a tensor; into a split one those of this rank's part, without a word to other ranks.

    Args:
        tensor: any device and type.
        whole: the values of the whole tensor, the same on every rank.
    """
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    own_part(tensor).copy_(whole)
