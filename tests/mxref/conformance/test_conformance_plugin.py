"""The pytest plugin: a test for each clause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conform_command import PLANTED, TOY


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MXREF_BACKEND": ""}
    words = ["-p", "mxref.pytest_plugin", "-p", "no:cacheprovider", "-rs"]
    command = [sys.executable, "-m", "pytest", *words, *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_plugin_makes_a_test_of_every_clause(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    done = run_pytest(tmp_path, "--mxref-backend", PLANTED, "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_own.py::test_own PASSED" in done.stdout
    assert re.search(r"scale\.rule\.floor PASSED", done.stdout)
    assert re.search(r"rounding\.rne FAILED", done.stdout)
    assert re.search(r"scale\.rule\.even SKIPPED", done.stdout)
    assert "explain   mxref explain --block 0" in done.stdout
    assert "Traceback" not in done.stdout
    assert "not declared: scale_rules even" in done.stdout


def test_plugin_survives_a_backend_that_ends_its_process(tmp_path):
    (tmp_path / "faulty.py").write_text("import os\nos._exit(0)\n")
    done = run_pytest(tmp_path, "--mxref-backend", f"{tmp_path}/faulty.py:backend")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "its code raised SystemExit: os._exit(0)" in done.stderr


def test_a_backend_that_loads_only_once_fails_its_tests(tmp_path):
    (tmp_path / "once.py").write_text(
        "from pathlib import Path\n"
        "from mxref.capabilities import Capabilities\n"
        "from mxref.reference import ReferenceBackend\n"
        "class Narrow(ReferenceBackend):\n    capabilities = Capabilities()\n"
        "backend = Narrow()\n"
        "mark = Path(__file__).with_name('mark')\n"
        "if mark.exists():\n    raise ValueError('no device is left')\n"
        "mark.touch()\n"
    )
    done = run_pytest(
        tmp_path, "--mxref-backend", f"{tmp_path}/once.py:backend", "-k", "gemm.nan or scale.clamp"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "conformance.protocol: the backend is loaded" in done.stdout
    assert "its code raised ValueError: no device is left" in done.stdout
    assert "KeyError" not in done.stdout


def test_plugin_leaves_the_choice_of_clauses_to_pytest(tmp_path):
    """And passes a good backend."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    done = run_pytest(tmp_path, "--mxref-backend", TOY, "-k", "scale.rule and not even", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"scale\.rule\.floor PASSED", done.stdout)
    assert re.search(r"1 passed, 4 skipped, \d+ deselected", done.stdout)
    assert "test_own PASSED" not in done.stdout


def test_plugin_refuses_an_unknown_backend(tmp_path):
    done = run_pytest(tmp_path, "--mxref-backend", "numbr")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown backend 'numbr'" in done.stderr


def test_plugin_does_nothing_without_its_option(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_own():\n"
        "    assert not [m for m in sys.modules if m.startswith('mxref.conform') or m in ('rich', 'numba', 'torch')]\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
