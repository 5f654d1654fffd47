"""Converted models of torchtitan follow its optimizers: the step moves on, and with it the random bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchtitan.distributed import ParallelDims

from mxref_torch.conversion.handle import Handle, converted
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.optimizer_step.history import fp8_history

RECIPE = "mxref_recipe"
"""The attribute of a converted model that holds the digest of its recipe, with layers and schedule."""


def follow(
    optimizers: Iterable[Optimizer], model_parts: Sequence[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Let each converted part of a model follow its optimizers; a `post_optimizer_build_fn` of torchtitan.

    A configuration that `MXLinearConverter` made calls it by itself. The handle of a part is its `mxref_handle`.

    Args:
        optimizers: torchtitan's container.
        model_parts: the stages of the pipeline on this rank, or the whole model.
        parallel_dims: says which ranks have tokens of their own.

    Raises:
        LayerError: a converted lm_head under a loss in chunks, or an error of `Handle.follow`.
    """
    mesh = parallel_dims.get_optional_mesh("loss")
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    known = list(optimizers)
    for part in model_parts:
        if not converted(part):
            continue  # a stage of embeddings alone
        _check_loss(part)
        held = {id(parameter) for parameter in part.parameters()}
        own = [
            one for one in known if any(id(p) in held for group in one.param_groups for p in group["params"])
        ]
        handle = Handle(part)
        if mesh is not None:
            own[0].register_step_pre_hook(partial(_reduce_amaxes, part, mesh.get_group()))
        handle.follow(*own, rank=rank, ranks=ranks)
        vars(part)["mxref_handle"] = handle


@torch.no_grad()
def _reduce_amaxes(part: nn.Module, group: dist.ProcessGroup, *_: Any) -> None:
    """Take the largest amax of FP8's tensors over the ranks before a step is closed, so that all have the same scales.

    It is the first of a part's optimizers that closes the step, so this is a hook of that one.
    """
    amaxes = [tensor for name, tensor in fp8_history(part).items() if name.endswith(".amax")]
    if amaxes:
        largest = torch.stack(amaxes)  # [layers, 3]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(amaxes, list(largest.unbind()))


def handles(model_parts: Iterable[nn.Module]) -> list[Handle]:
    """Return the handles that `follow` made for the parts of a model."""
    return [vars(part)["mxref_handle"] for part in model_parts if "mxref_handle" in vars(part)]


def _check_loss(part: Any) -> None:
    if getattr(part, "_skip_lm_head", False) and isinstance(part.lm_head, MXLinear):
        raise LayerError(
            "lm_head is converted, and ChunkedLossWrapper would run it several times in a forward pass with the same "
            "random bits; add 'lm_head' to filter_fqns, or set loss to CrossEntropyLoss.Config"
        )
