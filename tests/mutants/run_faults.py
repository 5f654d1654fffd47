"""Faults that show only over a run: in later calls, in long or large arrays, in other threads, or rarely."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np

from mutants.mutant import Mutant
from mxref.reference import ReferenceBackend


class Ring(ReferenceBackend):
    """Writes the results of one shape to 16 buffers in turns."""

    def __init__(self):
        self.rings = {}

    def _in_turns(self, what, array):
        ring = self.rings.setdefault(
            (what, array.shape, array.dtype), itertools.cycle([np.empty_like(array) for _ in range(16)])
        )
        buffer = next(ring)
        buffer[...] = array
        return buffer

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        return self._in_turns("codes", codes), self._in_turns("scales", scales)

    def _dequantize(self, q, dtype):
        return self._in_turns("dequantize", super()._dequantize(q, dtype))

    def _hadamard(self, x, rotation, axis):
        return self._in_turns("hadamard", super()._hadamard(x, rotation, axis))

    def _scaled_gemm(self, a, b, profile, out_dtype):
        return self._in_turns("gemm", super()._scaled_gemm(a, b, profile, out_dtype))


class Limited(ReferenceBackend):
    """Spoils the last byte of a result where a request meets a condition."""

    def beyond(self, shape, length):
        raise NotImplementedError

    def _spoiled(self, result, shape, length):
        if result.size and self.beyond(shape, length):
            result = np.ascontiguousarray(result)
            result.reshape(-1).view(np.uint8)[-1] ^= 1
        return result

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        return self._spoiled(codes, x.shape, plan.length), scales

    def _dequantize(self, q, dtype):
        return self._spoiled(super()._dequantize(q, dtype), q.shape, q.length)

    def _hadamard(self, x, rotation, axis):
        return self._spoiled(super()._hadamard(x, rotation, axis), x.shape, x.shape[axis])

    def _scaled_gemm(self, a, b, profile, out_dtype):
        larger = max(a.shape, b.shape, key=np.prod)
        return self._spoiled(super()._scaled_gemm(a, b, profile, out_dtype), larger, a.length)


class LongAxis(Limited):
    def beyond(self, shape, length):
        return length > 16384


class Large(Limited):
    def beyond(self, shape, length):
        return np.prod(shape) > 4 << 20


class LargeProduct(ReferenceBackend):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if out.size > 4 << 20:
            out[-1, -1] = 0
        return out


class MainThreadOnly(Limited):
    def beyond(self, shape, length):
        return threading.current_thread() is not threading.main_thread()


class SharedScratch(ReferenceBackend):
    """Copies its operands of one shape to the same memory, which no lock protects."""

    def __init__(self):
        self.scratch = {}

    def _copied(self, array):
        copy = self.scratch.setdefault((array.shape, array.dtype), np.empty_like(array))
        copy[...] = array
        return copy

    def _quantize(self, x, plan):
        return super()._quantize(self._copied(x), plan)

    def _dequantize(self, q, dtype):
        return super()._dequantize(self._held(q), dtype)

    def _hadamard(self, x, rotation, axis):
        return super()._hadamard(self._copied(x), rotation, axis)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        return super()._scaled_gemm(self._held(a), b, profile, out_dtype)

    def _held(self, q):
        return replace(q, codes=self._copied(q.codes))


class Rare(Limited):
    """Wrong in one of `every` calls."""

    def __init__(self, every=10_000):
        self.every, self.calls = every, itertools.count(1)

    def beyond(self, shape, length):
        return next(self.calls) % self.every == 0


EVERY = ("quantize", "dequantize", "hadamard", "gemm")
RUN_MUTANTS = (
    Mutant("a ring of 16 results", "conformance.protocol", "buffers that are used again", Ring, EVERY),
    Mutant("16,384 elements quantized", "quantize.strides", "a row that fits one program", LongAxis),
    Mutant("16,384 elements decoded", "quantize.axis", "a row that fits one program", LongAxis, ("dequantize",)),
    Mutant("16,384 elements transformed", "quantize.strides", "a row that fits one program", LongAxis, ("hadamard",)),
    Mutant("K = 16,384", "gemm.operands", "a loop with a limit", LongAxis, ("gemm",)),
    Mutant("4 Mi elements quantized", "quantize.strides", "a product of sizes in too few bits", Large, level="full"),
    Mutant("4 Mi elements decoded", "quantize.strides", "a product of sizes in too few bits", Large, ("dequantize",),
           level="full"),
    Mutant("4 Mi elements transformed", "quantize.strides", "a product of sizes in too few bits", Large, ("hadamard",),
           level="full"),
    Mutant("4 Mi products", "gemm.operands", "a product of sizes in too few bits", LargeProduct, ("gemm",),
           level="full"),
    Mutant("main thread only", "conformance.protocol", "state of the main thread", MainThreadOnly, EVERY),
    Mutant("shared scratch", "conformance.protocol", "scratch without a lock", SharedScratch, EVERY),
)  # fmt: skip
