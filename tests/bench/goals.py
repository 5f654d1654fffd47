"""What the CPU backend is meant to reach, on the machine of docs/performance.rst: 4096 x 4096, one thread."""

from __future__ import annotations

COPY_RATIO = {
    "quantize float32": 1.2,
    "quantize H16": 0.9,
    "quantize SR": 0.4,
    "quantize axis 0": 0.7,
    "dequantize float32": 1.5,
    "quantize MXFP8 E4M3": 1.0,
    "quantize MXFP8 E5M2": 1.0,
}
"""As a multiple of the speed of `np.copyto`."""

MM_RATIO = {"scaled_gemm ordered": 1.5}
"""As a multiple of the speed of PyTorch's bfloat16 product."""

FIRST_CALL_MS = 200.0
"""For the first call in a process whose kernels are on disk, what Numba itself needs included."""
