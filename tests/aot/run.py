"""Starting workers, one per machine, and reading what they counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mxref.errors import BackendError
from places import TESTS

# Importing the backend fixes the length of a wavefront, so torch must describe the machine before that.
_WORKER = """
import sys, torch
torch.version.hip = sys.argv[2] or None
from aot import absent, worker
absent.become(absent.MACHINES[sys.argv[1]])
worker.main(sys.argv[1], sys.argv[3])
"""


def compile_cases(
    target: str, hip: str | None, names: Sequence[str], jobs: int, keep: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one result per case as it is done: `records`, or `error` where it did not compile.

    Args:
        target: name of the machine.
        hip: what torch.version.hip is there.
        names: of the cases.
        jobs: compilers at a time.
        keep: folder that gets the text of the machine code; None for none.

    Raises:
        BackendError: the worker itself failed; the message quotes its last line.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A process with threads must not fork, and a BLAS starts them when it is loaded.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    request = json.dumps({"cases": list(names), "jobs": jobs, "keep": str(keep) if keep else ""})
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, target, hip or "", request],
            stdout=subprocess.PIPE, stderr=words, env=environment, text=True,
        ) as worker,
    ):  # fmt: skip
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):  # compilers print too
                yield json.loads(line)
        if worker.wait():
            words.seek(0)
            last = " ".join(words.read().strip().splitlines()[-3:])
            raise BackendError(f"compiling for {target} ended with code {worker.returncode}: {last}")
