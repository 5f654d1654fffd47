"""Ranks that a test starts by `torchrun`, one for each GPU; no process of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from places import TESTS

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


def kill(process: subprocess.Popen[str]) -> None:
    """End all processes of a job that still run."""
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
