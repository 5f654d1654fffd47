"""The environment in which NumPy, PyTorch, Numba and libm take the code paths of an older x86-64 CPU.

    PYTHONPATH=tests python -m older_cpu pytest tests/docs/test_readme.py

Sums of a BLAS, `exp` and `log` then differ in their last bits, and the Numba backend uses its kernels for AVX2.
"""

from __future__ import annotations

import os
import platform
import sys

import numpy as np

_AVX2 = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt cx16 avx avx2 fma f16c bmi bmi2 lzcnt movbe"


def environment() -> dict[str, str]:
    """Return the variables of a process that computes as on an older CPU; none but on x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    # NumPy warns of a name that this CPU lacks.
    present = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    return {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": " ".join(present),
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in _AVX2.split()),
        # libm chooses its exp, log, sin and pow by these.
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL",
    }


if __name__ == "__main__":
    if not (settings := environment()):
        sys.exit(f"older_cpu knows x86-64 only, and this is {platform.machine()}")
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | settings)
