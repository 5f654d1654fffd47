"""The labels of the GPU benchmark name what is launched, on a gfx950 and on a Hopper that are not there."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from bench.records import RECORDS, newest, read

pytestmark = pytest.mark.study


# Host code as on a GPU that is not there; kernels are named and not even compiled.
CASES = """
import json, sys
from types import SimpleNamespace
import torch
from aot import absent

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
            by_block = [l.compiled.constants["H"].by_block for l in seen if l.kernel == "_fold"]
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
        "MXFP4 bounded by bf16": ["_flag_scales", "_dequantize", "_dequantize", "_finish", "mm"],
        "MXFP4 bounded by bf16, weight prepared": ["_flag_scales", "_dequantize", "_finish", "mm"],
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
    assert launched["MXFP4 bounded by fp8"] == ["_fold_both", "_bounded_misfits", "_scaled_mm"]
    assert launched["MXFP4 bounded by fp8, weight prepared"] == ["_fold", "_bounded_misfits", "_scaled_mm"]
    assert launched["MXFP4 bounded by bf16"] == ["_flag_scales", "_dequantize", "_dequantize", "mm"]
    assert launched["MXFP4 ordered"] == ["_fold_both", "_ordered_folded", "_ordered_misfits"]
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
