"""Blocks that run across memory, at the ends of vectors: the reference's bits, and not a byte beside the results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

pytest.importorskip("numba")

from mxref import OperandSpec, ScaleRule, SignPolicy, Stream, get_backend
from mxref.placement import Placement
from mxref_numba import buffers, path, threads
from mxref_numba.backend import NumbaBackend
from mxref_numba.quantize_job import Job
from mxref_numba.vector import units
from mxref_numba.vector.flows import COLUMNS, TURNED
from mxref_numba.vector.target import TARGETS

REFERENCE = get_backend("reference")
PLACE = Placement(Stream(seed=3))
PLAIN = OperandSpec()
SPECS = (
    PLAIN,
    OperandSpec(scale_rule=ScaleRule.RCEIL, prescale=True, zero_scale=127),
    OperandSpec(hadamard=16, signs=SignPolicy.FIXED),
)
POISON, FILL = 0xA5, 0x5C
"""The bytes around memory that kernels get, and those in it."""
GUARD = 208
"""Bytes before and behind it: no multiple of a cache line."""

KERNELS = [NumbaBackend(each) for each in path.available() if each in TARGETS]


class Guarded:
    """Memory for results and scratch, with poison around it."""

    def __init__(self) -> None:
        self.rooms: list[NDArray[np.uint8]] = []

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        shape = (shape,) if isinstance(shape, int) else shape
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self.rooms.append(np.full(size + 2 * GUARD, POISON, np.uint8))
        inside = self.rooms[-1][GUARD : GUARD + size]
        inside[:] = FILL  # what is copied from scratch is not taken for a guard
        return inside.view(dtype).reshape(shape)

    def check(self) -> None:
        for room in self.rooms:
            assert (room[:GUARD] == POISON).all(), "written before the beginning"
            assert (room[-GUARD:] == POISON).all(), "written beyond the end"
        self.rooms.clear()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    found = Guarded()
    for backend in KERNELS:  # compiled before NumPy's place is taken
        backend.quantize(np.ones((128, 16), np.float32), PLAIN, axis=0)
    monkeypatch.setattr(buffers, "empty", found.empty)
    own = SimpleNamespace(empty=found.empty, frombuffer=np.frombuffer, uint8=np.uint8)
    monkeypatch.setattr(threads, "np", own)
    return found


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How elements went to the kernels, filled meanwhile."""
    found: set[int] = set()
    before = units.quantization_flow

    def flow(job: Job) -> int:
        found.add(before(job))
        return before(job)

    monkeypatch.setattr(units, "quantization_flow", flow)
    return found


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> NDArray[Any]:
    """Values of many magnitudes; among them zeros, NaN, infinities, and blocks of zeros and of subnormal numbers."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(np.float32)
    lines = x.reshape(shape[0], -1)
    lines[:, ::7] *= np.float32(2.0**-133)
    lines[:, 3::11] = -0.0
    flat = x.reshape(-1)
    for special in (np.nan, np.inf, -np.inf, 0.0):
        flat[rng.integers(0, flat.size, 1 + flat.size // 4000)] = special
    return x.astype(dtype)


def layouts(shape: tuple[int, ...], dtype: Any) -> Iterator[NDArray[Any]]:
    """Arrays of a shape whose lines are whole in memory; the first has NaN before, behind and between its lines."""
    x = values(shape, dtype)
    wide = np.full((*shape[:-1], shape[-1] + 40), np.nan, dtype)
    wide[..., 8:-32] = x
    yield wide[..., 8:-32]
    yield x[::-1]
    yield values((2 * shape[0], *shape[1:]), dtype)[::2]
    unaligned = np.ndarray(shape, dtype, bytearray(x.nbytes + 1), 1)
    unaligned[...] = x
    yield unaligned


def check(q: Any, expected: Any) -> None:
    np.testing.assert_array_equal(q.scales, expected.scales)
    np.testing.assert_array_equal(q.codes, expected.codes)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("shape", "axis", "along"),
    [
        ((128, 16), 0, True),
        ((384, 48), 0, True),
        ((128, 272), 0, True),
        ((128, 3, 16), 0, True),
        ((2, 128, 48), 1, True),
        ((256, 528), 0, True),  # several shares
        ((128, 15), 0, False),
        ((128, 17), 0, False),
        ((96, 16), 0, False),
        ((32, 8), 0, False),
    ],
)
def test_blocks_across_memory(
    guarded: Guarded, flows: set[int], shape: tuple[int, ...], axis: int, along: bool, dtype: Any
) -> None:
    for x, spec in itertools.product(layouts(shape, dtype), SPECS):
        expected = REFERENCE.quantize(x, spec, axis=axis, placement=PLACE)
        for backend in KERNELS:
            check(backend.quantize(x, spec, axis=axis, placement=PLACE), expected)
            guarded.check()
    assert flows == {COLUMNS if along else TURNED}


@pytest.mark.parametrize("shape", [(128, 16), (128, 48), (256, 1040), (130, 48), (128, 33), (1, 16)])
def test_both_axes(guarded: Guarded, shape: tuple[int, int]) -> None:
    x = values(shape, np.float32)
    for given, specs in itertools.product((x, x[::-1], x.T), itertools.product(SPECS[::2], repeat=2)):
        expected = [
            REFERENCE.quantize(given, spec, axis=axis, placement=PLACE, pad=True)
            for axis, spec in zip((1, 0), specs, strict=True)
        ]
        for backend in KERNELS:
            found = backend.quantize_dual(given, specs, placements=(PLACE, PLACE), pads=(True, True))
            for q, e in zip(found, expected, strict=True):
                check(q, e)
            guarded.check()


def test_one_line_that_is_all_lines(guarded: Guarded, flows: set[int]) -> None:
    x = np.broadcast_to(values((1, 32), np.float32), (128, 32))
    for backend in KERNELS:
        check(backend.quantize(x, PLAIN, axis=0), REFERENCE.quantize(x, PLAIN, axis=0))
    guarded.check()
    assert flows == {COLUMNS}


@pytest.mark.parametrize("shape", [(0, 16), (128, 0), (128, 0, 16)])
def test_nothing(guarded: Guarded, shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float32)
    for backend in KERNELS:
        check(backend.quantize(x, PLAIN, axis=0), REFERENCE.quantize(x, PLAIN, axis=0))
    guarded.check()
