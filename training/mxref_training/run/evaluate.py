"""Evaluates a model without changing its training: validation loss, and the place where a value is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxref_torch.names import named_modules, named_parameters
from mxref_training.data import sequential_batches
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.share import ALONE, Share, added
from mxref_training.distributed.tensors import own_part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mxref_torch import StepContext


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
def undisturbed(model: nn.Module, context: StepContext) -> Iterator[None]:
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
    context: StepContext,
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


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of logits float32 [B, T, V] and targets int64 [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def first_nonfinite_output(
    model: nn.Module, context: StepContext, inputs: Tensor, ranks: Ranks = SOLE
) -> str:
    """Return the name of the first module in the forward pass whose output or weight is not finite.

    Args:
        model: as for `evaluate`.
        context: as for `evaluate`.
        inputs: the micro-batch that gave the loss, int64 [B, T]; of each rank its own.
        ranks: the ranks of the run, all of which call this; the result is that of the first rank that finds something.
    """
    weights = (n for n, p in named_parameters(model) if not bool(torch.isfinite(own_part(p)).all()))
    for name in ranks.gather(next(weights, None)):
        if name is not None:
            return f"the weight {name}"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name)

        return hook

    # The hook of an inner module runs before that of the module around it, so the first name is the innermost.
    handles = [module.register_forward_hook(watch(name)) for name, module in named_modules(model)]
    try:
        with undisturbed(model, context):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return next((first for first in ranks.gather(found[0] if found else None) if first), "the loss")


def first_nonfinite_gradient(model: nn.Module, ranks: Ranks = SOLE) -> str:
    """Return the name of the first weight, in the order of the backward pass, whose gradient is not finite."""
    order = [name for name, _ in reversed(list(named_parameters(model)))]
    parameters = dict(named_parameters(model))
    own = next(
        (
            number
            for number, name in enumerate(order)
            if (gradient := parameters[name].grad) is not None
            and not bool(torch.isfinite(own_part(gradient)).all())
        ),
        len(order),
    )
    if (first := min(ranks.gather(own))) < len(order):
        return order[first]
    return "the norm over all gradients"  # each is finite, and their squares overflow
