"""Stops a run whose state is not finite: NaN and infinity are never saved, and never trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mxref_torch.checks.finite import is_finite
from mxref_torch.names import named_modules, named_parameters
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.sharded import own_part
from mxref_training.errors import CheckpointError, ConfigError, DivergedError
from mxref_training.evaluate import undisturbed

if TYPE_CHECKING:
    from mxref_torch import StepContext
    from mxref_training.config import TrainConfig
    from mxref_training.open_run import OpenRun

MAX_SKIPPED = 10
"""Steps in a row that may be skipped before the run counts as diverged."""


@torch.no_grad()
def first_nonfinite(tensors: Mapping[str, Tensor], ranks: Ranks = SOLE) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity on any rank; None where all values are finite.

    Smallest and largest value show both, so each tensor is read once and no mask is made.

    Args:
        tensors: of any shape, dtype and device; integers and empty tensors are finite.
        ranks: each gives its part of the same tensors in the same order, and gets the same name.
    """
    parts = [own_part(tensor) for tensor in tensors.values()]
    # All of them are started before the first result is waited for.
    extremes = [torch.aminmax(own) if own.is_floating_point() and own.numel() else () for own in parts]
    found = (
        place for place, ends in enumerate(extremes) if not all(bool(torch.isfinite(end)) for end in ends)
    )
    return [*tensors, None][min(ranks.gather(next(found, len(parts))))]


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
    if name := first_nonfinite(dict(named_parameters(model)), ranks):
        return f"the weight {name}"
    found: list[str] = []
    names = {module: name for name, module in named_modules(model)}

    def look(module: nn.Module, _args: Any, output: Any) -> None:
        if not found and not is_finite(output):
            found.append(names[module])

    # The hook of an inner module runs before that of the module around it, so the first name is the innermost.
    handles = [module.register_forward_hook(look) for module in names]
    try:
        with undisturbed(model, context):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return next(filter(None, ranks.gather(found[0] if found else "")), "the loss")


def first_nonfinite_gradient(model: nn.Module, ranks: Ranks = SOLE) -> str:
    """Return the name of the first weight, in the order of the backward pass, whose gradient is not finite."""
    weights = reversed([*named_parameters(model)])
    gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
    return first_nonfinite(gradients, ranks) or "the norm over all gradients"  # where their squares overflow


def require_finite_start(run: OpenRun, state: Mapping[str, Tensor]) -> None:
    """Refuse a state to begin from that is not finite; on all ranks.

    Args:
        run: at step 0, or at that of the checkpoint from which the state came.
        state: weights, FP8 scales and moments of the optimizer, by name.

    Raises:
        ConfigError: initial weights that are not finite.
        CheckpointError: a checkpoint that is not finite.
    """
    name, step, store = first_nonfinite(state, run.ranks), run.step, run.folder.store
    if name is None:
        return
    if not step:
        std = run.config.model.init_std
        raise ConfigError(f"the initial {name} is not finite: lower model.init_std = {std}")
    earlier = [kept for kept in store.steps() if kept < step]
    delete = f"delete {store.path(step)} to go on from step {earlier[-1]}, or " if earlier else ""
    raise CheckpointError(
        f"the checkpoint of step {step} holds {name} that is not finite; {delete}start over with --no-resume"
    )


def require_finite(run: OpenRun, state: Mapping[str, Tensor]) -> None:
    """Raise DivergedError, naming tensor and last checkpoint, unless the state of a run is finite; on all ranks."""
    if name := first_nonfinite(state, run.ranks):
        kept = run.folder.store.steps()
        last = f"the last checkpoint is of step {kept[-1]}" if kept else "there is no checkpoint"
        raise DivergedError(f"{name} is not finite after step {run.step}: {last}; {_way_out(run.config)}")


def require_some_taken(run: OpenRun, problem: str) -> None:
    """Raise DivergedError, naming the last problem, if too many steps in a row were skipped."""
    if run.skipped_in_a_row >= MAX_SKIPPED:
        raise DivergedError(
            f"{problem}, the {MAX_SKIPPED}th step in a row to be skipped: {_way_out(run.config)}"
        )


def require_trained(run: OpenRun, final_loss: float, skipped: int) -> None:
    """Raise DivergedError unless a finished run has a finite last validation loss, and took a step at all."""
    steps = run.config.run.steps
    if not math.isfinite(final_loss):
        said = f"the validation loss after the last step, {steps}, is not finite"
    elif skipped == steps:
        said = f"all {skipped} steps were skipped, so nothing was trained"
    else:
        return
    raise DivergedError(f"{said}: {_way_out(run.config)}; the log is {run.folder.metrics}")


def _way_out(config: TrainConfig) -> str:
    return f"lower optim.lr = {config.optim.lr}, or take a recipe with more precision"
