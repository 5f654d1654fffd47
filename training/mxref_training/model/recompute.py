"""Activation checkpointing: the backward pass computes a decoder layer again in place of reading what it kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mxref_training.config import Recompute


def _kept(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep what GEMMs and attention return: they take the time, and the rest of a layer takes the memory."""
    name = str(operator)
    if name.startswith(("mxref.scaled_gemm", "mxref.dense_gemm", "aten._scaled_dot_product")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_KEPT = partial(create_selective_checkpoint_contexts, _kept)


def through(layer: nn.Module, how: Recompute, *inputs: Any) -> Tensor:
    """Return what a layer returns; in training, the backward pass computes again what `how` says.

    No layer draws from PyTorch's generators, so their states are not kept.
    """
    if how is Recompute.NONE or not torch.is_grad_enabled():
        y: Tensor = layer(*inputs)
        return y
    contexts = _KEPT if how is Recompute.SELECTIVE else noop_context_fn
    y = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return y
