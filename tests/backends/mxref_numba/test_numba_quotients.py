"""Quotients by scales with a mantissa, where they decide: at midpoints, at the steps of SR, and one float32 beside."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba")

from numba.core import types
from numba.core.caching import NullCache

from every_path import EveryPath
from mxref import BlockShape, FourOverSix, OperandSpec, Rounding, Stream, get_backend
from mxref.formats import NVFP4
from mxref.placement import Placement
from mxref.steps.random import random_integers
from mxref.steps.rounding import MAX_SR_BITS
from mxref_numba.kernels import KERNELS, address_of
from mxref_numba.lanes import F32, F64, broadcast, load, vector_code
from mxref_numba.path import available
from mxref_numba.vector.block_lanes import line
from mxref_numba.vector.target import TARGETS, VectorNative

REFERENCE = get_backend("reference")
STREAM = Stream(seed=0x1234567, step=3, layer=5, operand=1)
ROWS, BLOCKS, K = 24, 40, NVFP4.k
MAGNITUDES = np.array(NVFP4.element.magnitudes)
AMAX = [
    np.float32(2688),  # t = 1, so that midpoints are ties
    np.float32(21 * 2.0**-9),
    np.float32(3.14159),
    np.float32(0.7071) * np.float32(2.0**-70),
    np.float32(1.1) * np.float32(2.0**120),
    np.float32(2.0**-119),  # most quotients are of subnormal numbers
]
"""Of the tensor; some give a scale t of few bits, others of 24."""


@pytest.fixture(scope="module")
def kernels() -> EveryPath:
    return EveryPath()


def placed(amax: np.float32) -> Placement:
    return Placement(STREAM, amax=np.array([amax]))


def steps_of(amax: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Scale codes of blocks, and X t of each, float64 [ROWS, BLOCKS, 1]: exact."""
    codes = np.random.default_rng(7).integers(1, NVFP4.scale.max_code + 1, (ROWS, BLOCKS, 1))
    t = REFERENCE.plan(np.zeros((1, K), np.float32), OperandSpec(NVFP4), axis=1, placement=placed(amax))
    return codes.astype(np.uint8), np.array(NVFP4.scale.values)[codes] * float(t.tensor_scale[0])


def beside(exact: NDArray[np.float64], step: NDArray[np.float64]) -> NDArray[np.float32]:
    """Float32 next to real numbers, [ROWS, BLOCKS, K]; the first element of each block gives it its scale."""
    rng = np.random.default_rng(3)
    with np.errstate(under="ignore"):
        bits = (exact.astype(np.float32).view(np.int32) + rng.integers(-1, 2, exact.shape)).astype(np.int32)
    x = np.where(exact > 0, np.maximum(bits, 0), 0).astype(np.int32).view(np.float32)
    x[..., 0] = (MAGNITUDES[-1] * step[..., 0]).astype(np.float32)
    x = np.minimum(x, x[..., :1])
    return np.where(rng.random(x.shape) < 0.5, -x, x).astype(np.float32).reshape(ROWS, BLOCKS * K)


def check(kernels: EveryPath, x: NDArray[Any], spec: OperandSpec, place: Placement) -> Any:
    got, want = (each.quantize(x, spec, placement=place) for each in (kernels, REFERENCE))
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.codes, want.codes)
    assert got == want
    return want


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ])
def test_midpoints_and_grid_points(kernels: EveryPath, amax: np.float32, rounding: Rounding) -> None:
    codes, step = steps_of(amax)
    points = np.sort(np.concatenate([MAGNITUDES, (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2]))
    chosen = np.random.default_rng(1).choice(points, (ROWS, BLOCKS, K))
    q = check(kernels, beside(chosen * step, step), OperandSpec(NVFP4, rounding=rounding), placed(amax))
    if amax > 1e-30:
        np.testing.assert_array_equal(q.scales, codes[..., 0])  # the blocks have the scales that are meant


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("bits", [1, 5, 16, 17, MAX_SR_BITS])
def test_where_random_integers_carry(kernels: EveryPath, amax: np.float32, bits: int) -> None:
    _, step = steps_of(amax)
    r = random_integers(np.arange(ROWS), 0, BLOCKS * K, BLOCKS * K, STREAM, bits).reshape(ROWS, BLOCKS, K)
    low = np.random.default_rng(2).integers(0, len(MAGNITUDES) - 1, r.shape)
    gap = MAGNITUDES[low + 1] - MAGNITUDES[low]
    turn = MAGNITUDES[low] + gap * (1 - r / 2.0**bits)  # from here on it rounds up
    spec = OperandSpec(NVFP4, rounding=Rounding.SR, sr_bits=bits)
    check(kernels, beside(turn * step, step), spec, placed(amax))


@pytest.mark.parametrize("amax", AMAX)
def test_scales_at_midpoints_and_beyond(kernels: EveryPath, amax: np.float32) -> None:
    _, step = steps_of(amax)
    t = float(step.reshape(-1)[0] / np.array(NVFP4.scale.values)[steps_of(amax)[0].reshape(-1)[0]])
    scales = np.array(NVFP4.scale.values[: NVFP4.scale.max_code + 1])
    middles = np.concatenate([(scales[1:] + scales[:-1]) / 2, scales[-1:] * 1.5])
    tops = np.resize(middles, (ROWS, BLOCKS, 1)) * MAGNITUDES[-1] * t
    x = beside(np.broadcast_to(tops, (ROWS, BLOCKS, K)).copy(), tops / MAGNITUDES[-1])
    x = x.reshape(ROWS, BLOCKS, K)
    x[..., 1:] /= 3
    for spec in (OperandSpec(NVFP4), OperandSpec(NVFP4, rounding=Rounding.SR)):
        check(kernels, x.reshape(ROWS, -1), spec, placed(amax))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("amax", [0.0, 5.0, 1e-30, 1e30])
def test_blocks_of_extremes(kernels: EveryPath, amax: float, dtype: Any) -> None:
    x = np.zeros((3, 7 * K))
    x[:, K : 2 * K] = 2.0**-20
    x[:, 3 * K + 5], x[0, 4 * K], x[1, 4 * K + 15], x[2, 5 * K + 8] = 1.5, np.nan, np.inf, -np.inf
    x[:, ::3] *= -1
    for rounding, zero in ((Rounding.RNE, 0), (Rounding.SR, NVFP4.scale.one_code)):
        spec = OperandSpec(NVFP4, rounding=rounding, zero_scale=zero)
        check(kernels, x.astype(dtype), spec, placed(np.float32(amax)))
        check(kernels, x.astype(dtype), spec, replace(placed(np.float32(1)), amax=None))
        check(kernels, np.zeros((2, K), dtype), spec, replace(placed(np.float32(1)), amax=None))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_largest_magnitude_of_a_tensor_is_found_wherever_it_lies(kernels: EveryPath, dtype: Any) -> None:
    """In any row, in whole steps and in the rest of one, in any piece of a strided input, and after a transform."""
    rng = np.random.default_rng(8)
    for at in ((0, 0, 0), (15, 31, 175), *rng.integers(0, (16, 32, 176), (4, 3)).tolist()):
        x = rng.uniform(-1, 1, (16, 32, 176))
        x[rng.random(x.shape) < 0.01] = np.nan
        x[tuple(at)] = rng.uniform(-9, -5)
        x = x.astype(dtype)
        wide = np.repeat(np.repeat(x, 2, 1), 2, 2)
        for view in (x, wide[:, ::2], wide[..., ::2], x[::-1, :, ::-1]):
            for axis, n in ((0, 0), (1, 16), (2, 0), (2, 16)):
                spec = OperandSpec(NVFP4, hadamard=n)
                got, want = (each.plan(view, spec, axis=axis) for each in (kernels, REFERENCE))
                assert got.tensor_scale.view(np.uint32) == want.tensor_scale.view(np.uint32), (at, axis)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("amax", [*AMAX, np.float32(0), np.float32(3.4e38), np.float32(1e-45)])
def test_every_code_is_decoded(kernels: EveryPath, amax: np.float32, dtype: str) -> None:
    rng = np.random.default_rng(4)
    for length in (K, 9 * K, 300 * K):
        like = REFERENCE.quantize(
            np.zeros((5, length), np.float32), OperandSpec(NVFP4), placement=placed(amax)
        )
        codes, scales = (
            rng.integers(0, 256, each.shape).astype(np.uint8) for each in (like.codes, like.scales)
        )
        q = replace(like, codes=codes, scales=scales)
        got, want = (each.dequantize(q, dtype) for each in (kernels, REFERENCE))
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("by", list(FourOverSix)[1:])
@pytest.mark.parametrize("block", [NVFP4.row, NVFP4.tile])
def test_four_over_six(kernels: EveryPath, by: FourOverSix, block: BlockShape) -> None:
    """Among the blocks are many whose two errors are equal, or differ by less than float64 can add."""
    rng = np.random.default_rng(1)
    near = (rng.integers(-96, 97, (96, 64)) / 16).astype(np.float32)
    near[::2] += np.where(rng.random((48, 64)) < 0.1, np.float32(2.0**-20), np.float32(0))
    near[1::4, 3::7] = 2.0**-70
    drawn = rng.standard_normal((96, 64)).astype(np.float32)
    drawn[3, 5], drawn[20:22] = np.nan, 0
    spec = OperandSpec(NVFP4, four_over_six=by, block=block)
    taken = 0
    for x in (near, drawn):
        for amax in (1536, 96, 1e-3, 3e38, None):
            place = replace(placed(np.float32(1)), amax=None) if amax is None else placed(np.float32(amax))
            q = check(kernels, x, spec, place)
            six = REFERENCE.quantize(x, replace(spec, four_over_six=FourOverSix.OFF), placement=place)
            taken += amax is not None and np.any(q.scales != six.scales)
        check(kernels, x, replace(spec, rounding=Rounding.SR), placed(np.float32(6)))
        for q, axis in zip(kernels.quantize_dual(x, (spec, spec)), (1, 0), strict=True):
            assert q == REFERENCE.quantize(x, spec, axis=axis)
    assert taken > 3


@pytest.mark.parametrize("by", [FourOverSix.ABSOLUTE, FourOverSix.SQUARED])
@pytest.mark.parametrize("block", [NVFP4.row, NVFP4.tile])
def test_sums_that_float64_rounds_apart_are_equal(
    kernels: EveryPath, by: FourOverSix, block: BlockShape
) -> None:
    """Errors are b, four small ones and 2 - b for amax / 6, and 2 - b, the same and b for amax / 4.

    Float64 loses the small ones after 2 - b and not after b, so that its sum for amax / 6 is the larger one.
    """
    b = 2.0**-21
    small = 0.45 * 2.0**-52 if by is FourOverSix.ABSOLUTE else 0.4**0.5 * 2.0**-25.5
    x = np.zeros((16, K), np.float32)
    x[0, :7] = [48, 8 - b, small, small, small, small, 6 + b]
    q = check(kernels, x, OperandSpec(NVFP4, four_over_six=by, block=block), placed(np.float32(1536)))
    assert q.tensor_scale[0] == 1
    assert NVFP4.scale.values[q.scales[0, 0]] == 8


def just_below_steps() -> list[tuple[float, float, int]]:
    """Magnitudes, divisors of 28 bits, and the steps of 2^-23 just above the quotient, by less than 2^-49 of it."""
    rng, found = np.random.default_rng(5), []
    while len(found) < 64:
        d = int(rng.integers(1 << 27, 1 << 28)) | 1
        for power in (27, 28):
            for left in range(1, 9):
                x = -left * pow(1 << power, -1, d) % d
                if x < 1 << 24 and 1 << 23 <= (n := ((x << power) + left) // d) < 1 << 24:
                    found.append((float(x), d * 2.0 ** (23 - power), n))
    return found


DECIDED_BY_A_STEP = [
    ("0x1.65e44ep+11", 57, "0x1.38c484p+0", 48, 1660),
    ("0x1.b4865cp+11", 57, "0x1.309a9ep+1", 888, 1446),
    ("0x1.b4865cp+11", 59, "0x1.309a9ep+1", 248, 2897),
    ("0x1.4db026p+12", 57, "0x1.44d4d8p+1", 404, 3577),
    ("0x1.3c5228p+12", 61, "0x1.f7a994p+1", 42, 3226),
    ("0x1.4472aap+12", 61, "0x1.980a2cp+1", 843, 3791),
]
"""The amax of a tensor, a scale code, a magnitude just below a step of 2^-22 of a gap, and a row and column of a tensor
[1024, 4096] where the random integer of 22 bits carries from this step on."""


@pytest.mark.parametrize(("amax", "code", "magnitude", "row", "column"), DECIDED_BY_A_STEP)
def test_22_random_bits_take_a_division(
    kernels: EveryPath, amax: str, code: int, magnitude: str, row: int, column: int
) -> None:
    """A product with the inverse, which is enough for 16 bits, lies on the step."""
    first, shape = column // K * K, (1024, 4096)
    place = replace(placed(np.float32(float.fromhex(amax))), origin=(row, first), global_shape=shape)
    spec = OperandSpec(NVFP4, rounding=Rounding.SR, sr_bits=MAX_SR_BITS)
    block = np.zeros((1, K), np.float32)
    step = NVFP4.scale.values[code] * float(
        REFERENCE.plan(block, spec, axis=1, placement=place).tensor_scale[0]
    )
    block[0, 0], block[0, column % K] = 6 * step, float.fromhex(magnitude)
    r = int(random_integers(np.array([row]), first, K, shape[1], STREAM, MAX_SR_BITS)[0, column % K])
    below = Fraction(float.fromhex(magnitude)) / Fraction(step) * 2**23  # up to 2 a gap is 1/2
    assert 0 < -below % 1 < below / 2**49
    assert (math.ceil(below) + r) % 2**22 == 0
    assert check(kernels, block, spec, place).scales[0, 0] == code


@pytest.mark.parametrize("path", [each for each in available() if each in TARGETS])
def test_a_division_knows_quotients_just_below_a_step(path: str) -> None:
    target, cases = TARGETS[path], just_below_steps()

    @vector_code(types.int64, types.int64, types.int64)
    def code(builder: Any, x: Any, divisor: Any, out: Any) -> None:
        factor = broadcast(builder, F64, target.lanes // 2, divisor)
        line(load(builder, F32, target.lanes, x), factor, divides=True).store(out)

    def applied(x, divisor, out):  # type: ignore[no-untyped-def]
        code(x, divisor, out)

    native = VectorNative(applied, target)
    made = native.dispatcher()
    made._cache = NullCache()
    KERNELS.remove(made)  # it is none of the package's
    native.__dict__["compiled"] = made.get_compile_result(types.void(*native.types))
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 3)(native.address)
    for x, divisor, step in cases:
        given, by = np.full(target.lanes, x, np.float32), np.array([divisor])
        out = np.zeros(target.lanes, np.int32)
        call(*map(address_of, (given, by, out)))
        assert (out == step - 1).all(), (x, divisor)
