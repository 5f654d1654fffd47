"""Steps of several ranks as CUDA graphs, NCCL's operations in them: the bits of the same steps without graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("captured_ranks.py")


@pytest.mark.timeout(300)
def test_the_bits_of_two_ranks_are_those_without_graphs(tmp_path, cases):
    """BF16, and a phase of FP8 before MXFP4; split weights and whole ones; clipped, in micro-batches."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    roots = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False, timeout=280,
        env=os.environ | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs equal" in done.stdout
    cases(4)
