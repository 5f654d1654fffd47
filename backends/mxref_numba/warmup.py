"""Compiles every kernel ahead of its first use, by running everything that a backend declares on small arrays.

One format runs all variants. The others run the plainest ones, because their code is shared or compiled as a whole.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.formats import BlockFormat
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding

_SHAPES = ((32, 288), (32, 32))
"""Whole panels and tiles, and what is left over at their edges."""
_SPREADS = (0, 60, 120)
"""Binary orders up and down: products of scales that are normal in float32, that are not, and sums that are not."""
_STREAM = Stream(seed=1)


def warm_up(backend: Backend) -> Iterator[tuple[str, float]]:
    """Run every operation in every declared variant, so that each kernel is compiled or found in the cache.

    Yields:
        The name of an operation, and the wall seconds that all of its variants took.
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
    for x, spec, axis in itertools.product(_inputs(backend), _all_specs(backend), (-1, 0)):
        _quantized(backend, x, spec, axis)


def _quantize_dual(backend: Backend) -> None:
    for x, spec in itertools.product(_inputs(backend), _all_specs(backend)):
        backend.quantize_dual(
            x, (spec, spec), placements=(Placement(_STREAM), Placement(_STREAM)), pads=(True, True)
        )


def _fake_quantize(backend: Backend) -> None:
    for x, spec, axis, dtype in itertools.product(
        _inputs(backend), _all_specs(backend), (-1, 0), sorted(backend.capabilities.dequantize_dtypes)
    ):
        backend.fake_quantize(x, spec, axis=axis, dtype=dtype, placement=Placement(_STREAM), pad=True)


def _dequantize(backend: Backend) -> None:
    for x, spec, axis, dtype in itertools.product(
        _inputs(backend), _plain_specs(backend), (-1, 0), sorted(backend.capabilities.dequantize_dtypes)
    ):
        backend.dequantize(_quantized(backend, x, spec, axis), dtype)


def _hadamard(backend: Backend) -> None:
    for x, n in itertools.product(_inputs(backend), sorted(backend.capabilities.hadamard_sizes)):
        whole = x[:, : x.shape[1] // n * n]
        backend.hadamard(whole, n, 1)
        backend.hadamard(whole.T, n, 1, axis=0)


def _scaled_gemm(backend: Backend) -> None:
    capabilities = backend.capabilities
    for x, spread in itertools.product(_inputs(backend), _SPREADS):
        if x.dtype != np.float32:
            continue
        wide = x.copy()
        wide[::2] *= np.float32(2.0**spread)
        wide[1::2] *= np.float32(2.0**-spread)
        operands = {spec.format: _quantized(backend, wide, spec, -1) for spec in _plain_specs(backend)}
        gemms = sorted(capabilities.gemms, key=lambda gemm: tuple(map(str, gemm)))
        for (profile, *formats), dtype in itertools.product(gemms, sorted(capabilities.gemm_dtypes)):
            a, b = (operands[each] for each in formats)
            for right in (b, backend.prepare(b, profile=profile)):
                backend.scaled_gemm(a, right, profile=profile, out_dtype=dtype)


def _on_threads(backend: Backend) -> None:
    """Run every operation on arrays large enough for two threads."""
    x, plain = np.ones((256, 512), np.float32), _plainest(backend)
    q = _quantized(backend, x, plain, -1)
    backend.quantize_dual(x, (plain, plain), placements=(Placement(_STREAM), Placement(_STREAM)))
    backend.fake_quantize(x, plain, placement=Placement(_STREAM))
    backend.dequantize(q)
    backend.hadamard(x, min(backend.capabilities.hadamard_sizes))
    for profile in sorted(backend.capabilities.profiles(q.format, q.format)):
        backend.scaled_gemm(q, backend.prepare(q, profile=profile), profile=profile)


def _inputs(backend: Backend) -> Iterator[NDArray[Any]]:
    """Yield each shape in each type."""
    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    for shape, name in itertools.product(_SHAPES, sorted(backend.capabilities.in_dtypes)):
        yield np.linspace(-2, 2, int(np.prod(shape))).reshape(shape).astype(kinds[name])


def _formats(backend: Backend) -> list[BlockFormat]:
    return sorted(backend.capabilities.formats, key=str)


def _plain_specs(backend: Backend) -> list[OperandSpec]:
    return [replace(_plainest(backend), format=each) for each in _formats(backend)]


def _all_specs(backend: Backend) -> Iterator[OperandSpec]:
    yield from _specs(backend)
    yield from _plain_specs(backend)[1:]


def _specs(backend: Backend) -> Iterator[OperandSpec]:
    """Yield, in the first format, every block with every rounding and transform, then every scale rule and prescale.

    Each of the latter goes with every rounding too.
    """
    capabilities = backend.capabilities
    blocks, rules = sorted(capabilities.blocks), sorted(capabilities.scale_rules)
    sizes = (0, *sorted(capabilities.hadamard_sizes))
    prescales = (False, True) if capabilities.prescale else (False,)
    for rounding, bits in itertools.product(sorted(capabilities.roundings), (16, 22)):
        if bits > min(16 if rounding is not Rounding.SR else 22, capabilities.max_sr_bits):
            continue
        plain = OperandSpec(
            format=_formats(backend)[0], scale_rule=rules[0], rounding=rounding, sr_bits=bits, block=blocks[0]
        )
        for block, n in itertools.product(blocks, sizes):
            yield replace(plain, block=block, hadamard=n)
        for rule, prescale in itertools.product(rules, prescales):
            yield replace(plain, scale_rule=rule, prescale=prescale)


def _plainest(backend: Backend) -> OperandSpec:
    return next(_specs(backend))


def _quantized(backend: Backend, x: NDArray[Any], spec: OperandSpec, axis: int) -> MXArray:
    return backend.quantize(x, spec, axis=axis, placement=Placement(_STREAM), pad=True)
