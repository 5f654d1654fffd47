"""Several arms at a time, each in a child process on its share of the cores.

Two small arms with a core each finish sooner than one after the other with two cores: the parallel parts of a step are
short, and at the end of each part the threads wait for the slowest one. The processes share only the directory of the
ladder. A child trains like this process (`mxref_training.lab.worker`), and reports through a pipe.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from mxref.cores import THREAD_VARIABLES, cores
from mxref.errors import MxrefError
from mxref_training.config import TrainConfig
from mxref_training.lab.arm import ArmRun, Watch
from mxref_training.lab.progress import Display, default_display
from mxref_training.lab.worker import EXIT_INTERRUPTED
from mxref_training.run.interrupt import Interrupted, StopRequest
from mxref_training.run.progress import ProgressSink

LOG = "log.txt"
AUTO_LIMIT = 8
"""Largest default number of processes: each holds a model, its optimizer and the tokens."""

_POLL = 0.2  # seconds until a signal is noticed if no child reports


class ArmError(MxrefError, RuntimeError):
    """Some arms ended without a result, and all others have one."""


def job_count(asked: int | None, runs: int) -> int:
    """Return how many of a ladder's `runs` train at a time; None asks for one per core, up to `AUTO_LIMIT`.

    The number depends on the whole ladder, not on the unfinished runs, so a resumed ladder has the same thread counts.
    """
    return max(1, min(min(cores(), AUTO_LIMIT) if asked is None else asked, runs))


def on_share(config: TrainConfig, jobs: int) -> TrainConfig:
    """Return the configuration with `run.threads` set, if it is not, to the share of one of `jobs` processes.

    Threads belong to the machine and not to the recipe. With another number of threads, a finished arm stays finished,
    and an unfinished one resumes with a note. But a sum over threads then has another order of additions, so equal
    bits are promised only for equal thread counts. Every result records its own.
    """
    threads = config.run.threads or max(1, cores() // jobs)
    return replace(config, run=replace(config.run, threads=threads))


class ChildProcesses:
    """Trains runs in child processes, at most `jobs` at a time; a `Runner`.

    SIGINT or SIGTERM stops every child after its step, with a checkpoint; a second signal ends all children at once. A
    child that dies is reported immediately, and the others continue.

    Raises:
        Interrupted: it was stopped, and runs are unfinished.
        ArmError: runs ended without a result.
    """

    def __init__(
        self,
        jobs: int,
        backend: str,
        display: Callable[[int, int], Display] = default_display,
    ) -> None:
        """`backend` is the name under which children load it; `display` is called with the numbers of jobs and of
        runs.
        """
        self._jobs, self._backend, self._display = jobs, backend, display

    def __call__(self, runs: Sequence[ArmRun], watch: Watch) -> None:
        """Train all of them."""
        if runs:
            with self._display(self._jobs, len(runs)) as display, StopRequest() as request:
                _Batch(runs, watch, display, request).train(self._jobs, self._backend)


class _Batch:
    """The runs of one call: waiting, training, done and failed."""

    def __init__(self, runs: Sequence[ArmRun], watch: Watch, display: Display, request: StopRequest) -> None:
        self.total, self.waiting = len(runs), deque(runs)
        self.running: list[_Child] = []
        self.stopped: list[str] = []
        self.failed: list[str] = []
        self.watch, self.display, self.request = watch, display, request

    def train(self, jobs: int, backend: str) -> None:
        asked = False
        try:
            while self.running or (self.waiting and not self.request.signal):
                while self.waiting and not self.request.signal and len(self.running) < jobs:
                    run = self.waiting[0]
                    self.watch.begin(run)
                    self.running.append(_Child.start(run, backend, self.display.arm(run.name)))
                    self.waiting.popleft()
                for child in _readable(self.running):
                    if child.read_and_see_end():
                        self.running.remove(child)
                        self.end(child)
                if self.request.signal and not asked:
                    asked = True
                    for child in self.running:
                        child.sink.note(
                            f"{self.request.signal}: stops after this step; a second signal ends it at once"
                        )
                    self.stop(signal.SIGINT)
        except KeyboardInterrupt:  # the second signal
            self.stop(signal.SIGKILL)
            raise
        finally:
            self.stop(signal.SIGINT)  # after an error in this process: the children save what they have
            for child in self.running:
                child.wait()
        self.conclude()

    def stop(self, number: signal.Signals) -> None:
        for child in self.running:
            child.process.send_signal(number)

    def end(self, child: _Child) -> None:
        code = child.wait()
        record = child.run.finished() if code == 0 else None
        if record:
            self.watch.done(child.run, record)
        elif self.request.signal and code in (EXIT_INTERRUPTED, -signal.SIGINT):
            self.stopped.append(child.run.name)
            return
        else:
            self.failed.append(child.run.name)
            self.watch.failed(child.run, child.reason(code))
        self.display.done()

    def conclude(self) -> None:
        failed = f"{', '.join(self.failed)} failed" if self.failed else ""
        if self.stopped or self.waiting:
            ended = self.total - len(self.waiting) - len(self.stopped) - len(self.failed)
            stopped = f"{', '.join(self.stopped)} stopped" if self.stopped else ""
            said = ", ".join(filter(None, (f"{ended} of {self.total} runs finished", stopped, failed)))
            raise Interrupted(f"{self.request.signal}: {said}; the same command goes on from there")
        if self.failed:
            logs = "its log.txt" if len(self.failed) == 1 else "their log.txt"
            raise ArmError(
                f"{len(self.failed)} of {self.total} runs without a result: {failed}, for the reasons above and in "
                f"{logs}; the same command goes on with what is missing, and finished arms are kept"
            )


@dataclass
class _Child:
    """The process that trains a run."""

    run: ArmRun
    process: subprocess.Popen[bytes]
    sink: ProgressSink
    log: Path
    log_start: int
    """Bytes of the log that were there before this process."""
    unread: bytes = field(default=b"", init=False)

    @classmethod
    def start(cls, run: ArmRun, backend: str, sink: ProgressSink) -> _Child:
        threads = run.config.run.threads
        environment = os.environ | {name: str(threads) for name in THREAD_VARIABLES}
        # The child gets this process's import path; -P keeps its working directory out of it.
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-P", "-m", "mxref_training.lab.worker", run.name]
        path = run.folder / LOG
        with path.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which passes it on
            )
            began = datetime.now(UTC).isoformat(timespec="seconds")
            log.write(f"--- {began}: process {process.pid}, threads {threads}\n".encode())
            log.flush()
            child = cls(run, process, sink, path, log.tell())
        assert process.stdin is not None
        with (
            suppress(BrokenPipeError),
            process.stdin as pipe,
        ):  # a child that dies first is reported as any other
            pipe.write(json.dumps({"run": run.to_table(), "backend": backend}).encode())
        return child

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read_and_see_end(self) -> bool:
        """Pass on what the child reported; return whether its reports have ended."""
        data = os.read(self.fileno(), 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            method, *arguments = json.loads(line)
            getattr(self.sink, method)(*arguments)
        return not data

    def wait(self) -> int:
        """Return the exit code when the process has ended; it must not wait for a reader until then."""
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            pipe.read()
        self.sink.stop()
        return self.process.wait()

    def reason(self, code: int) -> str:
        """Return in one line why the process ended without a result."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if code < 0:
            killer = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            said = f"killed by {killer}{memory}" + (f" after '{last}'" if last else "")
        else:
            said = last.removeprefix("error: ") or f"exit code {code}"
        return f"{said}; see {self.log}"


def _readable(children: list[_Child]) -> list[_Child]:
    """Return the children that reported something or ended, after `_POLL` seconds at most."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(_POLL)]
