"""Ranks that a test starts by `torchrun`, one for each GPU; no process of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from places import TESTS
from training_setup import metrics

PATIENCE = 240
"""Seconds that a test waits for a job."""


def start(*command: str, ranks: int = 2, restarts: int = 0, **variables: str) -> subprocess.Popen[str]:
    """Start a script with its arguments on each rank; `variables` are of its environment."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # A rank that waits on its GPU for one that was killed does not take the launcher's SIGTERM.
    settings = os.environ | {"OMP_NUM_THREADS": "2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"} | variables
    settings["PYTHONPATH"] = os.pathsep.join([str(TESTS), settings.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*launcher, "--max-restarts", str(restarts), *command],
        env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """Wait for a job and return what it printed."""
    try:
        output = process.communicate(timeout=PATIENCE)[0]
    finally:
        kill(process)
    assert process.returncode == 0, output
    return output


def end_killed(process: subprocess.Popen[str], out: Path, count: int) -> int:
    """Kill the last rank when the run has logged so many lines, and wait for the job; return how many there were."""
    until = time.monotonic() + PATIENCE
    try:
        while not (out / "metrics.jsonl").exists() or metrics(out).count(b"\n") < count:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "no step was logged"
            time.sleep(0.005)
        done = metrics(out).count(b"\n")
        send(ranks_of(process)[-1])
    finally:
        output = end(process)
    assert "-9" in output  # the launcher tells how the rank ended
    return done


def kill(process: subprocess.Popen[str]) -> None:
    """End all processes of a job that still run."""
    if process.poll() is None:  # else its number may be another process's
        for pid in (*ranks_of(process), process.pid):
            send(pid)


def send(pid: int) -> None:
    """Kill a process, if there is one."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the ranks, in their order, that run now."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in found.read_text().split()] if found.exists() else []
