"""`mxref warm-up`, and the kernels that `mxref backends` reports."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mxref import get_backend
from mxref.cli import main
from places import TESTS

THREADS = os.environ | {"NUMBA_NUM_THREADS": "2"}
LATER = """
import json
import numpy as np
import mxref
from every_path import EveryPath
from mxref.conformance import check
from mxref_numba.kernels import KERNELS
backend = EveryPath()
report = check(backend, level="quick")
large = np.ones((512, 512), np.float32)
q = backend.quantize(large, mxref.OperandSpec())
for result in (backend.dequantize(q), backend.hadamard(large, 16), backend.scaled_gemm(q, q)):
    assert result.shape == large.shape
compiled = sorted(k.py_func.__qualname__ for k in KERNELS if sum(k.stats.cache_misses.values()))
print(json.dumps({
    "paths": [each.path for each in backend.paths],
    "compiled": compiled,
    "compared": report.total("compared"),
    "failures": [(f.clause, f.check, f.message) for f in report.failures],
}))
"""
"""A process that asks every path of the backend for everything, in each format."""


def test_a_backend_that_compiles_nothing_says_so() -> None:
    result = CliRunner().invoke(main, ["warm-up", "--backend", "reference"])
    assert result.exit_code == 0
    assert "nothing to warm up" in result.output


def test_an_unknown_backend_is_an_error() -> None:
    result = CliRunner().invoke(main, ["warm-up", "--backend", "nubma"])
    assert result.exit_code == 2
    assert "numba" in result.output


@pytest.fixture(scope="module")
def paths() -> list[str]:
    """Return the paths that this CPU has, after a warm-up of each."""
    path = pytest.importorskip("mxref_numba.path")
    others = [f"mxref_numba.backend:{each}" for each in path.available()[1:]]
    for name in ("numba", *others):
        command = [sys.executable, "-c", "from mxref.cli import main; main()", "warm-up", "--backend", name]
        done = subprocess.run(command, env=THREADS, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert "scaled_gemm" in done.stdout
    return list(path.available())


@pytest.mark.timeout(600)
def test_after_a_warm_up_no_process_compiles(paths: list[str]) -> None:
    """The process that comes later conforms too, on every path, so that no other test asks for that at level quick."""
    command, there = [sys.executable, "-c", LATER], THREADS | {"PYTHONPATH": str(TESTS)}
    later = subprocess.run(command, env=there, capture_output=True, text=True, timeout=280)
    assert later.returncode == 0, later.stderr
    found = json.loads(later.stdout)
    assert found["compiled"] == [], "compiled although the warm-up had been there"
    assert found["failures"] == []
    assert found["compared"] > 100
    assert found["paths"] == paths


def test_backends_says_which_kernels_run_on_how_many_threads_and_where_they_are_kept() -> None:
    numba = pytest.importorskip("numba")
    details = get_backend("numba").details()
    assert f"{numba.get_num_threads()} thread" in details
    assert "__pycache__" in details or "numba" in details
    portable = get_backend("mxref_numba.backend:portable").details()
    assert portable.startswith("portable kernels")
    as_json = json.loads(CliRunner().invoke(main, ["backends", "--json"]).output)
    listed = {row["name"]: row.get("details") for row in as_json["backends"]}
    assert listed["numba"] == details
    assert listed["reference"] == ""
    assert "numba runs " in CliRunner().invoke(main, ["backends"]).output
