"""The reference as a backend: the specification itself, run through the same protocol as every other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.capabilities import Capabilities, every_gemm
from mxref.formats import BLOCK_FORMATS
from mxref.gemm import scaled_gemm
from mxref.mxarray import MXArray
from mxref.plan import QuantPlan
from mxref.quantization import dequantize, quantize_planned
from mxref.recipe import GemmProfile
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import Rotation, hadamard
from mxref.steps.quotient import Arithmetic
from mxref.steps.scale import ScaleRule


class ReferenceBackend(Backend):
    """Everything that the specification defines, in NumPy; clarity before speed."""

    name = "reference"
    capabilities = Capabilities(
        formats=frozenset(BLOCK_FORMATS.values()),
        scale_rules=frozenset(ScaleRule),
        scale_thresholds=True,
        blocks=frozenset(shape for made in BLOCK_FORMATS.values() for shape in (made.row, made.tile)),
        arithmetics=frozenset(Arithmetic),
        four_over_six=frozenset(FourOverSix),
        gemms=every_gemm(GemmProfile, BLOCK_FORMATS.values()),
        dequantize_dtypes=frozenset({"float64", "float32", "bfloat16"}),
    )

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return quantize_planned(x, plan)

    def _dequantize(self, q: MXArray, dtype: str) -> NDArray[Any]:
        return dequantize(q, dtype)

    def _hadamard(self, x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
        moved = np.moveaxis(x, axis, -1).astype(np.float32)
        return np.moveaxis(hadamard(moved, rotation), -1, axis)

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
        return scaled_gemm(a, b, profile=profile, out_dtype=out_dtype)


backend = ReferenceBackend()
