"""`mxref warm-up`, and the kernels that `mxref backends` reports."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mxref import get_backend
from mxref.cli import main

AVX2 = "mxref_numba.backend:avx2"
LATER = """
import numpy as np
import mxref
from mxref.conformance import check
from mxref.conformance.model import Level
from mxref_numba.compiled import KERNELS
backend = mxref.get_backend({backend!r})
assert check(backend, level=Level.QUICK).total("compared") > 100
large = np.ones((512, 512), np.float32)
q = backend.quantize(large, mxref.OperandSpec())
for result in (backend.dequantize(q), backend.hadamard(large, 16), backend.scaled_gemm(q, q)):
    assert result.shape == large.shape
print(sorted(k.py_func.__qualname__ for k in KERNELS if sum(k.stats.cache_misses.values())))
"""


def test_a_backend_that_compiles_nothing_says_so() -> None:
    result = CliRunner().invoke(main, ["warm-up", "--backend", "reference"])
    assert result.exit_code == 0
    assert "nothing to warm up" in result.output


def test_an_unknown_backend_is_an_error() -> None:
    result = CliRunner().invoke(main, ["warm-up", "--backend", "nubma"])
    assert result.exit_code == 2
    assert "numba" in result.output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["numba", AVX2, "mxref_numba.backend:portable"])
def test_after_a_warm_up_no_process_compiles(backend: str) -> None:
    pytest.importorskip("numba")
    if backend == AVX2:
        path = pytest.importorskip("mxref_numba.path")
        if AVX2.endswith(path.available()[0]) or path.KernelPath.AVX2 not in path.available():
            pytest.skip("no path avx2 beside that of the backend numba")
    threads = os.environ | {"NUMBA_NUM_THREADS": "2"}
    warm_up = [sys.executable, "-c", "from mxref.cli import main; main()", "warm-up", "--backend", backend]
    first = subprocess.run(warm_up, env=threads, capture_output=True, text=True, timeout=280)
    assert first.returncode == 0, first.stderr
    assert "scaled_gemm" in first.stdout
    command = [sys.executable, "-c", LATER.format(backend=backend)]
    later = subprocess.run(command, env=threads, capture_output=True, text=True, timeout=280)
    assert later.returncode == 0, later.stderr
    assert later.stdout.strip() == "[]", "compiled although the warm-up had been there"


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
