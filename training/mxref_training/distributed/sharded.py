"""Splits a model that was built without memory over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from mxref_torch.layer.fp8 import Fp8Scales
from mxref_training.config import TrainConfig
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.share import check_layout
from mxref_training.parallel import LAYOUT, Axes


def make_mesh(device: torch.device, axes: Axes) -> DeviceMesh:
    """Return the mesh of all ranks, whose axes are named as in the configuration; collective."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return init_device_mesh(device.type, tuple(axes), mesh_dim_names=Axes._fields)


def shard(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Split a model over the ranks of a mesh by FSDP2 and give it memory, without values, in place.

    Each decoder layer is gathered when its forward or backward pass begins and freed behind it; embedding, last norm
    and `lm_head` are gathered together. Weights, gradients and their sums over ranks are float32. Gradients are added
    over ranks, not averaged: the loss has been divided by the number of parts.

    Args:
        model: a `Llama` that was built on `meta` and converted; its layers may be compiled.
        mesh: from `make_mesh`.
        device: of this rank.
    """
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
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


def free(model: nn.Module) -> None:
    """Free the weights that forward passes without a backward pass have left gathered; a whole model stays as it is."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def identity(config: TrainConfig, ranks: Ranks) -> dict[str, Any]:
    """Return what the layout of ranks adds to the identity of a run: one process has none.

    Another layout adds in another order, so a resumed run has the bits of one that never stopped only under the same.
    """
    axes = check_layout(config, ranks.world)
    return {LAYOUT: axes._asdict()} if ranks.several else {}
