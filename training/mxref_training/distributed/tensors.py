"""Tensors that are split over ranks: this rank's part of a tensor, and the part of a whole one that belongs to it.

PyTorch's module of split tensors takes half a second to import. Where nothing has imported it, no tensor is split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

_DTENSOR = "torch.distributed.tensor"


def is_split(tensor: Any) -> TypeGuard[Any]:
    """Return whether a tensor is a DTensor, of which each rank has a part."""
    module = sys.modules.get(_DTENSOR)
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank: all of it unless it is split."""
    if not is_split(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as a split tensor has it, without communication."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    assert is_split(like)
    mesh = like.device_mesh
    # An axis of the mesh that split a tensor after the others, as FSDP does, is strided, wherever it stands.
    order = sorted(enumerate(like.placements), key=lambda item: isinstance(item[1], _StridedShard))
    for axis, placement in order:
        if isinstance(placement, Shard | _StridedShard):
            dim, coordinate = placement.dim, mesh.get_coordinate()[axis]
            chunks = whole.chunk(mesh.size(axis), dim)
            whole = chunks[coordinate] if coordinate < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Copy values into a tensor; into a split one those of this rank's part.

    Args:
        tensor: any device and type.
        whole: the values of the whole tensor, the same on every rank.
    """
    own_part(tensor).copy_(part_of(whole, tensor) if is_split(tensor) else whole)


def copies(tensor: Tensor, ranks: int) -> int:
    """Return how many of so many ranks hold each element of a tensor: all of them where it is not split."""
    if not is_split(tensor):
        return ranks
    mesh = tensor.device_mesh
    found: int = ranks // mesh.size()
    for axis, placement in enumerate(tensor.placements):
        found *= mesh.size(axis) if placement.is_replicate() else 1
    return found


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in lists of those that are split over the same mesh, which one kernel can update together."""
    lists: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.device_mesh if is_split(tensor) else None, []).append(tensor)
    return list(lists.values())
