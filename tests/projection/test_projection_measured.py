"""Rates that the projection assumes, measured on a GPU: what is timed, and the shares that a record gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bench.records import newest, read
from places import TESTS
from projection import counted, measure
from projection.assumptions import Assumptions
from projection.cases import DOCS

pytestmark = pytest.mark.study

WRITTEN = """
import runpy
from interpreted import patched_once
patched_once.install()
runpy.run_module("projection.measure", run_name="__main__")
"""


def test_rates_are_measured_where_the_backend_computes(tmp_path):
    """The record that the command writes, in Triton's interpreter."""
    out = tmp_path / "rates.json"
    small = [f"--set=model.{k}={v}" for k, v in {"width": 64, "heads": 2, "kv_heads": 1, "ffn": 96}.items()]
    folders = os.pathsep.join([str(TESTS), str(TESTS / "backends" / "mxref_triton")])
    run = subprocess.run(
        [sys.executable, "-c", WRITTEN, "--tokens", "32", "--json", str(out), *small],
        env=os.environ | {"PYTHONPATH": folders, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    record = json.loads(out.read_text())
    rates = {r["name"]: r for r in record["rates"]}
    assert "portable conversions" in record["backend"]
    assert rates["copy"]["amount"] == 32 * 64 * 2 * 2
    assert rates["quantize X, h16"]["amount"] == 32 * 64 * (2 + 2 * 17 / 32)
    for name, (outputs, inputs) in {
        "q, o": (64, 64),
        "k, v": (32, 64),
        "gate, up": (96, 64),
        "down": (64, 96),
    }.items():
        assert rates[f"MXFP4 product, {name}"]["amount"] == 2 * 32 * outputs * inputs
        assert rates[f"MXFP4 product, {name}"]["assumption"] == "fp4_share"
        assert rates[f"BF16 product, {name}"]["assumption"] == "bf16_share"
    assert len(rates) == 1 + len(counted.ROTATIONS) + 2 * 4
    assert all(r["seconds"] > 0 for r in rates.values())


def test_inputs_taken_in_turns_are_together_larger_than_any_cache():
    gpu = torch.device("cuda", 0)
    for elements in (32768 * 4096, 32768 * 14336, 16384**2, 4096**2):
        sets = measure.input_sets(elements, gpu)
        packed = elements * 17 / 32
        assert sets == 2 or (sets - 1) * packed < 2 * measure.LARGEST_CACHE <= sets * packed
        assert sets >= 2
    assert measure.input_sets(32 * 64, gpu) == 128  # as many as are captured in a graph
    assert measure.input_sets(4096**2, torch.device("cpu")) == 2


def test_shares_that_were_measured_here_are_those_of_the_record():
    path = newest("bench_gpu_nvidia-h200")
    record = read(path)
    # The largest product is at times slowed down by what ran before it; the high end of a share is what was reached.
    rates: dict[str, float] = {}
    for row in record["gemm"]:
        rates[row["name"]] = max(rates.get(row["name"], 0.0), row["per_second"])
    assumed = Assumptions()
    # The data sheet of the H200: 4.8 TB/s, 989.5 and 1979 TFLOP/s dense.
    assert assumed.memory_share.high == pytest.approx(record["copy_tb_per_s"] / 4.8, abs=0.02)
    assert assumed.bf16_share.high == pytest.approx(rates["cuBLAS bf16"] / 989.5e12, abs=0.02)
    assert assumed.fp8_share.high == pytest.approx(rates["cuBLAS fp8, tensor scales"] / 1979e12, abs=0.02)
    (ms,) = (r["ms"] for r in record["quantize"] if (r["name"], r["size"]) == ("dual, H16", 16384))
    issue_ms = 0.2019  # 25.2 instructions for each of 2^28 elements, by 132 SMs of 128 lanes at 1.98 GHz
    assert assumed.vector_share.nominal == pytest.approx(issue_ms / ms, abs=0.02)


def test_the_check_on_an_h200_shows_what_was_measured():
    path = newest("bench_gpu_nvidia-h200")
    record = read(path)
    shown = re.findall(
        r"   \* - ((?:row|dual), \w+)\n     - (\d+)\n     - (\d+)\n     - (\w+)",
        (DOCS / "explanation" / "projection.rst").read_text(),
    )
    assert len(shown) == 5
    assert f"measured on {record['machine']['date']}" in (DOCS / "explanation" / "projection.rst").read_text()
    for name, computed, measured, binds in shown:
        (ms,) = (r["ms"] for r in record["quantize"] if (r["name"], r["size"]) == (name, 16384))
        assert int(measured) == pytest.approx(ms * 1e3, rel=0.04)  # what another run may differ by
        if binds == "memory":
            moved = (2 + 17 / 32 * (2 if name.startswith("dual") else 1)) * 2**28
            assert int(computed) == pytest.approx(moved / record["copy_tb_per_s"] / 1e6, rel=0.03)
