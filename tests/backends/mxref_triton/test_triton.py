"""The Triton backend without a GPU: its tests run in a process whose kernels are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

pytest.importorskip("torch")
pytest.importorskip("triton")

TESTS = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(900)
def test_kernels_under_the_interpreter(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        tmp_path / "pt",
    ]
    done = subprocess.run(
        [*command, TESTS],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
