"""Evaluates a model without changing its training; on a GPU the second evaluation becomes one CUDA graph.

Small models wait for Python in every operator of a forward pass. The graph reads weights and FP8 scales where they lie,
and the step from the device, so each replay evaluates the current weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import mxref_torch
from mxref_torch.captured.operations import capturing
from mxref_training.data import sequential_batches
from mxref_training.distributed.share import ALONE, Share, added
from mxref_training.model.loss import cross_entropy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LossSum = Callable[[Tensor, Tensor], Tensor]
"""Returns the sum of the losses of inputs and targets, both int64 [B, T]."""


@dataclass(frozen=True)
class Evaluation:
    """A validation loss."""

    loss: float
    """Mean cross-entropy in nats per token, which the literature also calls log-perplexity."""
    tokens: int
    """Tokens predicted."""

    @property
    def perplexity(self) -> float:
        """The loss exponentiated; infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@contextmanager
def undisturbed(model: nn.Module, context: mxref_torch.StepContext) -> Iterator[None]:
    """Run the block in evaluation mode without gradients, and restore all state after it.

    Mode, position in the random streams, GEMM census, PyTorch's generator and every buffer (FP8 scales and
    amax among them) are as before afterwards.
    """
    was_training = model.training
    place = context.token_origin, context.global_tokens
    counted = context.counted()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(was_training)
        context.token_origin, context.global_tokens = place
        context.set_counted(counted)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def evaluate(
    model: nn.Module,
    context: mxref_torch.StepContext,
    tokens: NDArray[np.integer[Any]],
    *,
    seq_len: int,
    batch: int,
    limit: int,
    loss_sum: LossSum | None = None,
    share: Share = ALONE,
) -> Evaluation:
    """Return the loss on the first validation tokens, in order, under the recipe's own Fprop.

    Production evaluates with the GEMMs that it trains with, and so does this. Ranks take whole batches in turns, and
    the sums of all batches are added in their order. So the loss is the same to the bit on any number of ranks, if
    `batch` is.

    Args:
        model: converted by `mxref_torch.convert`.
        context: what `convert` returned; its `step` places random rounding, if Fprop has any.
        tokens: token ids [N].
        seq_len: tokens per window.
        batch: windows per forward pass.
        limit: tokens to predict at most.
        loss_sum: returns the sum of the losses of inputs and targets, as compiled code computes it; None: of the
            model's logits.
        share: which part of the batches this rank takes; every rank calls this.
    """
    own: list[float] = []
    count, number, summed = 0, 0, loss_of(model, loss_sum)
    device = next(model.parameters()).device
    batches = iter(sequential_batches(tokens, seq_len, batch, limit))
    with undisturbed(model, context):
        context.global_tokens = limit // seq_len * seq_len
        while group := list(islice(batches, share.parts)):
            # Split weights are gathered by all ranks together: one that has no batch left repeats the last.
            mine = min(share.index, len(group) - 1)
            sizes = [targets.size for _, targets in group]
            context.token_origin = count + sum(sizes[:mine])
            tokens_in, wanted = (torch.from_numpy(side).to(device) for side in group[mine])
            own.append(summed(tokens_in, wanted).item())
            count, number = count + sum(sizes), number + len(group)
    return Evaluation(added(share.in_order(own)[:number]) / count, count)


def loss_of(model: nn.Module, loss_sum: LossSum | None) -> LossSum:
    """Return a sum of losses, by default that of the model's logits."""
    return loss_sum or (lambda inputs, targets: cross_entropy(model(inputs), targets, reduction="sum"))


class Evaluator:
    """Evaluates a run's model as it is.

    The second evaluation on a GPU captures a graph. The first one runs one operation at a time and compiles what it
    needs. So does the first one after the recipe of a layer has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        context: mxref_torch.StepContext,
        tokens: NDArray[np.integer[Any]],
        *,
        share: Share = ALONE,
        captured: bool = False,
        **sizes: Any,
    ) -> None:
        """Prepare to evaluate; `sizes` are the other arguments of `evaluate`, `captured` asks for the graph."""
        self._model, self._context, self._tokens = model, context, tokens
        self._share, self._sizes = share, sizes
        self._capture = CapturedEvaluation(model, context, tokens, **sizes) if captured else None

    def __call__(self) -> tuple[Evaluation, bool]:
        """Return the loss under the weights, the scales and the step that are in force.

        It is computed again, and the second value true, where an operand left the range of the backend's fast GEMM.
        """
        found = self._loss() if self._capture is None else self._capture()
        backend = self._context.backend
        if widened := self._share.ranks.any(backend.range_exceeded()):
            mxref_torch.restart(self._model)
            with backend.widened():
                found = self._loss()
        mxref_torch.restart(self._model)
        return found, widened

    def _loss(self) -> Evaluation:
        found = evaluate(self._model, self._context, self._tokens, share=self._share, **self._sizes)
        self._share.free(self._model)
        return found


class CapturedEvaluation:
    """The loss of a model on the first validation tokens, as one CUDA graph from the second evaluation on."""

    def __init__(
        self,
        model: nn.Module,
        context: mxref_torch.StepContext,
        tokens: NDArray[np.integer[Any]],
        **sizes: Any,
    ) -> None:
        """Prepare to evaluate a model that lies on a GPU; `sizes` are the other arguments of `evaluate`."""
        self._model, self._context, self._tokens, self._sizes = model, context, tokens, sizes
        self._device = next(model.parameters()).device
        # PyTorch's own stream for captures lies on the GPU on which this process has captured first.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._losses = torch.empty(0)
        self._recipes: list[Any] = []
        self._graph: Any = None

    def __call__(self) -> Evaluation:
        """Return the loss under the weights, the scales and the step that are in force."""
        self._step.fill_(self._context.step)
        recipes = [getattr(module, "recipe", None) for module in self._model.modules()]
        if recipes != self._recipes:
            self._recipes, self._graph = recipes, None
            # The step is on the device as in a graph, so that the kernels that read it there are compiled before the
            # capture.
            with mxref_torch.operators.device_step(self._step):
                return evaluate(self._model, self._context, self._tokens, **self._sizes)
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        total = 0.0
        for loss in self._losses.tolist():
            total += loss
        count = sum(targets.numel() for _, targets in self._batches)
        return Evaluation(total / count, count)

    def _captured(self) -> Any:
        seq_len, context = self._sizes["seq_len"], self._context
        if not self._batches:
            windows = sequential_batches(self._tokens, seq_len, self._sizes["batch"], self._sizes["limit"])
            self._batches = [
                (torch.from_numpy(inputs).to(self._device), torch.from_numpy(targets).to(self._device))
                for inputs, targets in windows
            ]
            self._losses = torch.zeros(len(self._batches), device=self._device)
        graph, loss_sum = torch.cuda.CUDAGraph(), loss_of(self._model, self._sizes.get("loss_sum"))
        with undisturbed(self._model, context):
            context.global_tokens = self._sizes["limit"] // seq_len * seq_len
            with mxref_torch.operators.device_step(self._step), capturing(graph, self._stream):
                count = 0
                for number, (inputs, targets) in enumerate(self._batches):
                    context.token_origin = count
                    self._losses[number].copy_(loss_sum(inputs, targets))
                    count += targets.numel()
        return graph
