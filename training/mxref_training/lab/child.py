"""A child process that trains runs one after another, as its parent sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from mxref.cores import THREAD_VARIABLES
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.progress import Pace
from mxref_training.lab.slots import Slot
from mxref_training.lab.worker import FINISHED
from mxref_training.progress import ProgressSink
from mxref_training.run_folder import LOG

_HEADER = "--- "


@dataclass(eq=False)
class Training:
    """A run that a child trains."""

    run: ArmRun
    sink: ProgressSink
    log: Path
    log_start: int
    """Bytes of the log that were there before this run."""
    began: float = field(default_factory=time.monotonic)
    pace: Pace = field(default_factory=Pace)

    def report(self, method: str, arguments: Sequence[Any]) -> None:
        """Pass a call of the run's `ProgressSink` on."""
        if method == "start":
            self.pace.start(*arguments[1:3])
        elif method == "step":
            self.pace.step(arguments[0])
        getattr(self.sink, method)(*arguments)


@dataclass(eq=False)
class Child:
    """A process in a slot."""

    slot: Slot
    process: subprocess.Popen[bytes]
    training: Training | None = None
    ended: bool = False
    """Whether it has closed its pipe."""
    unread: bytes = b""
    log_start: int | None = None
    """Where the log of the first run began, before the process could print to it."""

    @classmethod
    def start(cls, slot: Slot, run: ArmRun, shared: Mapping[str, Any]) -> Child:
        """Start a process. What it prints before its first run goes to the log of `run`."""
        environment = os.environ | {name: str(run.config.run.threads) for name in THREAD_VARIABLES}
        environment |= slot.environment
        # The child gets this process's import path; -P keeps its working directory out of it.
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with (run.folder / LOG).open("ab") as log:
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mxref_training.lab.worker"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which forwards it
            )
        child = cls(slot, process, log_start=start)
        child._write(shared)
        return child

    def train(self, run: ArmRun, sink: ProgressSink) -> None:
        """Have the process train a run, whose directory is prepared."""
        path = run.folder / LOG
        began = datetime.now(UTC).isoformat(timespec="seconds")
        on = f", GPU {self.slot.device}" if self.slot.device else ""
        with path.open("ab") as log:
            start, self.log_start = log.tell() if self.log_start is None else self.log_start, None
            log.write(
                f"{_HEADER}{began}: process {self.process.pid}, threads {run.config.run.threads}{on}\n".encode()
            )
        self.training = Training(run, sink, path, start)
        self._write({"run": run.to_table(), "log": str(path.absolute())})

    def release(self) -> None:
        """Let the process end: there is no other run for it."""
        with suppress(BrokenPipeError):
            self._input.close()

    def fileno(self) -> int:
        """Return the descriptor from which the process is read."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bool:
        """Pass on what the process reported; return whether its run has finished."""
        data = os.read(self.fileno(), 1 << 16)
        self.ended = not data
        *lines, self.unread = (self.unread + data).split(b"\n")
        finished = False
        for line in lines:
            method, *arguments = json.loads(line)
            assert self.training is not None
            if method == FINISHED:
                finished = True
            else:
                self.training.report(method, arguments)
        return finished

    def take(self) -> Training:
        """Return the run that has ended; the process has none then."""
        assert self.training is not None
        training, self.training = self.training, None
        training.sink.stop()
        return training

    def wait(self) -> int:
        """Return the exit code when the process has ended; it must not wait for a reader or for input until then."""
        self.release()
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            pipe.read()
        return self.process.wait()

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _write(self, table: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # a child that dies first is reported as any other
            self._input.write(json.dumps(table).encode() + b"\n")
            self._input.flush()


def reason(training: Training, code: int) -> str:
    """Return in one line why a process ended without a result for its run."""
    with training.log.open("rb") as file:
        file.seek(training.log_start)
        lines = file.read().decode(errors="replace").split("\n")
    said_by_it = (line.strip() for line in reversed(lines) if not line.startswith(_HEADER))
    last = next(filter(None, said_by_it), "")
    if code < 0:
        killer = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        said = f"killed by {killer}{memory}" + (f" after '{last}'" if last else "")
    else:
        said = last.removeprefix("error: ") or f"exit code {code}"
    return said if str(training.log) in said else f"{said}; see {training.log}"
