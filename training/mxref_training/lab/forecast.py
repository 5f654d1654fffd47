"""What a queue of runs will cost: operations, time and disk, and what the estimate assumes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxref_training.lab.arm import ArmRun
from mxref_training.lab.costs import Costs
from mxref_training.model.llama import flops_per_token, parameter_count

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

_CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: its weight and two moments in float32."""
_RESULT_BYTES = 400_000
"""Bytes of a finished run without checkpoints: its logs and its result."""


@dataclass(frozen=True)
class ArmCost:
    """The cost of an arm's runs."""

    name: str
    runs: int
    """Number of unfinished runs."""
    seconds: float | None
    """Seconds of one run; None if no run has been timed."""
    timed: bool
    """Whether a run of its cost class was timed; if not, the time is that of the slowest class."""


@dataclass(frozen=True)
class Forecast:
    """The cost of the unfinished runs."""

    arms: tuple[ArmCost, ...]
    parameters: int
    tokens: int
    """Tokens of one run."""
    flops: float
    """Operations of all unfinished runs, without their evaluations."""
    busy: float | None
    """Seconds of all runs, one after another in one place."""
    wall: float | None
    """Seconds until the last run has ended, in all places."""
    disk: int
    """Bytes that stay, and those of the runs that train at the same time."""


def forecast(config: TrainConfig, runs: Sequence[ArmRun], costs: Costs, places: int) -> Forecast:
    """Return what runs will take.

    Args:
        config: the configuration that they share.
        runs: the unfinished runs, in the order of the queue.
        costs: what is known of their times.
        places: how many train at a time.
    """
    by_arm: dict[str, list[ArmRun]] = {}
    for run in runs:
        by_arm.setdefault(run.arm.name, []).append(run)
    arms = tuple(
        ArmCost(name, len(found), costs.whole(found[0]), costs.known(found[0]))
        for name, found in by_arm.items()
    )
    parameters, step_tokens = parameter_count(config.model), config.run.step_tokens
    steps = sum(last - first for first, last in (run.span for run in runs))
    seconds = [costs.expected(run) for run in runs]
    known = [value for value in seconds if value is not None]
    complete = len(known) == len(seconds)
    checkpoint = _CHECKPOINT_BYTES * parameters
    kept = sum(run.config.run.keep for run in runs if run.keep_checkpoints)
    # A checkpoint is written before the oldest is deleted.
    at_once = sum(run.config.run.keep + 1 for run in runs[:places] if not run.keep_checkpoints)
    return Forecast(
        arms=arms,
        parameters=parameters,
        tokens=config.run.steps * step_tokens,
        flops=flops_per_token(config.model, config.run.seq_len) * steps * step_tokens,
        busy=sum(known) if complete else None,
        wall=_end(known, places) if complete else None,
        disk=checkpoint * (kept + at_once) + _RESULT_BYTES * len(runs),
    )


def _end(seconds: Sequence[float], places: int) -> float:
    """Return when the last run ends, if each starts in the place that is free first."""
    free = [0.0] * places
    for value in seconds:
        heapq.heapreplace(free, free[0] + value)
    return max(free)
