"""The benchmark times the named operations and refuses a wrong backend, and its page shows the recorded numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from bench import operations
from bench.goals import COPY_RATIO, MM_RATIO
from mxref import get_backend
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref_numba import path
from places import ROOT

TINY = ["--sizes=64", "--gemm-sizes=64", "--threads=1", "--seconds=0.01", "--no-peers"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.bench_cpu", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=280,
    )


class _OneCode(ReferenceBackend):
    """The reference, except that one code is wrong, at a place that moves."""

    name = "one-code"
    place = 0

    def _quantize(self, x: Any, plan: Any) -> tuple[Any, Any]:
        codes, scales = super()._quantize(x, plan)
        codes.reshape(-1)[self.place] ^= 1
        return codes, scales


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    "label",
    [
        "quantize float32",
        "quantize SR",
        "quantize axis 0",
        "quantize_dual, twice",
        "fake_quantize",
        "quantize MXFP8 E4M3",
    ],
)
def test_one_wrong_code_at_either_end_is_found(place: int, label: str) -> None:
    operation = next(op for op in operations.OPERATIONS if op.label == label)
    x = operations.inputs(128)[operation.dtype]
    right, wrong = get_backend("reference"), _OneCode()
    wrong.place = place
    q = right.quantize(x, operations.PLAIN)
    operations.check_bits("right", operation, operation.run(right, x, q), x)
    with pytest.raises(operations.BitsDiffer, match=f"one-code: {label}"):
        operations.check_bits("one-code", operation, operation.run(wrong, x, q), x)


def test_every_operation_passes_on_the_reference_and_checks_all_of_a_small_matrix() -> None:
    reference = get_backend("reference")
    for row in operations.measure(reference, 64, 0.0, 1):
        assert row["min_ms"] > 0
        copies = 2 if "twice" in row["operation"] else 1
        assert row["ratio"] == pytest.approx(copies * row["copy_ms"] / row["min_ms"])


WRONG = """
from mxref.reference import ReferenceBackend
from mxref_numba import path

class OneCode(ReferenceBackend):
    name = "one-code"

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        codes.reshape(-1)[-1] ^= 1
        return codes, scales

backend = OneCode()
"""


def test_a_wrong_backend_is_not_timed(tmp_path: Path) -> None:
    out, wrong = tmp_path / "out.json", tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    done = bench(*TINY, f"--backend={wrong}:backend", f"--json={out}")
    assert done.returncode == 1
    assert "one-code: quantize float32 differs from the reference; nothing is timed" in done.stderr
    assert not out.exists()


@pytest.mark.study
def test_a_whole_run_in_small(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(*TINY, f"--json={out}")
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    kinds = {row["kind"] for row in results["rows"]}
    assert kinds == {"operation", "gemm", "overhead", "first call"}
    measured = {row["operation"] for row in results["rows"]}
    assert measured >= COPY_RATIO.keys()
    assert measured >= MM_RATIO.keys()
    assert results["machine"]["cores"] >= 1
    assert "quantize float32" in done.stdout
    paths = {row["path"] for row in results["rows"] if row["operation"] == "quantize float32"}
    assert paths == set(path.available())


def test_quantized_slabs_lie_where_the_matrix_has_them() -> None:
    x = operations.inputs(128)["float32"]
    q = get_backend("reference").quantize(x, operations.SR, placement=Placement(operations.STREAM))
    codes, scales = operations._expected(x, operations.SR, 1, slice(64, 128))
    assert np.array_equal(q.codes[64:], codes)
    assert np.array_equal(q.scales[64:], scales)
