"""Goals of the CPU backend on the machine of docs/explanation/performance.rst: 4096 x 4096, one thread."""

from __future__ import annotations

from typing import Any

SMALLER = ("NVFP4", "MXFP6 E2M3", "MXFP6 E3M2")
"""Formats beside MXFP4 and MXFP8, by their titles."""


def _of_smaller(plain: float, sr: float, h16: float) -> dict[str, float]:
    return {
        f"quantize {title}{label}": goal
        for title in SMALLER
        for label, goal in (("", plain), (" SR", sr), (" H16", h16))
    }


COPY_RATIO = {
    "quantize float32": 1.2,
    "quantize H16": 0.9,
    "quantize SR": 0.6,
    "quantize axis 0": 0.7,
    "quantize_dual, twice": 0.7,
    "quantize_dual H16, twice": 0.4,
    "dequantize float32": 1.5,
    "quantize MXFP8 E4M3": 1.0,
    "quantize MXFP8 E5M2": 1.0,
} | _of_smaller(0.9, 0.5, 0.7)
"""As a multiple of the speed of `np.copyto`."""

AVX2_COPY_RATIO = {
    "quantize float32": 0.6,
    "quantize H16": 0.4,
    "quantize SR": 0.25,
    "dequantize float32": 1.2,
} | _of_smaller(0.5, 0.25, 0.35)
"""The same for vectors of 256 bits."""

MM_RATIO = {"scaled_gemm ordered": 1.5}
"""As a multiple of the speed of PyTorch's bfloat16 product."""

AVX2_MM_RATIO = 1.0
"""Of `scaled_gemm ordered` on vectors of 256 bits, as a multiple of PyTorch's bfloat16 product on such a CPU."""

GOALS = {
    "avx512": {"operation": COPY_RATIO, "gemm": MM_RATIO},
    "avx2": {"operation": AVX2_COPY_RATIO},
}
"""By path and kind of row; PyTorch's product has instructions here that CPUs of the path avx2 lack."""

TWO_THREADS = 1.7
"""Times the speed of one thread."""

DEMO_RATIO = 1.5
"""Of the ladder `paper` with vectors of 256 bits, in times of that with vectors of 512 bits."""

FIRST_CALL_MS = 200.0
"""For the first call in a process whose kernels are on disk, what Numba itself needs included."""


def path_of(row: dict[str, Any]) -> str:
    """Return the path of a row; rows of old records have a name in its place."""
    path: str = row.get("path") or ("portable" if row["backend"].endswith("-portable") else "avx512")
    return path


def operation_goals(row: dict[str, Any]) -> dict[str, float]:
    """Return the goals that operations have on the path of a row, by label."""
    return GOALS.get(path_of(row), {}).get("operation", {})
