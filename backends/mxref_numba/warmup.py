"""Compiles every kernel ahead of its first use, by running every operation that a backend declares on small arrays.

Kernels take numbers and addresses (`native.py`), so they are compiled for no shape, type or layout of an array, and
what a plan asks for is read when they run. One specification of each format therefore reaches all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream

_SHAPE = (32, 96)
_STREAM = Stream(seed=1)


def warm_up(backend: Backend) -> Iterator[tuple[str, float]]:
    """Run every operation in every format, so that each kernel is compiled or found in the cache.

    Yields:
        The name of an operation, and the wall seconds that it took.
    """
    operations = {
        "quantize": _quantize,
        "quantize_dual": _quantize_dual,
        "fake_quantize": _fake_quantize,
        "dequantize": _dequantize,
        "hadamard": _hadamard,
        "scaled_gemm": _scaled_gemm,
        "on threads": _on_threads,
    }
    for operation, run_all in operations.items():
        start = time.perf_counter()
        run_all(backend)
        yield operation, time.perf_counter() - start


def _quantize(backend: Backend) -> None:
    for spec in _specs(backend):
        _quantized(backend, _small(), spec)


def _quantize_dual(backend: Backend) -> None:
    for spec in _specs(backend):
        backend.quantize_dual(_small(), (spec, spec), placements=(Placement(_STREAM), Placement(_STREAM)))


def _fake_quantize(backend: Backend) -> None:
    for spec in _specs(backend):
        backend.fake_quantize(_small(), spec, placement=Placement(_STREAM))


def _dequantize(backend: Backend) -> None:
    for spec in _specs(backend):
        backend.dequantize(_quantized(backend, _small(), spec))


def _hadamard(backend: Backend) -> None:
    backend.hadamard(_small(), min(backend.capabilities.hadamard_sizes), 1)


def _scaled_gemm(backend: Backend) -> None:
    capabilities = backend.capabilities
    operands = {spec.format: _quantized(backend, _small(), spec) for spec in _specs(backend)}
    for profile, *formats in sorted(capabilities.gemms, key=lambda gemm: tuple(map(str, gemm))):
        a, b = (operands[each] for each in formats)
        backend.scaled_gemm(a, backend.prepare(b, profile=profile), profile=profile)


def _on_threads(backend: Backend) -> None:
    """Run every operation on arrays large enough for two threads."""
    x, plain = np.ones((256, 512), np.float32), _specs(backend)[0]
    q = _quantized(backend, x, plain)
    backend.quantize_dual(x, (plain, plain), placements=(Placement(_STREAM), Placement(_STREAM)))
    backend.fake_quantize(x, plain, placement=Placement(_STREAM))
    backend.dequantize(q)
    backend.hadamard(x, min(backend.capabilities.hadamard_sizes))
    for profile in sorted(backend.capabilities.profiles(q.format, q.format)):
        backend.scaled_gemm(q, backend.prepare(q, profile=profile), profile=profile)


def _small() -> NDArray[np.float32]:
    return np.linspace(-2, 2, _SHAPE[0] * _SHAPE[1], dtype=np.float32).reshape(_SHAPE)


def _specs(backend: Backend) -> list[OperandSpec]:
    """Return one specification of each format."""
    return [OperandSpec(format=each) for each in sorted(backend.capabilities.formats, key=str)]


def _quantized(backend: Backend, x: NDArray[np.float32], spec: OperandSpec) -> MXArray:
    return backend.quantize(x, spec, placement=Placement(_STREAM))
