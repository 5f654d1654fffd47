"""Start scripts and commands on several ranks: by `torchrun`, or cheaper, as `torchrun` does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import warm

TIMEOUT = 600


def start(
    script: str, ranks: int, *arguments: str, settings: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start the ranks; each gets the environment variables that `torchrun` sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **(settings or {}),
    }  # fmt: skip
    common["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), common.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return [
        warm.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for all ranks; return the exit code and the output of each."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def assert_all_pass(script: str, ranks: int, *arguments: str) -> None:
    """Run a script on several ranks, none of which may fail."""
    found = ended(start(script, ranks, *arguments))
    assert [code for code, _ in found] == [0] * ranks, "\n".join(output for _, output in found)


def torchrun(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have `torchrun` start a command on two ranks, with a cache in a folder of the test."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, env=settings, check=False, timeout=TIMEOUT
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines in which the ranks of a job say why they failed."""
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]
