"""What runs take: from the tokens per second of those that have finished, or from the peak of a GPU."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mxref_training.forecast import memory
from mxref_training.lab import result_file
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.result_file import Record
from mxref_training.layout import check_layout
from mxref_training.model.llama import flops_per_token, parameter_count

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

SPARE = 1.1
"""Factor by which a run may take longer than the slowest one of its arm."""
UTILISATION = 0.2
"""The share of a GPU's peak that an estimate assumes where no run has finished."""
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: its weight and two moments in float32."""
_RESULT_BYTES = 400_000
"""Bytes of a finished run without checkpoints: its logs and its result."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    tflops: float
    """Peak of dense BF16, which emulated block formats multiply in, in 10^12 FLOP/s."""
    gigabytes: int


GPUS = (
    Gpu("RTX 4090", 165, 24),
    Gpu("A100", 312, 80),
    Gpu("H100 SXM", 989, 80),
    Gpu("H200", 989, 141),
    Gpu("B200", 2250, 180),
    Gpu("MI300X", 1307, 192),
    Gpu("MI355X", 2517, 288),
)


@dataclass
class Costs:
    """Tokens per second of the slowest finished run of each arm, its start and its evaluations included."""

    rates: dict[str, float] = field(default_factory=dict)

    def learn(self, arm: str, tokens: float, seconds: float) -> None:
        """Record what a run took; one without tokens or time says nothing."""
        if seconds > 0 and tokens > 0:
            self.rates[arm] = min(tokens / seconds, self.rates.get(arm, tokens / seconds))

    def learn_record(self, record: Record) -> None:
        """Record what a finished run reports, without its start; a diverged one reports nothing."""
        seconds = record.get("seconds") or 0.0
        tokens = (record.get("tokens_per_second") or 0.0) * seconds
        self.learn(record["arm"], tokens, seconds + (record.get("evaluation_seconds") or 0.0))

    def seconds(self, run: ArmRun) -> float | None:
        """Return what a run takes; None if no run has been timed. An unknown arm counts as the slowest."""
        return run.tokens / self.rates.get(run.arm.name, min(self.rates.values())) if self.rates else None

    def expected(self, run: ArmRun) -> float | None:
        """Return the seconds that the rest of a run may take; None if no run has been timed."""
        seconds = self.seconds(run)
        return None if seconds is None else SPARE * seconds * (1 - run.progress())


def wall(seconds: Sequence[float], places: int) -> float:
    """Return when the last run ends, if each starts in the place that is free first."""
    free = [0.0] * places
    for value in seconds:
        heapq.heapreplace(free, free[0] + value)
    return max(free)


# ---- the estimate of a ladder, before it runs ----


@dataclass(frozen=True)
class ArmCost:
    """The cost of an arm's missing runs."""

    name: str
    runs: int
    steps: int
    """Of one run."""
    seconds: float | None
    """Of one run; None if no run has been timed."""
    timed: bool
    """Whether a run of the arm was timed; if not, the time is that of the slowest arm."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a ladder's missing runs."""

    arms: tuple[ArmCost, ...]
    parameters: int
    tokens: int
    """Of all missing runs."""
    flops: float
    """Operations of all missing runs, without their evaluations."""
    memory: int
    """Bytes that training takes on each GPU, at its peak."""
    wall: float | None
    """Seconds until the last run has ended, in all places."""
    disk: int
    """Bytes that stay, and those of the runs that train at the same time."""

    def seconds_on(self, gpu: Gpu, gpus_per_run: int) -> float | None:
        """Return the seconds of all runs on GPUs of a kind, by their peak; None if a run does not fit on them."""
        if self.memory > gpu.gigabytes * 1e9:
            return None
        return self.flops / (gpus_per_run * gpu.tflops * 1e12 * UTILISATION)


def estimate(config: TrainConfig, runs: Iterable[ArmRun], places: int, gpus_per_run: int) -> Estimate:
    """Return what those of the planned runs take that have no result, of whatever code and tokens.

    As many train at a time as there are `places`. Nothing is allocated.
    """
    costs, missing = Costs(), []
    for run in runs:
        if found := result_file.read(run.folder / result_file.NAME):
            costs.learn_record(found["record"])
        else:
            missing.append(run)
    parameters, tokens = parameter_count(config.model), sum(run.tokens for run in missing)
    counts = Counter((run.arm.name, run.steps) for run in missing)
    one_of = {(run.arm.name, run.steps): run for run in missing}
    seconds = [SPARE * value for run in missing if (value := costs.seconds(run))]
    stay = sum(len(run.stops) or config.run.keep for run in missing if run.keep_checkpoints)
    axes = check_layout(config, gpus_per_run)
    needs = {run.arm.name: run for run in missing}.values()
    return Estimate(
        tuple(
            ArmCost(name, count, steps, costs.seconds(one_of[name, steps]), name in costs.rates)
            for (name, steps), count in counts.items()
        ),
        parameters,
        tokens,
        flops_per_token(config.model, config.run.seq_len) * tokens,
        max((memory(run.config, run.recipe, axes).total for run in needs), default=0),
        wall(seconds, places) if len(seconds) == len(missing) else None,
        # A checkpoint is written before the oldest is deleted.
        _CHECKPOINT_BYTES * parameters * (stay + places * (config.run.keep + 1))
        + _RESULT_BYTES * len(missing),
    )
