"""What a step needs from the other ranks that take it. A single process needs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Survey(NamedTuple):
    """The outcome of a step over all ranks: tensors on the device, the same on every rank."""

    losses: Tensor
    """Losses of all parts of the batch, in their order, float32."""
    norm: Tensor
    """Norm of all gradients; its values are float32 numbers. Clipping computes in its type."""
    last: Tensor
    """The largest index of a gradient that is not finite, else -1."""
    exceeded: Tensor
    """Whether an operand left the range of the backend's fast GEMM on any rank."""


class Team:
    """The ranks that take a step together; this class is for a single process.

    A subclass adds over ranks. Its methods run inside a CUDA graph, so they may not wait for the device, and they are
    called on every rank in the same order.
    """

    index = 0
    """Number of this rank's part of each micro-batch."""
    parts = 1
    """How many parts a micro-batch has."""

    def own(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that lies on this rank."""
        return tensor

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Run a backward pass in the block; after that of the last micro-batch, each gradient is the sum over ranks."""
        yield

    def survey(self, losses: Tensor, gradients: list[Tensor], exceeded: Tensor) -> Survey:
        """Return the outcome of the step.

        Args:
            losses: of this rank's parts, float32.
            gradients: of the parameters, in their order.
            exceeded: whether an operand of this rank left the range.
        """
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        return Survey(losses, norm, last_nonfinite(norms), exceeded)

    def share_scales(self, model: nn.Module) -> None:
        """Set FP8's history on every rank to the largest magnitudes of all ranks."""


def last_nonfinite(norms: Tensor) -> Tensor:
    """Return the largest index of a norm that is not finite; -1 where all are."""
    places = torch.arange(len(norms), device=norms.device)
    return torch.where(torch.isfinite(norms), -1, places).max()


ALONE = Team()
"""A process alone."""
