"""Where a backend answers its checks: in this process, or in others, so that one that crashes only fails a check.

`Here` asks in this process. `Processes` starts others and receives the results. `main` is their other end: it loads the
backend, sends `Loaded` or the error, and then the number and the verdict of every check that it was given. A process is
a fresh interpreter, because a GPU driver does not survive a fork.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.conformance.checking import Check, Subject
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.suite import Choice, result_of, together
from mxref.conformance.watch import Copies
from mxref.cores import on_a_share
from mxref.discovery import get_backend
from mxref.errors import BackendError, LoadError, MxrefError

_Task = tuple[list[int], bool]
"""Numbers of checks, and whether to shrink what fails."""

TIME_LIMIT = 300.0
"""Seconds for a check: far more than the slowest check needs under an interpreter of GPU kernels."""
LEAST_TO_LOAD = 60.0
"""Least seconds for loading, even if a check has fewer: compilers and GPU drivers start slowly."""
MOST_ENDED, MOST_HUNG = 40, 3
"""Checks that may crash or hang before the rest is skipped, because a whole run of them would take hours."""
_POLL = 0.5  # seconds: a copy of a process can hold its connection open after the process has ended
_GRACE = 10.0  # seconds
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mxref.conformance.isolation import main; main(int(sys.argv[2]))"
)


class Here:
    """Answers checks in this process."""

    lost: frozenset[int] = frozenset()

    def __init__(self, backend: Backend, checks: list[Check]) -> None:
        self.loaded = Loaded.of(backend, checks)
        self._subject, self._checks = Subject(backend), checks

    def verdicts(
        self, groups: Iterable[Iterable[int]], shrink: bool = False
    ) -> Iterator[tuple[int, CheckResult]]:
        """Yield the number and the verdict of each check of the groups; with `shrink`, what fails is shrunk."""
        self._subject.shrink = shrink
        for group in groups:
            for i in group:
                yield i, result_of(self._checks[i], self._subject)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class Processes:
    """Processes that load a backend by its name and answer checks of it, at most `jobs` at a time."""

    def __init__(self, backend: str, choice: Choice, jobs: int = 1, time_limit: float = TIME_LIMIT) -> None:
        self._backend, self._choice, self._jobs, self._limit = backend, choice, jobs, time_limit
        self._workers: list[_Worker] = []
        self._ended = self._hung = 0
        self.lost: set[int] = set()
        """Numbers of the checks that ended their process or hung."""

    @cached_property
    def loaded(self) -> Loaded:
        """The backend and the list of its checks, as the first process found them.

        Raises:
            LoadError: the backend's own code failed while it was loaded, ended its process, or took too long.
            BackendError: there is no such backend.
        """
        worker = self._start()
        while (message := worker.hear()) is None:
            self._wait()
        if isinstance(message, _Lost):
            raise LoadError(f"backend {self._backend!r}: the process that loaded it {message.how}")
        if isinstance(message, MxrefError):
            raise message
        assert isinstance(message, Loaded)
        return message

    def verdicts(
        self, groups: Iterable[Iterable[int]], shrink: bool = False
    ) -> Iterator[tuple[int, CheckResult]]:
        """Yield the number and the verdict of each check of the groups, in the order in which they come.

        Args:
            groups: numbers of checks; a group is answered in one process.
            shrink: whether what fails is shrunk; a check whose process is lost meanwhile has no verdict then.

        Raises:
            BackendError: a process cannot load the backend.
        """
        waiting: deque[_Task] = deque((list(group), shrink) for group in groups)
        while True:
            if self._ended >= MOST_ENDED or self._hung >= MOST_HUNG:
                reason = f"{self._ended} checks ended their process and {self._hung} took too long"
                unasked = [] if shrink else [i for numbers, _ in waiting for i in numbers]
                yield from ((i, CheckResult(0, unasked=reason)) for i in unasked)
                waiting.clear()
            while waiting:
                idle = [worker for worker in self._workers if not worker.busy]
                if not idle and len(self._workers) == self._jobs:
                    break
                (idle[0] if idle else self._start()).give(waiting.popleft())
            if not any(worker.busy for worker in self._workers):
                return
            self._wait()
            for worker in list(self._workers):
                message = worker.hear()
                if isinstance(message, MxrefError):
                    raise BackendError(str(message))
                if isinstance(message, _Lost):
                    yield from self._lost(worker, message, waiting, shrink)
                elif isinstance(message, tuple):
                    yield message

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _start(self) -> _Worker:
        with on_a_share(self._jobs) if self._jobs > 1 else nullcontext():
            worker = _Worker(self._backend, self._choice, self._limit)
        self._workers.append(worker)
        return worker

    def _wait(self) -> None:
        """Wait until a process has sent something, for a moment at most."""
        wait([worker.pipe for worker in self._workers], min(_POLL, *(w.left for w in self._workers)))

    def _lost(
        self, worker: _Worker, lost: _Lost, waiting: deque[_Task], shrink: bool
    ) -> Iterator[tuple[int, CheckResult]]:
        """Yield a failure of the check during which a process ended; its other checks go back into the queue."""
        self._workers.remove(worker)
        worker.end()
        if not worker.loaded:
            raise BackendError(
                f"a process that loads backend {self._backend!r} {lost.how} before its first check; read what it "
                "printed, or use fewer processes, which need less memory"
            )
        if not worker.busy:
            return  # between two tasks, so nothing is lost
        at, *rest = worker.busy
        if rest:
            waiting.append((rest, shrink))
        self._hung += lost.hung
        self._ended += not lost.hung
        if not shrink:
            self.lost.add(at)
            check = self._checks[at]
            words = dict(check.asked.describe())
            failure = Failure(check.clause, f"the process {lost.how}", words, lost=True, check=check.title)
            yield at, CheckResult(0, failure)

    @cached_property
    def _checks(self) -> list[Check]:
        return self._choice.checks(self.loaded.capabilities)


Source = Here | Processes
"""Answers the checks of a backend by their numbers."""


@dataclass(frozen=True)
class _Lost:
    """How a process ended, or that it took too long."""

    how: str
    hung: bool = False


class _Worker:
    """A process and its current work."""

    def __init__(self, backend: str, choice: Choice, per_check: float) -> None:
        self.busy: deque[int] = deque()
        """Numbers of its unanswered checks; the first one is running."""
        self.loaded = False
        self._per_check, self._since = per_check, time.monotonic()
        self.pipe, other = Pipe()
        # A new session, so that processes that the backend starts end with this one.
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not take the place of a module of the same name.
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(other.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True,
        )  # fmt: skip
        other.close()
        self._send((backend, choice))

    @property
    def left(self) -> float:
        """Seconds that it may still take."""
        if self.loaded and not self.busy:
            return math.inf
        return max(0.0, self._since + self._limit - time.monotonic())

    @property
    def _limit(self) -> float:
        return self._per_check if self.loaded else max(LEAST_TO_LOAD, self._per_check)

    def give(self, task: _Task) -> None:
        """Send it a task."""
        if self.loaded:
            self._since = time.monotonic()
        self.busy.extend(task[0])
        self._send(task)

    def hear(self) -> Any:
        """Return what it sent: `Loaded`, an error, or a verdict with its number; or `_Lost`; or None, so far."""
        # Checked first, so that a message that was sent before the end is received.
        ended = self._process.poll() is not None
        try:
            if self.pipe.poll():
                message = self.pipe.recv()
                self.loaded, self._since = True, time.monotonic()
                if isinstance(message, tuple):
                    self.busy.popleft()
                return message
        except Exception:  # the connection ended or is unreadable: no further message can come
            ended = True
        if ended:
            return _Lost(self._how())
        return None if self.left else _Lost(f"took longer than {self._limit:g} s", hung=True)

    def end(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended, which the next read reports
            self.pipe.send(message)

    def _how(self) -> str:
        """Return how it ended; its connection closes a moment before the exit code is known."""
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True)
class Loaded:
    """A loaded backend and the list of its checks, as plain data, which another process can receive."""

    name: str
    capabilities: Capabilities
    clauses: list[str]
    """The clause of each check."""
    reasons: list[str | None]
    """The undeclared capability that a check needs, for each check; None if all are declared."""
    groups: list[list[int]]
    """Numbers of the checks to ask, those together that need the same kernels."""

    @classmethod
    def of(cls, backend: Backend, checks: list[Check]) -> Loaded:
        """Return the facts of a backend and its checks."""
        declared = backend.capabilities
        # A plain copy, because the parent could not unpickle a class of the backend's own file.
        plain = Capabilities(**{f.name: getattr(declared, f.name) for f in fields(Capabilities)})
        reasons = [each.undeclared(declared) for each in checks]
        groups = together(checks, (i for i, reason in enumerate(reasons) if reason is None))
        return cls(str(backend.name), plain, [each.clause for each in checks], reasons, groups)


def main(channel: int) -> None:
    """Run the checks that the parent asks for through a connection, given by its file descriptor."""
    os.set_inheritable(channel, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    pipe, asked = Connection(channel), SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    name, choice = asked.get()
    try:
        with Copies() as copies:
            backend = get_backend(name)
            checks = choice.checks(backend.capabilities)
        if copies.returned:
            raise LoadError(
                f"backend {name!r} forked the process while it was loaded, and the copy went on as well"
            )
        pipe.send(Loaded.of(backend, checks))
    except MxrefError as err:
        # A plain copy here too: the class of an error may be the backend's own.
        pipe.send((LoadError if isinstance(err, LoadError) else BackendError)(str(err)))
        return
    subject = Subject(backend)
    while True:
        numbers, subject.shrink = asked.get()
        for i in numbers:
            pipe.send((i, result_of(checks[i], subject)))


def _listen(pipe: Connection, asked: SimpleQueue[Any]) -> None:
    """Receive what the parent asks; end this process and its children when the parent has ended, in whatever way."""
    with suppress(EOFError, OSError):
        while True:
            asked.put(pipe.recv())
    os.killpg(0, signal.SIGKILL)
