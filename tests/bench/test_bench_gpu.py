"""The page of GPU numbers is what was recorded, and nothing else."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from bench import render_gpu
from bench.records import RECORDS, newest, read


def record(tmp_path, date="2026-11-20"):
    """A run of two operations, two products and two errors, and of its tests; written as the tools write them."""
    machine = {"date": date, "gpu": "NVIDIA H200", "driver": "1.2", "torch": "2.11", "triton": "3.6"}

    def row(name, size, ms, per_second, share):
        return {"name": name, "size": size, "ms": ms, "per_second": per_second, "share": share}

    def error(k, *logs):
        ways = ("fp8", "fp8 fast", "ordered", "bf16")
        return {"pattern": "Student-t(3)", "k": k, "log2": dict(zip(ways, logs, strict=True))}

    bench = {
        "machine": machine,
        "copy_tb_per_s": 4.166,
        "quantize": [row("row, RNE", 4096, 0.0123, 3e12, 0.7), row("row, RNE", 8192, 0.05, 3.4e12, 0.815)],
        "gemm": [
            row("cuBLAS bf16", 8192, 1.4, 785e12, 1.0),
            row("MXFP4 ordered", 8192, 1.39, 791e12, 1.007),
        ],
        "error": [
            error(128, -13.5, -9.6, None, None),
            error(512, -12.1, -11.0, None, -20.0),
        ],
    }  # fmt: skip
    tests = {"date": date, "gpu": "NVIDIA H200", "counts": {"passed": 7, "failed": 0, "skipped": 1}, "seconds": 61.2,
             "cases": {"test_all": 4294967296}, "tests": []}  # fmt: skip
    files = tmp_path / "bench.json", tmp_path / "tests.json"
    for path, content in zip(files, (bench, tests), strict=True):
        path.write_text(json.dumps(content))
    return files


def test_tables_say_what_the_records_say(tmp_path):
    bench, tests = (json.loads(path.read_text()) for path in record(tmp_path))
    text = render_gpu.tables_text(bench, tests)
    lines = [line.strip(" *-") for line in text.splitlines()]
    at = lines.index("row, RNE")
    assert lines[at + 1 : at + 4] == ["12", "50", "0.81"]
    at = lines.index("MXFP4 ordered")
    assert lines[at + 1 : at + 3] == ["791", "1.01"]
    at = lines.index("Student-t(3)")
    assert lines[at + 1 : at + 5] == ["2^-12.1 (K = 512)", "2^-9.6 (K = 128)", "0", "2^-20.0 (K = 512)"]
    assert "7 passed, 0 failed, 1 skipped, in 61 s" in text
    assert "4,294,967,296" in text
    assert "4.17 TB/s" in text


def test_records_are_kept_by_gpu_and_date_and_the_newest_is_shown(tmp_path):
    for date in ("2026-11-20", "2027-01-02", "2026-12-31"):
        source, _ = record(tmp_path, date)
        kept = render_gpu.keep("bench_gpu", source, tmp_path)
        assert kept.name == f"bench_gpu_nvidia-h200_{date}.json"
    assert newest("bench_gpu", tmp_path).name == "bench_gpu_nvidia-h200_2027-01-02.json"
    with pytest.raises(SystemExit, match=r"no test_gpu_\*.json"):
        newest("test_gpu", tmp_path)


def test_without_a_record_of_tests_the_page_says_nothing_of_them(tmp_path):
    bench, tests = (json.loads(path.read_text()) for path in record(tmp_path))
    whole, part = (render_gpu.tables_text(bench, t) for t in (tests, None))
    assert whole.startswith(part)
    assert "What is proved there" in whole
    assert "What is proved there" not in part


def test_the_page_shows_the_newest_records():
    tables = render_gpu.parts()["performance_gpu.inc"]
    assert all(f", {read(newest(kind))['machine']['date']}" in tables for kind in ("bench_gpu", "step_gpu"))
    for path in RECORDS.glob("test_gpu_*.json"):
        assert read(path)["counts"]["failed"] == 0


def test_a_gpu_without_errors_of_fp8_has_no_section_of_them(tmp_path):
    bench, tests = (json.loads(path.read_text()) for path in record(tmp_path))
    text = render_gpu.tables_text(bench | {"error": []}, tests)
    assert "Errors of FP8 products" not in text
    assert "Matrix products" in text


# Host code as on a GPU that is not there; kernels are named and not even compiled.
CASES = """
import json, sys
from types import SimpleNamespace
import torch
from mxref_triton.aot import absent

machine = absent.MACHINES[sys.argv[1]]
torch.version.cuda = None if machine.hip else "13.0"
torch.version.hip = machine.hip
absent.become(machine)
from triton.runtime.jit import JITFunction
from bench import bench_gpu
from mxref_triton import TritonBackend
from mxref_triton.products import bounded

# No device answers for its scale bytes.
bounded.first_wrong_scale = lambda multiply: None
JITFunction.run = lambda self, *args, **named: SimpleNamespace(constants=named)
products = {"_scaled_mm": torch._scaled_mm, "mm": torch.mm}
bench_gpu.heavy_tailed = lambda size, seed: torch.empty((size, size), dtype=torch.bfloat16, device="cuda")
bench_gpu.check_quantize = bench_gpu.check_gemm = lambda *operands: None
bench_gpu.peer_cases = lambda xs, size: ()

def named(name):
    def call(*args, **more):
        called.append(name)
        return products[name](*args, **more)
    return call

for name in products:
    setattr(torch, name, named(name))
called, found = [], []
with absent.launches() as seen:
    backend = TritonBackend(conversions="portable")
    for part in (bench_gpu.quantize_cases, bench_gpu.gemm_cases):
        for case in part(backend, 4096):
            seen.clear()
            called.clear()
            case.work(case.sets - 1)
            by_block = [l.compiled.constants["BY_BLOCK"] for l in seen if l.kernel == "_fold"]
            found.append([case.name, case.sets, [l.kernel for l in seen] + called, by_block])
print(json.dumps({"way": backend.way, "cases": found}))
"""


@cache
def cases_on(machine):
    """Return the way of `bounded`, and of each case its sets of inputs, what it launches, and how it folds."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(RECORDS.parents[1] / "tests")
    run = subprocess.run(
        [sys.executable, "-c", CASES, machine], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    return answer["way"], {name: rest for name, *rest in answer["cases"]}


def test_labels_on_a_gfx950_name_what_is_launched_there():
    way, cases = cases_on("gfx950")
    assert way == "mfma"
    launched = {
        name: kernels
        for name, (_, kernels, _) in cases.items()
        if name.startswith(("MXFP4", "torch", "fold"))
    }
    folded = ["_ordered_by_block", "_ordered_misfits"]
    assert launched == {
        "fold into E4M3": ["_fold"],
        "torch.mm bf16": ["mm"],
        # Codes are read as they are, so no weight is prepared.
        "MXFP4 bounded by mfma": ["_flag_scales", "_multiply"],
        "MXFP4 bounded by bf16": ["_flag_scales", "_dequantize", "_dequantize", "mm"],
        "MXFP4 bounded by bf16, weight prepared": ["_flag_scales", "_dequantize", "mm"],
        "MXFP4 ordered": ["_fold", "_fold", *folded],
        "MXFP4 ordered, weight prepared": ["_fold", *folded],
    }
    assert all(all(by_block) for _, _, by_block in cases.values())


def test_labels_on_a_hopper_name_what_is_launched_there_and_are_those_of_the_record():
    way, cases = cases_on("sm_90")
    assert way == "fp8"
    launched = {name: kernels for name, (_, kernels, _) in cases.items()}
    assert launched["fold into E4M3"] == ["_fold"]
    assert launched["cuBLAS bf16"] == ["mm"]
    assert launched["cuBLAS fp8, row-wise scales"] == launched["cuBLAS fp8, tensor scales"] == ["_scaled_mm"]
    assert launched["MXFP4 bounded by fp8"] == ["_bounded_misfits", "_fold", "_fold", "_scaled_mm"]
    assert launched["MXFP4 bounded by fp8, weight prepared"] == ["_bounded_misfits", "_fold", "_scaled_mm"]
    assert launched["MXFP4 bounded by bf16"] == ["_flag_scales", "_dequantize", "_dequantize", "mm"]
    assert launched["MXFP4 ordered"] == ["_fold", "_fold", "_ordered_folded", "_ordered_misfits"]
    assert not any(any(by_block) for _, _, by_block in cases.values())
    bench = read(newest("bench_gpu_nvidia-h200"))
    recorded = [row["name"] for row in bench["quantize"] + bench["gemm"] if row["size"] == 4096]
    assert [name for name in recorded if not name.startswith("torchao")] == list(cases)


def test_inputs_of_a_case_are_together_larger_than_any_cache():
    _, cases = cases_on("gfx950")
    packed = 4096**2 * 17 / 32
    for name, (sets, _, _) in cases.items():
        operands = 2 if name.startswith(("MXFP4", "torch")) else 1
        assert sets * operands * packed >= 512 << 20, name
