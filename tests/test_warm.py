"""Processes forked from a warm one run the tree under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import mxref
import mxref_torch
import mxref_training

PACKAGES = {module.__name__: Path(module.__file__).parent for module in (mxref, mxref_torch, mxref_training)}
WHERE = "; ".join(f"import {name}; print({name}.__file__)" for name in PACKAGES)
ASKS = f"""
import subprocess, sys, warm
fork = warm.Popen([sys.executable, "-P", "-c", {WHERE!r}], stdout=subprocess.PIPE, text=True)
print(fork.communicate()[0], end="")
{WHERE}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no forks of a warm process")
def test_a_fork_imports_the_tree_of_the_process_that_asks_for_it(tmp_path: Path) -> None:
    for name, folder in PACKAGES.items():
        (tmp_path / name).symlink_to(folder)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parent)))
    command = [sys.executable, "-P", "-c", ASKS]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    places = [str(tmp_path / name / "__init__.py") for name in PACKAGES]
    assert done.stdout.splitlines() == 2 * places
