"""Several runs at a time, in child processes that each train one run after another.

Two small arms with a core each finish sooner than one after the other with two cores: the parallel parts of a step are
short, and at the end of each part the threads wait for the slowest one. Several small models share a GPU in the same
way. The processes share only the directory of the ladder. A child trains like this process
(`mxref_training.lab.worker`), and reports through a pipe.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxref.errors import MxrefError
from mxref_training.data import handed_over
from mxref_training.interrupt import Interrupted, StopRequest
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.budget import Budget
from mxref_training.lab.child import Child, reason
from mxref_training.lab.progress import Display, default_display, remaining
from mxref_training.lab.runner import Watch
from mxref_training.lab.slots import Slot
from mxref_training.lab.worker import EXIT_INTERRUPTED

_POLL = 0.2  # seconds until a signal is noticed if no child reports


class ArmError(MxrefError, RuntimeError):
    """Some arms ended without a result, and all others have one."""


class ChildProcesses:
    """Trains runs in child processes, one in each slot; a `Runner`.

    SIGINT, SIGTERM or SIGHUP stops every child after its step, with a checkpoint; a second one, `TOGETHER` seconds
    later, ends all children at once. A child that dies is reported immediately, the others continue, and the next run
    gets a new process.

    Raises:
        Interrupted: it was stopped, or its time was up, and runs are unfinished, or what follows them is.
        ArmError: runs ended without a result.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        backend: str,
        budget: Budget | None = None,
        display: Callable[[int, int], Display] = default_display,
    ) -> None:
        """`backend` is the name under which children load it; `display` is called with the numbers of slots and of
        runs.
        """
        self._slots, self._backend, self._display = slots, backend, display
        self._budget = budget or Budget()

    def __call__(self, runs: Sequence[ArmRun], watch: Watch, corpus: Any, then: str = "") -> None:
        """Train all of them, as `Runner` says."""
        if runs:
            shared = {"backend": self._backend, "corpus": handed_over.to_table(corpus)}
            with self._display(len(self._slots), len(runs)) as display, StopRequest() as request:
                _Batch(runs, watch, display, request, self._budget).train(self._slots, shared, then)


class _Batch:
    """The runs of one call: waiting, training, done and failed."""

    def __init__(
        self, runs: Sequence[ArmRun], watch: Watch, display: Display, request: StopRequest, budget: Budget
    ) -> None:
        self.total, self.waiting = len(runs), deque(runs)
        self.begun: set[int] = set()
        """The seeds of which a run has started."""
        self.took: dict[str, float] = {}
        """Seconds of the last run of each arm."""
        self.children: list[Child] = []
        self.stopped: list[str] = []
        self.failed: list[str] = []
        self.why = ""
        """The reason why no more runs start: a signal, or the time limit."""
        self.watch, self.display, self.request, self.budget = watch, display, request, budget

    def train(self, slots: Sequence[Slot], shared: Mapping[str, Any], then: str) -> None:
        free = deque(slots)
        try:
            while True:
                self._look_at_the_clock()
                while free and (run := self._next()):
                    self.watch.begin(run)
                    child = Child.start(free.popleft(), run, shared)
                    self.children.append(child)
                    child.train(run, self.display.arm(run.title))
                if not self.children:
                    break
                training = [child.training.pace for child in self.children if child.training]
                self.display.ends_in(
                    remaining(training, [self.took.get(run.arm.name) for run in self.waiting])
                )
                for child in _readable(self.children):
                    if child.read():
                        self._finished(child)
                    if child.ended:
                        self.children.remove(child)
                        self._ended(child)
                        free.append(child.slot)
        except KeyboardInterrupt:  # the second signal
            self.stop(signal.SIGKILL)
            raise
        finally:
            self.stop(signal.SIGINT)  # after an error in this process: the children save what they have
            for child in self.children:
                if child.training:
                    child.training.sink.stop()
                child.wait()
        self.conclude(then)

    def _look_at_the_clock(self) -> None:
        if self.why:
            return
        if self.request.signal:
            self.why = self.request.signal
            said = f"{self.why}: stops after this step; a second signal ends it at once"
        elif self.budget.is_spent():
            self.why = "the time is up"
            said = f"{self.why}: stops after this step"
        else:
            return
        for child in self.children:
            if child.training:
                child.training.sink.note(said)
        self.stop(signal.SIGINT)

    def _next(self) -> ArmRun | None:
        """Return the next run that may start; None if there is none, or too little time for it.

        A seed's runs come before those of the next seed, so that pairs are complete early. Among them the first one,
        the reference, starts first, then the longest ones: short ones at the end keep every place busy.
        """
        allowed = [] if self.why else [run for run in self.waiting if self.budget.allows(run)]
        if not allowed:
            return None
        run = allowed[0]
        if run.seed in self.begun:
            same = [other for other in allowed if other.seed == run.seed]
            run = max(same, key=lambda other: self.budget.expected(other) or 0.0)
        self.begun.add(run.seed)
        self.waiting.remove(run)
        return run

    def _finished(self, child: Child) -> None:
        """Keep the result of a child's run, and give it the next one."""
        training = child.take()
        record = training.run.finished()
        if record is None:
            self.failed.append(training.run.title)
            self.watch.failed(
                training.run, f"its result was changed as soon as it was written; see {training.log}"
            )
        else:
            self.took[training.run.arm.name] = seconds = time.monotonic() - training.began
            self.budget.learn(training.run, seconds)
            self.watch.done(training.run, record)
        self.display.done()
        if run := self._next():
            self.watch.begin(run)
            child.train(run, self.display.arm(run.title))
        else:
            child.release()

    def stop(self, number: signal.Signals) -> None:
        for child in self.children:
            child.process.send_signal(number)

    def _ended(self, child: Child) -> None:
        """Take note of a process that has ended, and of its run, which has no result."""
        code = child.wait()
        if child.training is None:
            return
        training = child.take()
        if self.why and code in (EXIT_INTERRUPTED, -signal.SIGINT):
            self.stopped.append(training.run.title)
            return
        self.failed.append(training.run.title)
        self.watch.failed(training.run, reason(training, code))
        self.display.done()

    def conclude(self, then: str) -> None:
        """Raise the error that stopped the runs, or that is to stop what follows them."""
        failed = f"{', '.join(self.failed)} failed" if self.failed else ""
        if self.stopped or self.waiting:
            ended = self.total - len(self.waiting) - len(self.stopped) - len(self.failed)
            stopped = f"{', '.join(self.stopped)} stopped" if self.stopped else ""
            said = ", ".join(filter(None, (f"{ended} of {self.total} runs finished", stopped, failed)))
            why = self.why or "too little time is left for another run"
            raise Interrupted(f"{why}: {said}; the same command goes on from there")
        if self.failed:
            logs = "its log.txt" if len(self.failed) == 1 else "their log.txt"
            raise ArmError(
                f"{len(self.failed)} of {self.total} runs without a result: {failed}, for the reasons above and in "
                f"{logs}; the same command goes on with what is missing, and finished arms are kept"
            )
        if then and (why := self.why or self.request.signal):
            raise Interrupted(
                f"{why}: {self.total} of {self.total} runs finished; the same command goes on with {then}"
            )


def _readable(children: Sequence[Child]) -> list[Child]:
    """Return the children that reported something or ended, after `_POLL` seconds at most."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(_POLL)]
