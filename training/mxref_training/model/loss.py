"""The loss of a batch, and the same as compiled code computes it: logits in float32 never reach memory.

With a vocabulary of 16,384 and 16,384 tokens a step, logits in float32 take 1 GiB, and the cross-entropy of PyTorch
reads or writes that much ten times. A compiler fuses the cast into the reductions, which then read BF16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxref_training.config import Compile
from mxref_training.model.llama import Llama


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of logits float32 [B, T, V] and targets int64 [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class _Head(nn.Module):
    """The last norm, `lm_head` and the cross-entropy of a model."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.norm, self.lm_head, self.dtype = model.model.norm, model.lm_head, model.compute_dtype

    def forward(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return cross_entropy(self.lm_head(self.norm(x).to(self.dtype)).float(), targets, reduction)


class _Whole(nn.Module):
    """A model and its cross-entropy."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return cross_entropy(self.model(inputs), targets, reduction)


class CompiledLoss:
    """A model's cross-entropy; `torch.compile` compiles its parts when they first run."""

    def __init__(self, model: Llama, how: Compile) -> None:
        """Compile each decoder layer and what follows the last one, or all in one graph."""
        self._model = model
        self._part: nn.Module
        self._by_block = how is Compile.BLOCK
        if self._by_block:
            for layer in model.model.layers:
                layer.compile(fullgraph=True)
            self._part = _Head(model)
        else:
            self._part = _Whole(model)
        self._part.compile(fullgraph=True)

    def __call__(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy in nats of inputs and targets, both int64 [B, T]; a scalar in float32."""
        return self._model.through(self._loss, inputs, targets, reduction)

    def _loss(self, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        x = inputs
        if self._by_block:
            x = self._model.model(inputs, self._model.compute_dtype)
        loss: torch.Tensor = self._part(x, targets, reduction)
        return loss

    def total(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all targets in place of the mean."""
        return self(inputs, targets, "sum")


def compiled_loss(model: Llama, how: Compile) -> CompiledLoss | None:
    """Return the compiled loss of a model; None where nothing is compiled."""
    return None if how is Compile.NONE else CompiledLoss(model, how)
