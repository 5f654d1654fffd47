"""Compiles every kernel ahead of its first use, by running every operation that a backend declares on small arrays.

Kernels take numbers and addresses (`native.py`), so they are compiled for no shape, type or layout of an array, and
what a plan asks for is read when they run. One specification of each format therefore reaches all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.formats import BlockFormat
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream


def warm_up(backend: Backend) -> Iterator[tuple[str, float]]:
    """Run every operation in every format, so that each kernel is compiled or found in the cache.

    Yields:
        The name of an operation, and the wall seconds that it took.
    """
    formats = sorted(backend.capabilities.formats, key=str)
    small = np.linspace(-2, 2, 32 * 96, dtype=np.float32).reshape(32, 96)
    for operation, run in _operations(backend, small, formats).items():
        start = time.perf_counter()
        run()
        yield operation, time.perf_counter() - start
    start = time.perf_counter()
    for run in _operations(backend, np.ones((256, 512), np.float32), formats[:1]).values():
        run()  # large enough for two threads
    yield "on threads", time.perf_counter() - start


def _operations(
    backend: Backend, x: NDArray[np.float32], formats: Sequence[BlockFormat]
) -> dict[str, Callable[[], object]]:
    """Return every operation in some formats, to be run in this order."""
    place, capabilities = Placement(Stream(seed=1)), backend.capabilities
    specs = {each: OperandSpec(format=each) for each in formats}
    quantized: dict[BlockFormat, MXArray] = {}

    def quantize() -> None:
        for each, spec in specs.items():
            quantized[each] = backend.quantize(x, spec, placement=place)

    def multiply() -> None:
        for profile, a, b in sorted(capabilities.gemms, key=lambda gemm: tuple(map(str, gemm))):
            if a in quantized and b in quantized:
                right = backend.prepare(quantized[b], profile=profile)
                backend.scaled_gemm(quantized[a], right, profile=profile)

    return {
        "quantize": quantize,
        "quantize_dual": lambda: [
            backend.quantize_dual(x, (spec, spec), placements=(place, place)) for spec in specs.values()
        ],
        "fake_quantize": lambda: [backend.fake_quantize(x, spec, placement=place) for spec in specs.values()],
        "dequantize": lambda: [backend.dequantize(q) for q in quantized.values()],
        "hadamard": lambda: backend.hadamard(x, min(capabilities.hadamard_sizes), 1),
        "scaled_gemm": multiply,
    }
