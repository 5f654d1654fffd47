"""The backend: what it declares, and the kernels behind its operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend, Capabilities
from mxref.hadamard import Rotation
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile
from mxref_numba.dequantize import dequantize
from mxref_numba.gemm import MAX_BOUNDED_SCALE, scaled_gemm
from mxref_numba.hadamard import hadamard
from mxref_numba.path import KernelPath, choose
from mxref_numba.quantize import quantize_planned


class NumbaBackend(Backend):
    """Everything that the reference quantizes, on all CPU cores; GEMM profiles `ordered` and `bounded`."""

    name = "numba"
    capabilities = Capabilities(
        gemm_profiles=frozenset({GemmProfile.ORDERED, GemmProfile.BOUNDED}),
        bounded_class="fp32",
        bounded_max_scale=MAX_BOUNDED_SCALE,
    )

    def __init__(self, path: str = "auto") -> None:
        """Choose the kernels: `auto` takes the fastest that the CPU can run.

        Raises:
            BackendError: a path that is unknown, or that the CPU cannot run.
        """
        self.path = choose(path)
        if path == KernelPath.PORTABLE:
            self.name = "numba-portable"

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return quantize_planned(x, plan)

    def _dequantize(self, q: MXArray, dtype: str) -> NDArray[Any]:
        return dequantize(q, dtype)

    def _hadamard(self, x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
        return hadamard(x, rotation, axis)

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
        return scaled_gemm(a, b, profile, out_dtype)


backend = NumbaBackend()
portable = NumbaBackend("portable")
"""The same bits from plain Numba kernels, also where faster ones exist."""
