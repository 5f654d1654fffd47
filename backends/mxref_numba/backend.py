"""The backend: what it declares, and the kernels behind its operations.

Kernels without vectors serve any CPU; each operation has faster ones where `path` finds the instructions for them. All
give the bits of the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.capabilities import Capabilities, every_gemm
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import QuantPlan
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import Rotation
from mxref.steps.random import Stream
from mxref.steps.scale import ScaleRule
from mxref_numba.gemm.plain_tiles import multiplies
from mxref_numba.gemm.profiles import MAX_BOUNDED_SCALE, prepare, scaled_gemm
from mxref_numba.path import KernelPath, choose
from mxref_numba.scalar import decoder as plain_decoder
from mxref_numba.scalar import encoder, panels
from mxref_numba.threads import running
from mxref_numba.vector import decoder, staging, units
from mxref_numba.vector.encode import encoder_of
from mxref_numba.vector.target import TARGETS, Target

_FORMATS = frozenset(made for made in BLOCK_FORMATS.values() if made.k in (16, 32) and multiplies(made, made))
"""Plain kernels take any format of this kind; `encoder_of` has those for which there are kernels on vectors."""


class NumbaBackend(Backend):
    """Every block format as the reference has it, on all CPU cores; GEMMs `ordered` and `bounded`."""

    name = "numba"
    capabilities = Capabilities(
        formats=_FORMATS,
        scale_rules=frozenset(ScaleRule),
        scale_thresholds=True,
        four_over_six=frozenset(FourOverSix),
        blocks=frozenset(shape for made in _FORMATS for shape in (made.row, made.tile)),
        gemms=frozenset(
            gemm
            for gemm in every_gemm({GemmProfile.ORDERED, GemmProfile.BOUNDED}, _FORMATS)
            if multiplies(*gemm[1:])
        ),
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
        self.path, self._why = choose(path)
        self._target = TARGETS.get(self.path)
        if path != "auto":
            self.name = f"numba-{self.path}"

    def details(self) -> str:
        """Return which kernels run and why, how many threads they take, and where compiled ones are kept."""
        return f"{self.path} kernels ({self._why}), {running()}"

    def warm_up(self) -> Iterator[tuple[str, float]]:
        """Run every operation in every format on small arrays, so that each kernel is compiled or found in the cache.

        Kernels take numbers and addresses, so they are compiled for no shape, type or layout of an array, and what a
        plan asks for is read when they run. One specification of each format therefore reaches all of them.

        Yields:
            The name of an operation, and the wall seconds that it took.
        """
        formats = sorted(self.capabilities.formats, key=str)
        small = np.linspace(-2, 2, 32 * 96, dtype=np.float32).reshape(32, 96)
        for operation, run in self._operations(small, formats).items():
            start = time.perf_counter()
            run()
            yield operation, time.perf_counter() - start
        start = time.perf_counter()
        for run in self._operations(np.ones((256, 512), np.float32), formats[:1]).values():
            run()  # large enough for two threads
        yield "on threads", time.perf_counter() - start

    def _operations(
        self, x: NDArray[np.float32], formats: Sequence[BlockFormat]
    ) -> dict[str, Callable[[], object]]:
        """Return every operation in some formats, to be run in this order."""
        place, capabilities = Placement(Stream(seed=1)), self.capabilities
        specs = {each: OperandSpec(format=each) for each in formats}
        quantized: dict[BlockFormat, MXArray] = {}

        def quantize() -> None:
            for each, spec in specs.items():
                quantized[each] = self.quantize(x, spec, placement=place)

        def multiply() -> None:
            for profile, a, b in sorted(capabilities.gemms, key=lambda gemm: tuple(map(str, gemm))):
                if a in quantized and b in quantized:
                    right = self.prepare(quantized[b], profile=profile)
                    self.scaled_gemm(quantized[a], right, profile=profile)

        return {
            "quantize": quantize,
            "quantize_dual": lambda: [
                self.quantize_dual(x, (spec, spec), placements=(place, place)) for spec in specs.values()
            ],
            "fake_quantize": lambda: [
                self.fake_quantize(x, spec, placement=place) for spec in specs.values()
            ],
            "dequantize": lambda: [self.dequantize(q) for q in quantized.values()],
            "hadamard": lambda: self.hadamard(x, min(capabilities.hadamard_sizes), 1),
            "scaled_gemm": multiply,
        }

    def _vectors(self, *formats: BlockFormat) -> Target | None:
        """Return the vectors whose kernels quantize and decode all of some formats; None if there are none."""
        return self._target if all(map(encoder_of, formats)) else None

    def _tensor_scale(self, x: NDArray[Any], plan: QuantPlan, placement: Placement) -> tuple[Any, Any]:
        if placement.amax is None and plan.global_shape == plan.shape:
            amax = units.finite_amax(x, plan, self._target) if self._target else encoder.finite_amax(x, plan)
            placement = replace(placement, amax=np.array([amax]))
        return super()._tensor_scale(x, plan, placement)

    def _on_vectors(self, *plans: QuantPlan) -> Target | None:
        """Return the vectors whose kernels do all of some quantizations; None if there are none."""
        plain = all(plan.spec.four_over_six is FourOverSix.OFF for plan in plans)
        return self._vectors(*(plan.format for plan in plans)) if plain else None

    def _quantize(self, x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        if target := self._on_vectors(plan):
            return units.quantize_planned(x, plan, target)
        return encoder.quantize_planned(x, plan)

    def _quantize_dual(
        self, x: NDArray[Any], row: QuantPlan, column: QuantPlan
    ) -> tuple[units.Quantized, units.Quantized]:
        if target := self._on_vectors(row, column):
            return units.quantize_dual(x, row, column, target)
        return super()._quantize_dual(x, row, column)

    def _dequantize(self, q: MXArray, dtype: str) -> NDArray[Any]:
        if target := self._vectors(q.format):
            return decoder.dequantize(q, dtype, target)
        return plain_decoder.dequantize(q, dtype)

    def _hadamard(self, x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
        if self._target:
            return staging.hadamard(x, rotation, axis, self._target)
        return panels.hadamard(x, rotation, axis)

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
