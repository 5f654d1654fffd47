"""Processes that compute on one GPU at the same time, by CUDA MPS.

Without MPS the kernels of several processes take turns, and a small model's kernels leave most of a GPU idle. MPS runs
them side by side. It changes no bit: each process sees the whole GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
"""NVIDIA's program that starts, asks and ends the daemon; the driver brings it."""
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_SECONDS = 30


@dataclass(frozen=True)
class Sharing:
    """How processes share a GPU."""

    active: bool
    """Whether their kernels run at the same time."""
    note: str
    """The same in words, and the reason where they do not."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the processes need."""


@contextmanager
def shared_gpus() -> Iterator[Sharing]:
    """Have processes that are started in the block share their GPUs, through a daemon that ends with the block.

    A daemon that runs already is used and left running. Start it before any process computes on the GPU. Where there is
    none and none can be started, the processes take turns, and the note gives the reason.
    """
    folder = Path(os.environ.get(PIPES, _DEFAULT_PIPES))
    # A daemon that was killed leaves its pipe behind, so it is asked.
    if (folder / "control").exists() and not _control([], "get_server_list\n", dict(os.environ)):
        yield Sharing(True, f"processes share GPUs through the MPS daemon in {folder}")
        return
    if shutil.which(CONTROL) is None:
        yield Sharing(False, f"processes take turns on a GPU: {CONTROL} is not installed")
        return
    # A short path: the daemon makes Unix sockets below it.
    own = Path(tempfile.mkdtemp(prefix="mps-"))
    variables = {PIPES: str(own), _LOGS: str(own)}
    # The daemon numbers the GPUs that it sees, and its clients choose among these by their own variable.
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
    try:
        if failure := _control(["-d"], "", environment):
            yield Sharing(False, f"processes take turns on a GPU: the MPS daemon did not start ({failure})")
            return
        try:
            yield Sharing(True, "processes share GPUs through an MPS daemon", variables)
        finally:
            _control([], "quit\n", environment)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _control(arguments: list[str], text: str, environment: dict[str, str]) -> str:
    """Run NVIDIA's program; return why it failed, or nothing."""
    # The daemon inherits these files and keeps them open: a pipe would not end.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                [CONTROL, *arguments], input=text.encode(), stdout=said, stderr=said, env=environment,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as err:
            return str(err)
        said.seek(0)
        words = said.read().decode(errors="replace").strip().partition("\n")[0]
    return f"exit code {done.returncode}: {words}" if done.returncode else ""
