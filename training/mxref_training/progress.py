"""The progress of a run: a progress bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mxref.printable import printable
from mxref_training.wording import clock

if TYPE_CHECKING:
    from rich.progress import Progress

_PLAIN_INTERVAL = 10.0  # seconds between lines without a terminal


class ProgressSink:
    """Receives the progress of a run, none of which is written to a file of the run. This one reports nothing."""

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        """Begin, or go on, at a step of `steps`, each of `step_tokens` tokens."""

    def step(self, step: int, loss: float | None) -> None:
        """Report a finished step, counted from 1; the loss is None where the step was skipped."""

    def validation(self, step: int, loss: float) -> None:
        """Report an evaluation."""

    def note(self, text: str) -> None:
        """Say something in one line."""

    def stop(self) -> None:
        """End, in whatever way."""


class PlainProgress(ProgressSink):
    """A line on standard error now and then, for logs and pipes."""

    label = ""

    def __init__(self, interval: float = _PLAIN_INTERVAL) -> None:
        self._interval = interval
        self._last = time.monotonic()

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        """Count tokens per second from now on."""
        self.label, self.first, self.steps, self.step_tokens = label, step, steps, step_tokens
        self.losses: dict[str, float] = {}
        self.began = time.monotonic()

    def step(self, step: int, loss: float | None) -> None:
        """Print a line where the last one is some time ago."""
        facts, now = self.facts(step, loss), time.monotonic()
        if now - self._last >= self._interval or step == self.steps:
            self._last = now
            self.note(f"step {step}/{self.steps} {facts}")

    def validation(self, step: int, loss: float) -> None:
        """Keep the loss for the next line."""
        self.losses["val"] = loss

    def note(self, text: str) -> None:
        """Print the text after the run's label."""
        label = f"{self.label}: " if self.label else ""
        print(printable(f"{label}{text}"), file=sys.stderr, flush=True)

    def facts(self, step: int, loss: float | None) -> str:
        """Return the last losses, the rate and the remaining time after a step."""
        if loss is not None:
            self.losses = {"loss": loss} | {k: v for k, v in self.losses.items() if k == "val"}
        rate = (step - self.first) * self.step_tokens / max(1e-9, time.monotonic() - self.began)
        left = (self.steps - step) * self.step_tokens / max(1e-9, rate)
        said = [f"{name} {value:.4f}" for name, value in self.losses.items()]
        return " ".join([*said, f"{rate:,.0f} tokens/s ETA {clock(left)}"])


class BarProgress(PlainProgress):
    """A progress bar on the terminal of standard error, with lines above it."""

    _bar: Progress | None = None

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from mxref.terminal import console

        super().start(label, step, steps, step_tokens)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=console(stderr=True),
        )
        self._task = self._bar.add_task(label or "training", total=steps, completed=step, facts="")
        self._bar.start()

    def step(self, step: int, loss: float | None) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=self.facts(step, loss))

    def validation(self, step: int, loss: float) -> None:
        """Show the loss beside the bar."""
        super().validation(step, loss)
        self.step(step, None)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            super().note(text)

    def stop(self) -> None:
        """Stop the bar's thread; the bar stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def default_progress() -> ProgressSink:
    """Return a bar where standard error is a terminal, and plain lines elsewhere."""
    from rich.console import Console

    return BarProgress() if Console(stderr=True).is_terminal else PlainProgress()


class _WhilePossible(ProgressSink):
    """Reports to a sink until that fails because the terminal or the pipe's reader is gone. The run goes on."""

    def __init__(self, sink: ProgressSink) -> None:
        self._sink = sink

    def _report(self, what: str, *arguments: Any) -> None:
        try:
            getattr(self._sink, what)(*arguments)
        except OSError:
            gone, self._sink = self._sink, ProgressSink()
            with suppress(OSError):
                gone.stop()

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        self._report("start", label, step, steps, step_tokens)

    def step(self, step: int, loss: float | None) -> None:
        self._report("step", step, loss)

    def validation(self, step: int, loss: float) -> None:
        self._report("validation", step, loss)

    def note(self, text: str) -> None:
        self._report("note", text)

    def stop(self) -> None:
        self._report("stop")


@contextmanager
def reporting(sink: ProgressSink) -> Iterator[ProgressSink]:
    """Yield a sink that reports to another one while that is possible, and stop it however the block ends."""
    lasting = _WhilePossible(sink)
    try:
        yield lasting
    finally:
        lasting.stop()
