"""Where a backend answers its checks: in this process, or in others, so that one that crashes only fails a check.

`Here` asks in this process. `Processes` starts others and receives the results. `main` is their other end: it loads the
backend and runs its checks. A process is a fresh interpreter, because a GPU driver does not survive a fork. It sends
`Loaded` or `Refused` once, and then the number and the verdict of every check that it was given.
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
from typing import Any

from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.conformance.checking import Check, Subject
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.suite import Choice, Outline, outline, result_of
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
    "from mxref.conformance.isolation import main; main(*map(int, sys.argv[2:]))"
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
        """The backend's name and the outline of its checks, as the first process found them.

        Raises:
            LoadError: the backend's own code failed while it was loaded, ended its process, or took too long.
            BackendError: there is no such backend.
        """
        worker = self._start()
        while True:
            wait([worker.pipe], min(_POLL, worker.left))
            message, end = worker.hear()
            if isinstance(message, Loaded):
                worker.ready()
                return message
            if isinstance(message, Refused):
                raise (LoadError if message.its_fault else BackendError)(message.text)
            if end:
                raise LoadError(f"backend {self._backend!r}: the process that loaded it {end}")

    def verdicts(
        self, groups: Iterable[Iterable[int]], shrink: bool = False
    ) -> Iterator[tuple[int, CheckResult]]:
        """Yield the number and the verdict of each check of the groups, in the order in which they come.

        Args:
            groups: numbers of checks; a group is answered in one process.
            shrink: whether what fails is shrunk; a check whose process is lost meanwhile has no verdict then.

        Raises:
            BackendError: a process cannot load the backend, or finds other checks for it.
        """
        waiting: deque[_Task] = deque((list(group), shrink) for group in groups)
        while waiting or any(worker.busy for worker in self._workers):
            if self._ended >= MOST_ENDED or self._hung >= MOST_HUNG:
                yield from self._given_up(waiting)
                if not any(worker.busy for worker in self._workers):
                    return
            while len(waiting) > sum(not w.busy for w in self._workers) and len(self._workers) < self._jobs:
                self._start()
            for worker in self._workers:
                if waiting and not worker.busy:
                    worker.give(waiting.popleft())
            wait([worker.pipe for worker in self._workers], min(_POLL, *(w.left for w in self._workers)))
            for worker in list(self._workers):
                message, end = worker.hear()
                if isinstance(message, Loaded):
                    if message.outline != self.loaded.outline:
                        raise BackendError(
                            f"backend {self._backend!r} declares different capabilities each time it is loaded, so "
                            "processes cannot share its checks; run them in one process"
                        )
                    worker.ready()
                elif isinstance(message, Refused):
                    raise BackendError(message.text)
                elif message is not None:
                    worker.answered()
                    yield message
                elif end:
                    yield from self._lost(worker, end, waiting, shrink)

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

    def _lost(
        self, worker: _Worker, end: str, waiting: deque[_Task], shrink: bool
    ) -> Iterator[tuple[int, CheckResult]]:
        """Yield a failure of the check during which a process ended; its other checks go back into the queue."""
        self._workers.remove(worker)
        worker.end()
        if not worker.loaded:
            raise BackendError(
                f"a process that loads backend {self._backend!r} {end} before its first check; read what it "
                "printed, or use fewer processes, which need less memory"
            )
        if not worker.busy:
            return  # between two tasks, so nothing is lost
        at, *rest = worker.busy
        if rest:
            waiting.append((rest, shrink))
        if worker.overdue:
            self._hung += 1
        else:
            self._ended += 1
        if not shrink:
            self.lost.add(at)
            check = self._described[at]
            words = dict(check.asked.describe())
            failure = Failure(check.clause, f"the process {end}", words, lost=True, check=check.title)
            yield at, CheckResult(0, failure)

    def _given_up(self, waiting: deque[_Task]) -> Iterator[tuple[int, CheckResult]]:
        """Yield for every waiting check a verdict that it is skipped, with the reason."""
        while waiting:
            numbers, shrink = waiting.popleft()
            if not shrink:
                reason = f"{self._ended} checks ended their process and {self._hung} took too long"
                yield from ((i, CheckResult(0, unasked=reason)) for i in numbers)

    @cached_property
    def _described(self) -> list[Check]:
        return self._choice.checks(self.loaded.capabilities)


Source = Here | Processes
"""Answers the checks of a backend by their numbers."""


class _Worker:
    """A process and its current work."""

    def __init__(self, backend: str, choice: Choice, per_check: float) -> None:
        self.busy: deque[int] = deque()
        """Numbers of its unanswered checks; the first one is running."""
        self.loaded = False
        self._per_check, self._limit, self._since = per_check, max(LEAST_TO_LOAD, per_check), time.monotonic()
        self.pipe, other = Pipe()
        alive, self._alive = os.pipe()
        descriptors = (other.fileno(), alive)
        # A new session, so that processes that the backend starts end with this one.
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not take the place of a module of the same name.
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path), *map(str, descriptors)],
            stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
        other.close()
        os.close(alive)
        self._send((backend, choice))

    @property
    def left(self) -> float:
        """Seconds that it may still take."""
        if self.loaded and not self.busy:
            return math.inf
        return max(0.0, self._since + self._limit - time.monotonic())

    @property
    def overdue(self) -> bool:
        """Whether it took longer than it may."""
        return self.left == 0.0

    def give(self, task: _Task) -> None:
        """Send it a task."""
        self.busy.extend(task[0])
        self._send(task)
        if self.loaded:
            self.ready()

    def ready(self) -> None:
        """Begin to count the time of a check."""
        self.loaded = True
        self._limit, self._since = self._per_check, time.monotonic()

    def answered(self) -> None:
        """Go on to the next check."""
        self.busy.popleft()
        self._since = time.monotonic()

    def hear(self) -> tuple[Any, str | None]:
        """Return what it sent, or how it ended, or neither."""
        # Checked first, so that a message that was sent before the end is received.
        ended = self._process.poll() is not None
        try:
            if self.pipe.poll():
                return self.pipe.recv(), None
        except Exception:  # the connection ended or is unreadable: no further message can come
            return None, self._how()
        if ended:
            return None, self._how()
        return None, f"took longer than {self._limit:g} s" if self.overdue else None

    def end(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()
        os.close(self._alive)

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
    """The message that a backend was loaded: its name, and the outline of its checks."""

    name: str
    capabilities: Capabilities
    outline: Outline

    @classmethod
    def of(cls, backend: Backend, checks: list[Check]) -> Loaded:
        """Return the message for a backend and its checks."""
        # A plain copy, because the parent could not unpickle a class of the backend's own file.
        declared = backend.capabilities
        plain = {f.name: getattr(declared, f.name) for f in fields(Capabilities)}
        return cls(str(backend.name), Capabilities(**plain), outline(checks, declared))


@dataclass(frozen=True)
class Refused:
    """The message that a backend was not loaded: the reason, and whether its own code is to blame."""

    text: str
    its_fault: bool


def main(channel: int, alive: int) -> None:
    """Run the requested checks until the channel ends.

    Args:
        channel: file descriptor of the connection to the parent.
        alive: file descriptor of a pipe that ends when the parent does.
    """
    for descriptor in (channel, alive):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    pipe = Connection(channel)
    name, choice = pipe.recv()
    try:
        with Copies() as copies:
            backend = get_backend(name)
            checks = choice.checks(backend.capabilities)
        if copies.returned:
            raise LoadError(
                f"backend {name!r} forked the process while it was loaded, and the copy went on as well"
            )
        loaded = Loaded.of(backend, checks)
    except MxrefError as err:
        pipe.send(Refused(str(err), isinstance(err, LoadError)))
        return
    pipe.send(loaded)
    subject = Subject(backend)
    while True:
        try:
            numbers, subject.shrink = pipe.recv()
        except EOFError:
            return
        for i in numbers:
            pipe.send((i, result_of(checks[i], subject)))


def _end_with_parent(alive: int) -> None:
    """End this process and its children when the parent has ended, in whatever way."""
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)
