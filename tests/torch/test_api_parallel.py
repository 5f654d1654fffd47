"""Data parallelism on the CPU, plain and sharded: a followed handle gives every rank random bits of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    script = Path(__file__).with_name("api_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
            assert output.split("\n")[:-1] == [f"{rank} {case}" for case in ("ddp", "fsdp", "policy")]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
