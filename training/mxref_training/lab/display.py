"""Progress of a ladder that trains several arms at a time: a bar for each arm, or occasional lines.

The remaining time comes from the speeds of the runs that train now and the times of those that have ended. Runs that
wait start in the place that is free first, the longest one first.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from mxref.terminal import console
from mxref_training.progress import PlainProgress, ProgressSink
from mxref_training.wording import clock

_INTERVAL = 10.0  # seconds between plain lines, counted over all arms
_WINDOW = 600.0  # seconds over which the pace of an arm is measured; one step may take several


class Pace:
    """How fast a run goes: from its first step on, evaluations included."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self, step: int, steps: int) -> None:
        """Begin at a step of `steps`."""
        self._first = self._step = step
        self._steps, self._began = steps, time.monotonic()

    def step(self, step: int) -> None:
        """Take note of a finished step."""
        self._step, self._at = step, time.monotonic()

    @property
    def each(self) -> float | None:
        """Seconds of a step; None before the first one has ended."""
        if self._began is None or self._step == self._first:
            return None
        return (self._at - self._began) / (self._step - self._first)

    @property
    def left(self) -> float | None:
        """Seconds until the last step has ended."""
        if self.each is None:
            return None
        return max(0.0, (self._steps - self._step) * self.each - (time.monotonic() - self._at))

    @property
    def whole(self) -> float | None:
        """Seconds of all steps at this speed."""
        return None if self.each is None else self._steps * self.each


def remaining(running: Sequence[Pace], waiting: Sequence[float | None]) -> float | None:
    """Return the seconds until all runs have ended; None until every run that trains has ended a step.

    Args:
        running: the runs that train.
        waiting: seconds of each run that waits; None takes the mean of the known ones.
    """
    left = [pace.left for pace in running]
    known = [seconds for seconds in (*waiting, *(pace.whole for pace in running)) if seconds is not None]
    if not left or None in left:
        return None
    free = sorted(seconds for seconds in left if seconds is not None)
    for seconds in sorted((fmean(known) if each is None else each for each in waiting), reverse=True):
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


class Display(Protocol):
    """Makes a `ProgressSink` for every arm, and counts those that are done."""

    def __enter__(self) -> Display:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, also after an error."""

    def arm(self, name: str) -> ProgressSink:
        """Return the sink for an arm's progress; its `stop` ends the arm's display."""

    def done(self) -> None:
        """Count one more arm, finished or failed."""

    def ends_in(self, seconds: float | None) -> None:
        """Take the seconds until the last arm has ended; None: unknown yet."""


class LinesDisplay:
    """Occasional lines on standard error."""

    def __init__(self, jobs: int) -> None:
        self._interval = _INTERVAL * jobs
        self.seconds: float | None = None
        """Until the last arm has ended."""

    def __enter__(self) -> LinesDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def arm(self, name: str) -> ProgressSink:
        """Return a sink that prints lines with the arm's name: several arms may have the same label."""
        return _NamedLines(self, self._interval, name)

    def done(self) -> None:
        """Do nothing: the ladder itself prints a line with the result of an arm."""

    def ends_in(self, seconds: float | None) -> None:
        """Have the next line say it."""
        self.seconds = seconds


class _NamedLines(PlainProgress):
    def __init__(self, display: LinesDisplay, interval: float, name: str) -> None:
        super().__init__(interval)
        self._display, self._name = display, name

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        super().start(self._name, step, steps, step_tokens)

    def facts(self, step: int, loss: float | None) -> str:
        seconds = self._display.seconds
        return super().facts(step, loss) + ("" if seconds is None else f", all arms {clock(seconds)}")


class BarsDisplay:
    """A bar for every arm that trains, below a bar for the ladder."""

    def __init__(self, console: Console, arms: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}", markup=False),
            _Rate(),
            _Left(),
            console=console,
            expand=True,
            speed_estimate_period=_WINDOW,
        )
        self._ladder = self._bars.add_task("arms", total=arms, losses="", step_tokens=0, left=None)

    def __enter__(self) -> BarsDisplay:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def arm(self, name: str) -> ProgressSink:
        """Return the bar of an arm. It appears at once, because a process takes seconds to load."""
        return _ArmBar(self._bars, name)

    def done(self) -> None:
        """Move the ladder's bar."""
        self._bars.advance(self._ladder)

    def ends_in(self, seconds: float | None) -> None:
        """Show it beside the ladder's bar."""
        self._bars.update(self._ladder, left=seconds)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = (task.speed or 0.0) * task.fields["step_tokens"]
        return Text(f"{rate:,.0f} tok/s" if rate else "")


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.fields.get("left", task.time_remaining)
        return Text("" if left is None else clock(left), style="progress.remaining")


class _ArmBar(ProgressSink):
    def __init__(self, bars: Progress, name: str) -> None:
        self._bars, self._name = bars, name
        self._losses: dict[str, float] = {}
        self._task = bars.add_task(name, total=None, losses="", step_tokens=0)

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        self._bars.reset(self._task, total=steps, completed=step, losses="", step_tokens=step_tokens)

    def step(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self._losses["loss"] = loss
        said = " ".join(f"{name} {value:.4f}" for name, value in self._losses.items())
        self._bars.update(self._task, completed=step, losses=said)

    def validation(self, step: int, loss: float) -> None:
        self._losses["val"] = loss

    def note(self, text: str) -> None:
        self._bars.console.print(f"{self._name}: {text}", markup=False, highlight=False)

    def stop(self) -> None:
        self._bars.remove_task(self._task)


def default_display(jobs: int, arms: int) -> Display:
    """Return bars if standard error is a terminal, and plain lines otherwise."""
    err = console(stderr=True)
    return BarsDisplay(err, arms) if err.is_terminal else LinesDisplay(jobs)
