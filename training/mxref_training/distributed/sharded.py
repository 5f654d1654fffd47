"""Models that are split over ranks by FSDP2 and tensor parallelism, and this rank's parts of their tensors.

PyTorch's modules of split tensors take half a second to import. Where nothing has imported them, no tensor is split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.split import check_layer, split_layer
from mxref_torch.names import named_linears
from mxref_training.config import Axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTENSOR = "torch.distributed.tensor"
_FSDP = "torch.distributed.fsdp"

OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers that ranks of a tensor-parallel group split by outputs: whole heads, and channels of the SwiGLU."""
INPUTS = ("o_proj", "down_proj")
"""Layers that they split by inputs."""


def make_mesh(device: torch.device, axes: Axes) -> DeviceMesh:
    """Return the mesh of all ranks, whose axes are named as in the configuration; collective."""
    from torch.distributed.device_mesh import init_device_mesh

    if device.type == "cuda":
        torch.cuda.set_device(device)
    return init_device_mesh(device.type, tuple(axes), mesh_dim_names=Axes._fields)


def shard(model: Any, mesh: DeviceMesh, device: torch.device, keep_gathered: bool = False) -> None:
    """Split a model over the ranks of a mesh and give it memory, without values, in place.

    Along `tensor` ranks compute layers together; along the other axes FSDP2 splits what each of them has.
    Each decoder layer is gathered while the one before it runs, and freed behind it; embedding, last norm
    and `lm_head` are gathered together. Weights, gradients and their sums over ranks are float32. Gradients are added
    over ranks, not averaged: the loss has been divided by the number of parts.

    Args:
        model: a `Llama` that was built on `meta` and converted; its layers may be compiled.
        mesh: from `make_mesh`.
        device: of this rank.
        keep_gathered: whether the layers of a forward pass are freed behind the backward pass alone.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if mesh["tensor"].size() > 1:
        split_layers(model, mesh["tensor"])
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=over, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=over)
    # Otherwise a layer is gathered only when the CPU reaches it, and a GPU that waits for the CPU also waits for that.
    for before, layer in pairwise((model, *model.model.layers)):
        before.set_modules_to_forward_prefetch([layer])
    register_fsdp_forward_method(model, "through")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Sums alone: some libraries multiply each part by a factor before they add.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.tie()
    for module in model.modules():
        if isinstance(module, Fp8Scales):
            module.reset_parameters()


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Have ranks compute the linear layers of each decoder layer together (tensor parallelism).

    Raises:
        LayerError: a rank would not get whole blocks and whole Hadamard groups.
    """
    for name, layer, axis in _split(model):
        split_layer(name, layer, axis, mesh)


def check_layers(model: Any, ranks: int) -> None:
    """Raise LayerError as `split_layers` would over so many ranks, none of which needs to exist."""
    for name, layer, axis in _split(model):
        check_layer(name, layer, axis, ranks)


def _split(model: Any) -> Iterator[tuple[str, MXLinear, int]]:
    """Yield the layers that ranks compute together: name, layer, and the axis of its weight that they split."""
    for name, layer in named_linears(model.model.layers).items():
        if (last := name.rpartition(".")[2]) in (*OUTPUTS, *INPUTS):
            assert isinstance(layer, MXLinear)  # the loop converts every linear layer
            yield f"model.layers.{name}", layer, int(last in INPUTS)


def free(model: nn.Module) -> None:
    """Free the weights that forward passes without a backward pass have left gathered; a whole model stays as it is."""
    if fsdp := sys.modules.get(_FSDP):
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


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
