"""Start a script as two ranks, and hold what they print to what is expected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import warm

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def assert_ranks_print(
    lines: Sequence[str],
    script: str,
    folder: Path,
    *arguments: str,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run a script of this folder twice, with a rank, a store and the arguments; each has to print its rank and a line.

    Args:
        lines: what follows the rank in each line of the output.
        script: its name.
        folder: where the ranks meet.
        arguments: of the script.
        settings: environment variables.
    """
    environment = {**os.environ, **_ONE_THREAD, **(settings or {})}
    command = [sys.executable, str(Path(__file__).with_name(script))]
    ranks = [
        warm.Popen(
            [*command, str(rank), str(folder / "store"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=240)  # Triton 3.9 may end with a report on stderr
            assert process.returncode == 0, output + errors
            assert output.split("\n")[:-1] == [f"{rank} {line}" for line in lines]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
