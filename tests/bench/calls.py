"""The overhead of a call: on a 32 x 32 array, and of the first call in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

from bench.operations import H16, PLAIN
from mxref import Backend

CALLS = 200

FIRST = """
import json, sys, time
marks = [("", time.perf_counter())]
mark = lambda name: marks.append((name, time.perf_counter()))
import numpy as np, ml_dtypes
mark("import numpy, ml_dtypes")
import numba
mark("import numba")
import mxref
backend = mxref.get_backend(sys.argv[1])
mark("import mxref and the backend")
from numba.core.registry import cpu_target
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
mark("numba's own tables")
x = np.ones((64, 64), np.float32)
q = backend.quantize(x, mxref.OperandSpec())
mark("first quantize")
backend.quantize(x, mxref.OperandSpec(hadamard=16))
mark("first quantize H16")
backend.dequantize(q)
mark("first dequantize")
backend.hadamard(x, 16)
mark("first hadamard")
backend.scaled_gemm(q, q)
mark("first scaled_gemm")
from mxref_numba.kernels import KERNELS
compiled = sum(sum(k.stats.cache_misses.values()) for k in KERNELS)
print(json.dumps({"compiled": compiled, "ms": {
    name: 1e3 * (end - start) for (_, start), (name, end) in zip(marks, marks[1:])}}))
"""


def first_calls(name: str, processes: int) -> dict[str, float]:
    """Return milliseconds of imports and first calls, each the least of several new processes with a warm cache.

    Raises:
        RuntimeError: a kernel was compiled, so the cache was not warm.
    """
    found = []
    for _ in range(processes + 1):
        done = subprocess.run(
            [sys.executable, "-c", FIRST, name], stdout=subprocess.PIPE, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    if any(run["compiled"] for run in found[1:]):
        raise RuntimeError("a second process compiled kernels: the cache does not work")
    return {step: min(run["ms"][step] for run in found[1:]) for step in found[0]["ms"]}


def overheads(backend: Backend) -> dict[str, float]:
    """Return microseconds of calls on a 32 x 32 array, the least of 30 means."""
    x = np.random.default_rng(0).standard_normal((32, 32), np.float32)
    q, y = backend.quantize(x, PLAIN), np.empty_like(x)
    works = {
        "quantize": lambda: backend.quantize(x, PLAIN),
        "quantize H16": lambda: backend.quantize(x, H16),
        "quantize_dual": lambda: backend.quantize_dual(x, (PLAIN, PLAIN)),
        "fake_quantize": lambda: backend.fake_quantize(x, PLAIN),
        "dequantize": lambda: backend.dequantize(q),
        "hadamard 16": lambda: backend.hadamard(x, 16),
        "scaled_gemm ordered": lambda: backend.scaled_gemm(q, q),
        "np.copyto": lambda: np.copyto(y, x),
    }
    return {label: _microseconds(work) for label, work in works.items()}


def _microseconds(work: Any) -> float:
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / CALLS
