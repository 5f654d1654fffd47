"""A conformance report with control codes, and of a backend that loads only once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from conform_command import PLANTED
from mxref.conformance import check
from mxref.conformance.outcome import to_junit

CODES = "x\x1b[31m\x00\ufffe<b>"
SPELLED = r"x\x1b[31m\x00\ufffe<b>"


def test_a_backend_that_loads_only_once_fails_the_tests_of_the_plugin(tmp_path):
    (tmp_path / "once.py").write_text(
        "from pathlib import Path\n"
        "from mxref.reference import backend\n"
        "mark = Path(__file__).with_name('mark')\n"
        "if mark.exists():\n    raise ValueError('no device is left')\n"
        "mark.touch()\n"
    )
    words = ["-p", "mxref.pytest_plugin", "-p", "no:cacheprovider", "-k", "gemm.nan or scale.clamp"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--mxref-backend", f"{tmp_path}/once.py:backend"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "conformance.protocol: the backend is loaded" in done.stdout
    assert "its code raised ValueError: no device is left" in done.stdout
    assert "KeyError" not in done.stdout


@pytest.fixture(scope="module")
def failing_report():
    return check(PLANTED, level="quick", clauses=["rounding.rne"], shrink=False)


def test_control_codes_are_spelled_out_in_junit(failing_report):
    failure = replace(failing_report.failures[0], message=CODES)
    clause = replace(failing_report.clauses[0], failures=[failure])
    root = ElementTree.fromstring(to_junit(replace(failing_report, backend=CODES, clauses=(clause,))))
    assert root[0].get("name") == f"mxref conform {SPELLED}"
    assert root[0][0].get("classname") == f"mxref.{SPELLED}"
    assert root[0][0][0].get("message") == SPELLED
