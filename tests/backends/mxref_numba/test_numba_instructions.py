"""What each x86 path says in its own instructions: against NumPy, and that a fault in any of them is noticed.

The faults of `mutants` are planted in the reference. These are planted in what the paths do not share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

from llvmlite import ir
from numba.core import types
from numba.core.caching import NullCache
from numpy.typing import NDArray

from mxref_numba import path
from mxref_numba.gemm.packed_panels import BytePairs, Dots, Vnni
from mxref_numba.kernels import KERNELS, address_of
from mxref_numba.lanes import (
    F32,
    F64,
    I8,
    I16,
    I32,
    MAGNITUDE,
    Avx2,
    Avx512,
    Lanes,
    constant,
    load,
    named,
    vector_code,
)
from mxref_numba.path import KernelPath
from mxref_numba.vector.target import Target, VectorNative

LIMIT = 6.0
TABLE = tuple(float(sign * m) for sign in (1, -1) for m in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6))
RNG = np.random.default_rng(5)
SPECIAL = [
    0.0,
    -0.0,
    6.0,
    -6.0,
    np.nextafter(np.float32(6), np.float32(7)),
    -1e-45,
    np.inf,
    -np.inf,
    5.5,
    -0.25,
]
FLOATS = np.resize(np.array(SPECIAL, np.float32), 32)
SHORTS = RNG.integers(0, 65536, 32, np.int32)
BYTES = RNG.integers(0, 256, 64).astype(np.int16)
NIBBLES = RNG.integers(0, 256, 128, np.uint8)
CODES = np.arange(-16, 16, dtype=np.int32)[RNG.permutation(32)]
PATTERNS = np.resize(np.array([0, 1, 5, 0x7F7FFFFF, 0x7F800000, 0x3F800000, 0x3F800001, 7, 7], np.int32), 32)
"""Bits of magnitudes, some of which meet their own like in reverse."""
DOUBLES = np.array(
    [1 + 2.0**-30, 1 - 2.0**-30, 2.0**-149 / 3, 2.0**-126 * (1 - 2.0**-30), 0, np.inf, 3.4e38, 1e300]
)
"""Those of a half are beside float32, on either side, and beside subnormal ones."""
A, B = RNG.integers(0, 25, 64, np.uint8), RNG.integers(-12, 13, 64).astype(np.int8)


class Operation(NamedTuple):
    emit: Callable[[Target, Dots, Lanes, Lanes], Lanes]
    element: Any
    """Type of the lanes of both operands, each a vector."""
    inputs: tuple[NDArray[Any], NDArray[Any]]
    expected: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
    """Of as many lanes as a vector has of the operands' type."""


def _in_turns(a: NDArray[Any], b: NDArray[Any], made: Any) -> NDArray[Any]:
    quarter = 16 // a.itemsize
    parts = [each[i : i + quarter] for i in range(0, len(a), quarter) for each in (a, b)]
    return np.concatenate(parts).astype(made)


def _dots(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    left = np.resize(a[:4], a.shape).astype(np.int32)
    # Two steps, from starts of 7: the second as the first.
    return (7 + 2 * (left * b).reshape(-1, 4).sum(axis=1)).astype(np.int32)


def _two_steps(target: Target, dots: Dots, a: Lanes, b: Lanes) -> Lanes:
    words = a.cast(I32)
    left, right = words.pick([0] * words.count), b.cast(I32)
    starts = constant(a.builder, I32, [7] * target.lanes)
    return dots.total(dots.add(dots.add(None, starts, left, right), starts, left, right), starts)


def _eight(a: Lanes) -> Lanes:
    return a if a.count == 8 else a.pick([*range(4), *range(4)])


def _raised(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    eight = np.resize(a, 8)
    with np.errstate(over="ignore"):
        near = eight.astype(np.float32)
    up = np.where(near < eight, np.nextafter(near, np.float32(np.inf)), near)
    return np.resize(up, 2 * a.size)


OPERATIONS = {
    "at_most": Operation(
        lambda t, _, a, b: t.instructions.at_most(a, a.like([LIMIT] * a.count)),
        F32, (FLOATS, FLOATS), lambda a, b: np.minimum(np.abs(a), np.float32(LIMIT)),
    ),
    "narrowed to 16 bits": Operation(
        lambda t, _, a, b: t.instructions.narrowed(a, b, I16),
        I32, (SHORTS, SHORTS[::-1].copy()), lambda a, b: _in_turns(a, b, np.uint16),
    ),
    "narrowed to 8 bits": Operation(
        lambda t, _, a, b: t.instructions.narrowed(a, b, I8),
        I16, (BYTES, BYTES[::-1].copy()), lambda a, b: _in_turns(a, b, np.uint8),
    ),
    "pairs_summed": Operation(
        lambda t, _, a, b: t.instructions.pairs_summed(a, (1, 16)),
        I8, (NIBBLES, NIBBLES), lambda a, b: (a.astype(np.int16)[::2] + 16 * a.astype(np.int16)[1::2]),
    ),
    "look_up": Operation(
        lambda t, _, a, b: t.instructions.look_up(TABLE, a),
        I32, (CODES, CODES), lambda a, b: np.array(TABLE, np.float32)[a & 15],
    ),
    "raised": Operation(
        lambda t, _, a, b: _eight(a).raised().pick([*range(8)] * (a.count // 4)),
        F64, (DOUBLES, DOUBLES), _raised,
    ),
    "permuted": Operation(
        lambda t, _, a, b: a.convert("sitofp", F32).at(a),
        I32, (CODES, CODES), lambda a, b: a[a % a.size].astype(np.float32),
    ),
    "descended": Operation(
        lambda t, _, a, b: t.instructions.descended(a & 15, a & MAGNITUDE, b & MAGNITUDE),
        I32, (PATTERNS, PATTERNS[::-1].copy()),
        lambda a, b: 2 * (a & 15) + ((a & MAGNITUDE) < (b & MAGNITUDE)),
    ),
    "dots": Operation(_two_steps, I8, (A, B), _dots),
}  # fmt: skip


class _LimitAbove(Avx2):
    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        larger = v.builder.fcmp_ordered(">", v.value, limit.value)
        return Lanes(v.builder, larger).choose(v, limit)


class _LimitSigned(Avx2):
    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        return Lanes(v.builder, v.builder.fcmp_ordered("<", v.value, limit.value)).choose(v, limit)


class _NaNPasses(Avx2):
    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        magnitude = (v.cast(I32) & 0x7FFFFFFF).cast(v.element)
        larger = v.builder.fcmp_ordered(">", magnitude.value, limit.value)
        return Lanes(v.builder, larger).choose(limit, magnitude)


class _NarrowedOutOfTurn(Avx2):
    def narrowed(self, a: Lanes, b: Lanes, element: Any) -> Lanes:
        return super().narrowed(b, a, element)


class _NarrowedSigned(Avx2):
    _narrowing: ClassVar = {I16: "x86.avx2.packssdw", I8: "x86.avx2.packsswb"}


class _WeightsSwapped(Avx2):
    def pairs_summed(self, v: Lanes, weights: tuple[int, int]) -> Lanes:
        return super().pairs_summed(v, (weights[1], weights[0]))


class _BytesSigned(Avx2):
    def pairs_summed(self, v: Lanes, weights: tuple[int, int]) -> Lanes:
        pairs = ir.Constant(v.value.type, list(weights) * (v.count // 2))
        weighted = Lanes(v.builder, pairs)
        return named(self._pairs, ir.VectorType(I16, v.count // 2), weighted, v.value)


class _ToNearest(Avx2):
    def raised(self, v: Lanes) -> Lanes:
        return v.convert("fptrunc", F32)


class _FromTheEnd(Avx2):
    def permuted(self, values: Lanes, index: Lanes) -> Lanes:
        return super().permuted(values, index ^ 7)


class _AboveStart(Avx2):
    def descended(self, node: Lanes, x: Lanes, start: Lanes) -> Lanes:
        return super().descended(node, start, x)


class _StartItself(Avx2):
    def descended(self, node: Lanes, x: Lanes, start: Lanes) -> Lanes:
        return super().descended(node, x, start + 1)


class _NoSign(Avx2):
    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        values = codes.like(table[:8])
        return named("x86.avx2.permps", values.value.type, values, codes.value)


class _OtherHalf(Avx2):
    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        return super().look_up(table[8:] + table[:8], codes)


class _NoStarts(BytePairs):
    def total(self, partial: Any, starts: Lanes) -> Lanes:
        return super().total(partial, starts) - starts


class _OperandsSwapped(BytePairs):
    def add(self, partial: Any, starts: Lanes, left: Lanes, right: Lanes) -> Any:
        return super().add(partial, starts, right, left)


class _FirstStepOnly(BytePairs):
    def add(self, partial: Any, starts: Lanes, left: Lanes, right: Lanes) -> Any:
        return partial or super().add(None, starts, left, right)


FAULTS = {
    "at_most": [_LimitAbove, _LimitSigned, _NaNPasses],
    "narrowed to 16 bits": [_NarrowedOutOfTurn, _NarrowedSigned],
    "narrowed to 8 bits": [_NarrowedOutOfTurn, _NarrowedSigned],
    "pairs_summed": [_WeightsSwapped, _BytesSigned],
    "look_up": [_NoSign, _OtherHalf],
    "raised": [_ToNearest],
    "permuted": [_FromTheEnd],
    "descended": [_AboveStart, _StartItself],
    "dots": [_NoStarts, _OperandsSwapped, _FirstStepOnly],
}
DOTS = {KernelPath.AVX2: BytePairs, KernelPath.AVX512: Vnni}
INSTRUCTIONS = {KernelPath.AVX2: Avx2, KernelPath.AVX512: Avx512}
BITS = {KernelPath.AVX2: 256, KernelPath.AVX512: 512}
CPU = {KernelPath.AVX2: "x86-64-v3", KernelPath.AVX512: None}

avx2 = pytest.mark.skipif(
    KernelPath.AVX2 not in path.available(), reason="the CPU, as Numba sees it, has no avx2"
)


def _matches(name: str, of: KernelPath, instructions: type = Avx2, dots: type = BytePairs) -> bool:
    """Return whether an operation, compiled for a path with these instructions, gives what NumPy gives."""
    operation = OPERATIONS[name]
    target = Target(of, BITS[of], instructions(), CPU[of])
    a, b = (np.ascontiguousarray(each[: target.bits // 8 // each.itemsize]) for each in operation.inputs)
    if name == "at_most":
        a[3] = np.nan

    @vector_code(types.int64, types.int64, types.int64)
    def code(builder, first, second, out):
        operands = (load(builder, operation.element, len(a), address) for address in (first, second))
        operation.emit(target, dots(), *operands).store(out)

    def applied(first, second, out):
        code(first, second, out)

    native = VectorNative(applied, target)
    made = native.dispatcher()
    made._cache = NullCache()  # a fault must not be kept
    KERNELS.remove(made)  # it is none of the package's
    native.__dict__["compiled"] = made.get_compile_result(types.void(*native.types))
    expected = operation.expected(a, b)
    found = np.zeros(target.bits // 8 // expected.itemsize, expected.dtype)
    ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 3)(native.address)(*map(address_of, (a, b, found)))
    if name == "at_most":  # a NaN gives any number
        if np.isnan(found[3]):
            return False
        expected[3] = found[3]
    return bool(np.array_equal(found.view(np.uint8), expected.view(np.uint8)))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("of", [each for each in INSTRUCTIONS if each in path.available()])
def test_instructions_do_what_numpy_does(of: KernelPath, name: str) -> None:
    assert _matches(name, of, INSTRUCTIONS[of], DOTS[of])


@avx2
@pytest.mark.parametrize(
    ("name", "fault"), [(name, each) for name, found in FAULTS.items() for each in found]
)
def test_a_fault_in_avx2_is_noticed(name: str, fault: type) -> None:
    dots = fault if issubclass(fault, Dots) else BytePairs
    instructions = fault if issubclass(fault, Avx2) else Avx2
    assert not _matches(name, KernelPath.AVX2, instructions, dots)
