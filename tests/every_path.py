"""All paths of the Numba backend as one backend: each operation runs on every path, and all must agree.

A test then compares one result with the reference or the oracle, which takes most of its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from differential import bits_of
from mxref.backend import Backend
from mxref.mxarray import MXArray, PreparedArray
from mxref.placement import Placement
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import Rotation
from mxref_numba import path
from mxref_numba.backend import NumbaBackend


def _bits(result: Any) -> list[NDArray[Any]]:
    if isinstance(result, tuple):
        return [part for each in result for part in _bits(each)]
    return [result if result.dtype == np.uint8 else bits_of(result)]  # NaN have any payload


class EveryPath(Backend):
    """A backend whose operations run on every path that this CPU has, and return what all gave."""

    name = "numba-every-path"

    def __init__(self) -> None:
        self.paths = [NumbaBackend(each) for each in path.available()]
        self.capabilities = self.paths[0].capabilities

    def _common(self, operation: str, *arguments: Any) -> Any:
        first, *others = self.paths
        result = getattr(first, operation)(*arguments)
        for other in others:
            found = getattr(other, operation)(*arguments)
            same = map(np.array_equal, _bits(found), _bits(result))
            assert all(same), f"{operation} on {other.path} differs from {first.path}"
        return result

    def _tensor_scale(self, x: NDArray[Any], plan: QuantPlan, placement: Placement) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self._common("_tensor_scale", x, plan, placement)
        return found

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        found: tuple[NDArray[np.uint8], NDArray[np.uint8]] = self._common("_quantize", x, plan)
        return found

    def _quantize_dual(self, x: NDArray[Any], row: QuantPlan, column: QuantPlan) -> Any:
        return self._common("_quantize_dual", x, row, column)

    def _dequantize(self, q: MXArray, dtype: str) -> NDArray[Any]:
        found: NDArray[Any] = self._common("_dequantize", q, dtype)
        return found

    def _hadamard(self, x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._common("_hadamard", x, rotation, axis)
        return found

    def _prepare(self, q: MXArray, profile: GemmProfile) -> tuple[Any, ...]:
        layouts = tuple(each._prepare(q, profile) for each in self.paths)
        return layouts if any(layouts) else ()

    def _scaled_gemm(self, a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
        results = []
        for i, each in enumerate(self.paths):
            own = b
            if isinstance(b, PreparedArray):
                own = PreparedArray.of(b.plain(), each.name, profile, b.layout[i])
            results.append(each._scaled_gemm(a, own, profile, out_dtype))
        if profile is GemmProfile.ORDERED:
            for each, result in zip(self.paths, results, strict=True):
                same = np.array_equal(bits_of(result), bits_of(results[0]))
                assert same, f"ordered on {each.path} differs from {self.paths[0].path}"
        return results[-1]  # of `bounded`, which may differ, that of the portable path
