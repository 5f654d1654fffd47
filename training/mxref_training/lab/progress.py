"""Progress of a ladder that trains several arms at a time: a bar for each arm, or occasional lines."""

from __future__ import annotations

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
    TimeRemainingColumn,
)
from rich.text import Text

from mxref.terminal import console
from mxref_training.progress import PlainProgress, ProgressSink

_INTERVAL = 10.0  # seconds between plain lines, counted over all arms
_WINDOW = 600.0  # seconds over which the pace is measured; one step may take several


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


class LinesDisplay:
    """Occasional lines on standard error."""

    def __init__(self, jobs: int) -> None:
        self._interval = _INTERVAL * jobs

    def __enter__(self) -> LinesDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def arm(self, name: str) -> ProgressSink:
        """Return a sink that prints lines with the arm's name: several arms may have the same label."""
        return _NamedLines(self._interval, name)

    def done(self) -> None:
        """Do nothing: the ladder itself prints a line with the result of an arm."""


class _NamedLines(PlainProgress):
    def __init__(self, interval: float, name: str) -> None:
        super().__init__(interval)
        self._name = name

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        super().start(self._name, step, steps, step_tokens)


class BarsDisplay:
    """A bar for every arm that trains, below a bar for the ladder."""

    def __init__(self, console: Console, arms: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}", markup=False),
            _Rate(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            speed_estimate_period=_WINDOW,
        )
        self._ladder = self._bars.add_task("arms", total=arms, losses="", step_tokens=0)

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


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = (task.speed or 0.0) * task.fields["step_tokens"]
        return Text(f"{rate:,.0f} tok/s" if rate else "")


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
