"""The outputs of a run besides its metrics: telemetry, trackers and profiles. None of them changes a bit of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import mxref_torch
from mxref.raised import raised_text
from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref.tomlio import to_table
from mxref_torch.operators import gemm_text, in_order
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.run.folder import RunFolder
from mxref_training.run.metrics_log import Mark, MetricsLog
from mxref_training.run.profiler import Profiler, Window
from mxref_training.run.progress import ProgressSink
from mxref_training.run.trackers import flat, require_trackers, start_trackers

if TYPE_CHECKING:
    from mxref_torch import StepContext


@dataclass(frozen=True)
class Observation:
    """The outputs of a run besides its logs. `run.telemetry_every` switches telemetry on."""

    tensorboard: bool = False
    """Write TensorBoard's event files."""
    track: str = ""
    """A package that gets the numbers: `trackio` or `wandb`."""
    profile: Window | None = None
    """Steps to profile."""

    def require(self, config: TrainConfig) -> None:
        """Raise ConfigError where a package is missing, or the profiled steps are none of the run's."""
        require_trackers(self.tensorboard, self.track)
        if self.profile and self.profile.first > config.run.steps:
            raise ConfigError(f"--profile {self.profile}: the run has {config.run.steps} steps")


UNOBSERVED = Observation()


class Observer:
    """Watches one process's part of a run."""

    def __init__(
        self,
        asked: Observation,
        config: TrainConfig,
        recipe: Recipe,
        folder: RunFolder,
        model: torch.nn.Module,
        context: StepContext,
        sink: ProgressSink,
        step: int,
        mark: Mark | None,
    ) -> None:
        """Begin to watch after a step; `mark` is the length of telemetry's log that its checkpoint recorded."""
        self._every, self._context, self._model = config.run.telemetry_every, context, model
        self._note = sink.note
        self._rows: list[dict[str, Any]] = []
        self._log: MetricsLog | None = None
        about = {"config": to_table(config), "recipe": to_table(recipe), "digest": recipe.digest}
        if self._every or mark or folder.telemetry.exists():
            # Lines of a process that died, or of one that measured more often, are cut off even where none is added.
            self._log = MetricsLog(folder.telemetry, mark)
        self._trackers = start_trackers(asked.tensorboard, asked.track, folder.path, about, step, sink.note)
        if self._every and {own.kind(role) for own in recipe.treatments() for role in GemmRole} == {"bf16"}:
            sink.note("telemetry has no operands to measure: the recipe quantizes none")
        device = next(model.parameters()).device
        self._profiler = Profiler(asked.profile, folder.path, device, sink.note) if asked.profile else None
        if asked.profile and asked.profile.last <= step:
            sink.note(f"nothing to profile: the run is at step {step} already, beyond {asked.profile}")

    def due(self, step: int) -> bool:
        """Return whether telemetry measures this step, which then runs eagerly."""
        return bool(self._every) and step % self._every == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Watch an optimizer step, counted from 1; what telemetry measured in it is written at its end."""
        if self._profiler:
            self._profiler.begin(step)
        try:
            yield
        finally:
            rows, self._rows = self._rows, []
            for row in rows:
                line = {"step": step, **row}
                assert self._log is not None
                self._log.write(line)
            self._track(step, {name: value for row in rows for name, value in flat(row).items()})
        if self._profiler:
            self._profiler.end(step)

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the forward and backward passes of the block if the step is due.

        A step that is done over is measured again, and counts once.
        """
        if not self.due(step):
            yield
            return
        before = Counter(self._context.census)
        with mxref_torch.telemetry(self._model) as seen:
            yield
        ran = self._context.census - before
        census = {gemm_text(gemm): ran[gemm] for gemm in in_order(ran)}
        self._rows = [{"census": census}, *seen.rows]

    def log(self, line: Mapping[str, Any]) -> None:
        """Take a line of the metrics."""
        if self._trackers:
            self._track(line["step"], flat(line))

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in list(self._trackers) if values else ():
            try:
                tracker.log(step, values)
            except Exception as err:  # whatever its package raises, for example without a network
                self._trackers.remove(tracker)
                self._note(
                    f"{tracker.name} failed at step {step}, and gets no more numbers: {raised_text(err)}"
                )

    def marks(self) -> dict[str, Any]:
        """Return what a checkpoint records of the log of telemetry; nothing where there is none."""
        return {"telemetry": self._log.mark().to_table()} if self._log else {}

    def close(self) -> None:
        """Close all trackers and profiles, however the run ended."""
        try:
            if self._profiler:
                self._profiler.close()
        finally:
            for tracker in self._trackers:
                with suppress(Exception):  # the run's own files are complete without it
                    tracker.close()
            if self._log:
                self._log.close()
