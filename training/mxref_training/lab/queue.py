"""Trains the runs of a ladder: each in a process of its own, as many at a time as there are slots, up to a deadline.

Two small runs with a core each finish sooner than one after the other with two cores: the parallel parts of a step are
short, and at the end of each part the threads wait for the slowest one. Several small models share a GPU in the same
way, and a large one takes several GPUs, by torchrun. The processes share only the directory of the ladder, so nothing
that went wrong in one run reaches another. `worker` is what they run; its standard output brings the progress.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.cores import THREAD_VARIABLES, cores
from mxref.errors import MxrefError
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.interrupt import Interrupted, StopRequest
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.costs import Costs
from mxref_training.lab.study import Tally
from mxref_training.lab.worker import EXIT_INTERRUPTED, HEADER
from mxref_training.progress import PlainProgress, ProgressSink
from mxref_training.run_folder import LOG
from mxref_training.wording import clock

AUTO_LIMIT = 8
"""Largest default number of processes: each holds a model, its optimizer and the tokens."""
AUTO_LIMIT_GPU = 4
"""The same on one GPU."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INTERVAL = 10.0  # seconds between lines of progress, counted over all runs that train
_POLL = 0.2  # seconds until a signal is noticed if no child reports
TO_STOP = 10.0
"""Seconds in which a run ends its step and saves a checkpoint."""


class ArmError(MxrefError, RuntimeError):
    """Some arms ended without a result, and all others have one."""


# ---- slots ----


@dataclass(frozen=True)
class Slot:
    """A place for one run at a time."""

    devices: str = ""
    """Its GPUs, as the environment variable `CUDA_VISIBLE_DEVICES` names them; empty: what this process sees."""
    ranks: int = 1
    """Processes of a run, which torchrun starts where there are several."""


def make_slots(
    jobs: int | None, gpus_per_run: int, config: TrainConfig, backend: Backend, runs: int
) -> list[Slot]:
    """Return the places in which a ladder's runs train: on each visible GPU, or in equal shares of the cores.

    Args:
        jobs: runs at a time: on each GPU, or group of GPUs, or in all on a CPU; None chooses.
        gpus_per_run: ranks of each run. Each takes a GPU of its own, or shares the cores.
        config: the configuration of the runs.
        backend: computes the block formats.
        runs: number of runs of the whole ladder, finished ones too, so that a resumed one has the same thread counts.

    Raises:
        ConfigError: fewer GPUs than a run takes.
    """
    # A numbered device, as cuda:1, is one place of the user's choice.
    if "cuda" not in backend.capabilities.devices or config.run.device not in ("auto", "cuda"):
        if jobs is None:
            jobs = min(max(1, cores() // gpus_per_run), AUTO_LIMIT)
        return [Slot(ranks=gpus_per_run)] * max(1, min(jobs, runs))
    import torch

    count = torch.cuda.device_count()
    groups = count // gpus_per_run
    if not groups:
        raise ConfigError(
            f"--gpus-per-run {gpus_per_run}, but PyTorch sees {count} GPUs here: give fewer, or let it see more"
        )
    if jobs is None:
        jobs = max(1, min(AUTO_LIMIT_GPU, cores() // count)) if gpus_per_run == 1 else 1
    own = [word.strip() for word in os.environ.get(_VISIBLE, "").split(",") if word.strip()]
    names = (own or [str(number) for number in range(count)])[: groups * gpus_per_run]
    devices = [",".join(names[i : i + gpus_per_run]) for i in range(0, len(names), gpus_per_run)]
    # One slot on each GPU comes before a second one on any.
    return [Slot(name, gpus_per_run) for _ in range(jobs) for name in devices][: max(1, runs)]


def on_share(config: TrainConfig, slots: Sequence[Slot]) -> TrainConfig:
    """Return the configuration with `run.threads` set, if it is not, to the share of a rank in one of the slots.

    Threads belong to the machine and not to the recipe, so another number makes no arm a new one. Equal bits are
    promised only for equal thread counts, which every result records: a sum over threads has their order of additions.
    """
    threads = config.run.threads or max(1, cores() // sum(slot.ranks for slot in slots))
    return replace(config, run=replace(config.run, threads=threads))


# ---- progress ----


class Remaining:
    """The steps that the runs of a ladder have left, and how long these take at the speed since it began."""

    def __init__(self, steps: int) -> None:
        self.left, self.done, self._began = steps, 0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds until the last run ends; 0 before the first step has ended."""
        return self.left * (time.monotonic() - self._began) / max(1, self.done)


class Lines(PlainProgress):
    """A run's progress in lines, now and then, which end with the time that all runs of the ladder have left."""

    def __init__(self, name: str, first: int, places: int, remaining: Remaining) -> None:
        """`name` stands before each line, because runs may share a label; the run begins at step `first`."""
        super().__init__(_INTERVAL * places)
        self._name, self._at, self._remaining = name, first, remaining

    def start(self, label: str, step: int, steps: int, step_tokens: int) -> None:
        """Begin, or go on from a checkpoint, whose steps take no time."""
        self._take(step)
        super().start(self._name, step, steps, step_tokens)

    def _take(self, step: int) -> int:
        taken = step - self._at
        self._remaining.left -= taken
        self._at = step
        return taken

    def facts(self, step: int, loss: float | None) -> str:
        """Return losses, rate and remaining time after a step."""
        self._remaining.done += self._take(step)
        return f"{super().facts(step, loss)}, all runs {clock(self._remaining.seconds)}"


# ---- the queue ----


@dataclass
class Queue:
    """Trains runs, each in a slot, in a process of its own or several; a `Runner`.

    SIGINT, SIGTERM or SIGHUP stops every run after its step, with a checkpoint; a second one, `TOGETHER` seconds
    later, ends all at once. A process that dies is reported immediately, and the others continue.
    """

    slots: Sequence[Slot]
    backend: str
    """Name under which the processes load the backend."""
    costs: Costs = field(default_factory=Costs)
    """What runs take; it learns from those that finish."""
    deadline: float | None = None
    """The end on the clock `time.monotonic`: a run that would not end in time is not started. None: no end."""
    clock: Callable[[], float] = time.monotonic

    def __call__(self, runs: Sequence[ArmRun], tally: Tally, corpus: Any) -> None:
        """Train all of them, as `Runner` says; ArmError if runs ended without a result."""
        if runs:
            with tempfile.TemporaryDirectory(prefix="mxref-queue-") as folder, StopRequest() as request:
                _Batch(self, runs, tally, request, Path(folder)).train(corpus.to_table())

    def is_over(self) -> bool:
        """Return whether the runs have to stop now."""
        return self.deadline is not None and self.clock() >= self.deadline

    def allows(self, run: ArmRun) -> bool:
        """Return whether a run would end in time; one whose cost nobody knows may start."""
        if self.deadline is None:
            return True
        return not self.is_over() and self.clock() + (self.costs.expected(run) or 0.0) <= self.deadline


class _Batch:
    """The runs of one call: waiting, training, done and failed."""

    def __init__(
        self, queue: Queue, runs: Sequence[ArmRun], tally: Tally, request: StopRequest, folder: Path
    ) -> None:
        self.queue, self.runs, self.tally, self.request, self.folder = queue, runs, tally, request, folder
        self.waiting = list(runs)
        self.begun: set[int] = set()
        """The seeds of which a run has started."""
        self.children: list[_Child] = []
        self.stopped: list[str] = []
        self.failed: list[str] = []
        self.why = ""
        """The reason why no more runs start: a signal, or the time limit."""

    def train(self, tokens: dict[str, Any]) -> None:
        free = deque(self.queue.slots)
        remaining = Remaining(sum(run.steps for run in self.runs))
        try:
            while True:
                self._look_at_the_clock()
                while free and (run := self._next()):
                    self.tally.begin(run)
                    task = self.folder / f"{len(self.waiting)}.json"
                    task.write_text(json.dumps([self.queue.backend, tokens, run.to_table()]))
                    sink = Lines(run.title, run.first, len(self.queue.slots), remaining)
                    self.children.append(_Child(free.popleft(), run, sink, task))
                if not self.children:
                    break
                for child in _readable(self.children):
                    if child.read():
                        self.children.remove(child)
                        self._ended(child)
                        free.append(child.slot)
        except KeyboardInterrupt:  # the second signal
            self.stop(signal.SIGKILL)
            raise
        finally:
            self.stop(signal.SIGINT)  # after an error in this process: the children save what they have
            for child in self.children:
                child.wait()
        self.conclude()

    def _look_at_the_clock(self) -> None:
        """Stop the runs after their step if a signal asked for it, or the time is up."""
        over = "the time is up" if self.queue.is_over() else ""
        if self.why or not (why := self.request.signal or over):
            return
        self.why = why
        more = "; a second signal ends it at once" if self.request.signal else ""
        for child in self.children:
            child.sink.note(f"{why}: stops after this step{more}")
        self.stop(signal.SIGINT)

    def _next(self) -> ArmRun | None:
        """Return the next run that may start; None if there is none, or too little time for it.

        A seed's runs come before those of the next seed, so that pairs are complete early. Among them the first one,
        the reference, starts first, then the longest ones: short ones at the end keep every place busy.
        """
        allowed = [] if self.why else [run for run in self.waiting if self.queue.allows(run)]
        if not allowed:
            return None
        run = allowed[0]
        if run.seed in self.begun:
            same = [other for other in allowed if other.seed == run.seed]
            run = max(same, key=lambda other: self.queue.costs.expected(other) or 0.0)
        self.begun.add(run.seed)
        self.waiting.remove(run)
        return run

    def stop(self, number: signal.Signals) -> None:
        for child in self.children:
            child.process.send_signal(number)

    def _ended(self, child: _Child) -> None:
        """Keep the result of a run whose process has ended, or take note of why it has none."""
        run, code = child.run, child.wait()
        record = None if code else run.finished()
        if record is not None:
            self.queue.costs.learn(run.arm.name, run.tokens, time.monotonic() - child.began)
            self.tally.done(run, record)
        elif self.why and (code in (EXIT_INTERRUPTED, -signal.SIGINT) or child.slot.ranks > 1):
            self.stopped.append(run.title)
        else:
            self.failed.append(run.title)
            self.tally.failed(run, child.reason(code))

    def conclude(self) -> None:
        """Raise the error that stopped the runs; also after the last one, because what follows is to stop too."""
        failed = f"{', '.join(self.failed)} failed" if self.failed else ""
        total, why = len(self.runs), self.why or self.request.signal
        if why or self.waiting:
            ended = total - len(self.waiting) - len(self.stopped) - len(self.failed)
            stopped = f"{', '.join(self.stopped)} stopped" if self.stopped else ""
            said = ", ".join(filter(None, (f"{ended} of {total} runs finished", stopped, failed)))
            why = why or "too little time is left for another run"
            raise Interrupted(f"{why}: {said}; the same command goes on from there")
        if self.failed:
            logs = "its log.txt" if len(self.failed) == 1 else "their log.txt"
            raise ArmError(
                f"{len(self.failed)} of {total} runs without a result: {failed}, for the reasons above and in "
                f"{logs}; the same command goes on with what is missing, and finished arms are kept"
            )


class _Child:
    """The process of a run, which under torchrun has processes of its own; its directory is prepared."""

    def __init__(self, slot: Slot, run: ArmRun, sink: ProgressSink, task: Path) -> None:
        self.slot, self.run, self.sink = slot, run, sink
        self.began, self.log, self._unread = time.monotonic(), run.folder / LOG, b""
        # The child gets this process's import path; its working directory stays out of it.
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        if threads := run.config.run.threads:  # 0: as many as a process has by itself
            environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        if slot.devices:
            environment[_VISIBLE] = slot.devices
        command = ["-m", "mxref_training.lab.worker", str(task)]
        if slot.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(slot.ranks)]
            command = [*launcher, *command]
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-P", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which forwards it
            )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout

    def fileno(self) -> int:
        """Return the descriptor from which the process is read."""
        return self._pipe.fileno()

    def read(self) -> bool:
        """Pass the progress on that the process reported; return whether it has ended."""
        data = os.read(self.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            method, *arguments = json.loads(line)
            getattr(self.sink, method)(*arguments)
        return not data

    def wait(self) -> int:
        """Return the exit code when the process has ended; it must not wait for a reader until then."""
        self.sink.stop()
        with self._pipe as pipe:
            pipe.read()
        return self.process.wait()

    def reason(self, code: int) -> str:
        """Return in one line why the process ended without a result."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").split("\n")
        said_by_it = [line.strip() for line in lines if line.strip() and not line.startswith(HEADER)]
        last = said_by_it[-1] if said_by_it else ""
        if self.slot.ranks > 1:  # behind the error of a rank the launcher prints its own
            last = next((line for line in said_by_it if line.startswith("error: ")), last)
        if code < 0:
            killer = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            said = f"killed by {killer}{memory}" + (f" after '{last}'" if last else "")
        else:
            said = last.removeprefix("error: ") or f"exit code {code}"
        return said if str(self.log) in said else f"{said}; see {self.log}"


def _readable(children: Sequence[_Child]) -> list[_Child]:
    """Return the children that reported something or ended, after `_POLL` seconds at most."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(_POLL)]
