"""Stops a run whose state is not finite: NaN and infinity are never saved, and never trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mxref_torch.names import named_modules, named_parameters
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import TrainConfig
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.sharded import own_part
from mxref_training.errors import CheckpointError, ConfigError, DivergedError
from mxref_training.evaluate import undisturbed

if TYPE_CHECKING:
    from mxref_torch import StepContext


MAX_SKIPPED = 10
"""Steps in a row that may be skipped before the run counts as diverged."""


@torch.no_grad()
def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity on this rank; None where all values are finite.

    Smallest and largest value show both, so each tensor is read once and no mask is made.

    Args:
        tensors: of any shape, dtype and device; integers and empty tensors are finite.
    """
    # All of them are started before the first result is waited for.
    extremes = {
        name: torch.aminmax(own)
        for name, own in ((name, own_part(tensor)) for name, tensor in tensors.items())
        if own.is_floating_point() and own.numel()
    }
    for name, (low, high) in extremes.items():
        if not (bool(torch.isfinite(low)) and bool(torch.isfinite(high))):
            return name
    return None


def first_nonfinite_of_ranks(tensors: Mapping[str, Tensor], ranks: Ranks) -> str | None:
    """Return what `first_nonfinite` returns on the first rank that finds one; every rank gets the same."""
    return next((name for name in ranks.gather(first_nonfinite(tensors)) if name), None)


def require_finite_start(
    state: Mapping[str, Tensor], step: int, config: TrainConfig, store: CheckpointStore, ranks: Ranks = SOLE
) -> None:
    """Refuse a state to begin from that is not finite.

    Args:
        state: weights, FP8 scales and moments of the optimizer, by name.
        step: of the checkpoint that they came from; 0 for initial weights.
        config: the run.
        store: the run's checkpoints.
        ranks: of the run, all of which check their part and raise together.

    Raises:
        ConfigError: initial weights that are not finite.
        CheckpointError: a checkpoint that is not finite.
    """
    name = first_nonfinite_of_ranks(state, ranks)
    if name is None:
        return
    if not step:
        raise ConfigError(f"the initial {name} is not finite: lower model.init_std = {config.model.init_std}")
    earlier = [kept for kept in store.steps() if kept < step]
    delete = f"delete {store.path(step)} to go on from step {earlier[-1]}, or " if earlier else ""
    raise CheckpointError(
        f"the checkpoint of step {step} holds {name} that is not finite; {delete}start over with --no-resume"
    )


def require_finite(
    state: Mapping[str, Tensor], step: int, config: TrainConfig, store: CheckpointStore, ranks: Ranks = SOLE
) -> None:
    """Raise DivergedError, naming the tensor and the last checkpoint, unless the state after a step is finite.

    Args: as for `require_finite_start`.
    """
    if name := first_nonfinite_of_ranks(state, ranks):
        kept = store.steps()
        last = f"the last checkpoint is of step {kept[-1]}" if kept else "there is no checkpoint"
        raise DivergedError(f"{name} is not finite after step {step}: {last}; {way_out(config)}")


def require_some_taken(config: TrainConfig, skipped: int, problem: str) -> None:
    """Raise DivergedError, naming the last problem, if too many steps in a row were skipped."""
    if skipped >= MAX_SKIPPED:
        raise DivergedError(f"{problem}, the {MAX_SKIPPED}th step in a row to be skipped: {way_out(config)}")


def require_trained(config: TrainConfig, final_loss: float, skipped: int, log: Path) -> None:
    """Raise DivergedError unless a finished run has a finite validation loss and has taken a step at all.

    Args:
        config: the run.
        final_loss: the last validation loss.
        skipped: how many of its steps were skipped.
        log: its metrics.
    """
    if not math.isfinite(final_loss):
        raise DivergedError(
            f"the validation loss after the last step, {config.run.steps}, is not finite: {way_out(config)}; "
            f"the log is {log}"
        )
    if skipped == config.run.steps:
        raise DivergedError(
            f"all {skipped} steps were skipped, so nothing was trained: {way_out(config)}; the log is {log}"
        )


def way_out(config: TrainConfig) -> str:
    """Return what to change in a run that diverged."""
    return f"lower optim.lr = {config.optim.lr}, or take a recipe with more precision"


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
