"""Checks answered in other processes: several at a time, and a crash is a finding and not the end of a run."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from mxref.conformance.model import Check, Failure, Subject, Verdict
from mxref.conformance.suite import Choice, verdict_of
from mxref.cores import on_a_share
from mxref.discovery import get_backend
from mxref.errors import BackendError

_Task = tuple[list[int], bool]
"""Numbers of checks, and whether to shrink what fails."""
_GRACE = 10.0  # seconds


class Processes:
    """Processes that load a backend by its name and answer checks of it, at most `jobs` at a time."""

    def __init__(self, backend: str, choice: Choice, checks: list[Check], jobs: int) -> None:
        self._backend, self._choice, self._checks, self._jobs = backend, choice, checks, jobs
        self._workers: list[_Worker] = []

    def verdicts(self, groups: Iterable[list[int]], shrink: bool = False) -> Iterator[tuple[int, Verdict]]:
        """Yield the number and the verdict of each check of the groups, in the order in which they come.

        Args:
            groups: numbers of checks; a group is answered in one process.
            shrink: whether what fails is shrunk.

        Raises:
            BackendError: a process cannot load the backend, or finds other checks for it.
        """
        waiting: deque[_Task] = deque((group, shrink) for group in groups)
        while waiting or any(worker.busy for worker in self._workers):
            while len(waiting) > sum(not w.busy for w in self._workers) and len(self._workers) < self._jobs:
                self._workers.append(self._start())
            for worker in self._workers:
                if waiting and not worker.busy:
                    worker.give(waiting.popleft())
            heard = wait([worker.pipe for worker in self._workers])
            for worker in [worker for worker in self._workers if worker.pipe in heard]:
                try:
                    answer = worker.pipe.recv()
                except (EOFError, OSError):
                    self._workers.remove(worker)
                    yield from self._crashed(worker, waiting, shrink)
                    continue
                if isinstance(answer, str):
                    self._agreed(answer)
                    worker.ready = True
                else:
                    worker.busy.popleft()
                    yield answer

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _start(self) -> _Worker:
        # Spawned, not forked: a GPU's driver does not live through a fork.
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self._backend, self._choice), daemon=True)
        with on_a_share(self._jobs):
            process.start()
        other.close()
        return _Worker(process, pipe)

    def _agreed(self, checksum: str) -> None:
        if checksum != _checksum(self._checks):
            raise BackendError(
                f"backend {self._backend!r} declares something else each time that it is loaded, so processes "
                "cannot share its checks; run them in one process"
            )

    def _crashed(self, worker: _Worker, waiting: deque[_Task], shrink: bool) -> Iterator[tuple[int, Verdict]]:
        """Yield a failure of the check that a process ended at; what it has not begun waits again."""
        worker.process.join(_GRACE)  # its end of the pipe closes a moment before it has an exit code
        worker.end()
        ended = _ended(worker.process.exitcode)
        if not worker.ready:
            raise BackendError(
                f"a process that loads backend {self._backend!r} {ended} before its first check; what it "
                "printed tells why, and fewer processes need less memory"
            )
        if not worker.busy:
            return  # between two tasks, so nothing is lost
        at, *rest = worker.busy
        check = self._checks[at]
        yield at, Verdict(0, Failure(check.clause, check.title, f"the process {ended}", check.describe()))
        if rest:
            waiting.append((rest, shrink))


@dataclass
class _Worker:
    """A process, and what it is at."""

    process: BaseProcess
    pipe: Connection
    busy: deque[int] = field(default_factory=deque)
    """Numbers of the checks that it has not answered, the one it is at first."""
    ready: bool = False

    def give(self, task: _Task) -> None:
        self.busy.extend(task[0])
        with suppress(BrokenPipeError):  # it has died, which is seen when it is heard
            self.pipe.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, backend: str, choice: Choice) -> None:
    """Answer checks until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that ends this one
    subject = Subject(get_backend(backend))
    checks = choice.checks(subject.capabilities)
    pipe.send(_checksum(checks))
    while True:
        try:
            numbers, subject.shrink = pipe.recv()
        except EOFError:
            return
        for i in numbers:
            pipe.send((i, verdict_of(checks[i], subject)))


def _checksum(checks: list[Check]) -> str:
    text = "\n".join(f"{each.clause} {each.title} {each.op} {each.needs}" for each in checks)
    return hashlib.sha256(text.encode()).hexdigest()


def _ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
