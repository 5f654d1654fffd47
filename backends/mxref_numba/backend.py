"""The backend: what it declares, and the kernels behind its operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.capabilities import Capabilities, every_gemm
from mxref.formats import BLOCK_FORMATS
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import Rotation
from mxref_numba.compiled import running
from mxref_numba.gemm.profiles import MAX_BOUNDED_SCALE, prepare, scaled_gemm
from mxref_numba.path import KernelPath, choose
from mxref_numba.scalar.dequantize import dequantize
from mxref_numba.scalar.quantize import quantize_planned
from mxref_numba.scalar.transform import hadamard
from mxref_numba.vector.dequantize import dequantize as dequantize_vector
from mxref_numba.vector.quantize import Quantized
from mxref_numba.vector.quantize import quantize_dual as quantize_dual_vector
from mxref_numba.vector.quantize import quantize_planned as quantize_vector
from mxref_numba.vector.staging import hadamard as hadamard_vector
from mxref_numba.vector.target import TARGETS
from mxref_numba.warmup import warm_up

_FORMATS = frozenset(BLOCK_FORMATS.values())


class NumbaBackend(Backend):
    """Every block format as the reference has it, on all CPU cores; GEMMs `ordered` and `bounded`."""

    name = "numba"
    capabilities = Capabilities(
        formats=_FORMATS,
        scale_thresholds=True,
        gemms=every_gemm({GemmProfile.ORDERED, GemmProfile.BOUNDED}, _FORMATS),
        bounded_class="fp32",
        bounded_max_scale=MAX_BOUNDED_SCALE,
    )

    def __init__(self, path: str = "auto") -> None:
        """Choose the kernels by name. `auto` takes those that MXREF_NUMBA_PATH names; without this variable, the
        fastest that the CPU can run. All backends named `numba` in a process therefore have the same path, and can read
        each other's layouts.

        Raises:
            BackendError: the path is unknown, or the CPU cannot run it.
            SettingError: the same for a path that the variable names.
        """
        choice = choose(path)
        self.path, self._why = choice.path, choice.why
        self._target = TARGETS.get(self.path)
        if path != "auto":
            self.name = f"numba-{self.path}"

    def details(self) -> str:
        """Return which kernels run and why, how many threads they take, and where compiled ones are kept."""
        return f"{self.path} kernels ({self._why}), {running()}"

    def warm_up(self) -> Iterator[tuple[str, float]]:
        """Compile every kernel, or find it in the cache, by running every operation in every format on small arrays."""
        return warm_up(self)

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        if self._target:
            return quantize_vector(x, plan, self._target)
        return quantize_planned(x, plan)

    def _quantize_dual(
        self, x: NDArray[Any], row: QuantPlan, column: QuantPlan
    ) -> tuple[Quantized, Quantized]:
        if self._target:
            return quantize_dual_vector(x, row, column, self._target)
        return super()._quantize_dual(x, row, column)

    def _dequantize(self, q: MXArray, dtype: str) -> NDArray[Any]:
        if self._target:
            return dequantize_vector(q, dtype, self._target)
        return dequantize(q, dtype)

    def _hadamard(self, x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
        if self._target:
            return hadamard_vector(x, rotation, axis, self._target)
        return hadamard(x, rotation, axis)

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
        return scaled_gemm(a, b, profile, out_dtype, self.path)

    def _prepare(self, q: MXArray, profile: GemmProfile) -> tuple[NDArray[Any], ...]:
        return prepare(q, profile, self.path)


def avx2() -> NumbaBackend:
    """Return the backend with vectors of 256 bits."""
    return NumbaBackend(KernelPath.AVX2)


backend = NumbaBackend()
portable = NumbaBackend(KernelPath.PORTABLE)
"""The same bits from plain Numba kernels, also where faster ones exist."""
