"""Every set of Numba kernels against the reference, where their ways of moving elements differ."""

import gc
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import BlockShape, MXArray, OperandSpec, Rounding, ScaleRule, SignPolicy, Stream, get_backend

pytest.importorskip("numba")

from every_path import EveryPath
from mxref.placement import Placement
from mxref_numba import buffers

REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=3, layer=9, operand=2)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)

PLAIN = OperandSpec()
SPECS = [
    PLAIN,
    OperandSpec(scale_rule=ScaleRule.RCEIL, rounding=Rounding.RNA, prescale=True),
    OperandSpec(scale_rule=ScaleRule.EVEN, rounding=Rounding.SR, zero_scale=127),
    OperandSpec(rounding=Rounding.SR, sr_bits=22, prescale=True),
    OperandSpec(scale_rule=ScaleRule.CEIL, hadamard=16, signs=SignPolicy.FIXED),
    OperandSpec(hadamard=2, rounding=Rounding.RTZ),
    OperandSpec(hadamard=64, signs=SignPolicy.PER_STEP, rounding=Rounding.SR),
]
TILE = OperandSpec(block=BlockShape.TILE, rounding=Rounding.SR)


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    """Values of many magnitudes, with zeros, NaN and, where the type has them, subnormal blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 50)] = -0.0
    flat[rng.integers(0, flat.size, 1 + flat.size // 3000)] = np.nan
    flat[: flat.size // 7] *= 2.0**-136
    return x.astype(dtype)


def same(got: MXArray, expected: MXArray) -> None:
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(got.codes, expected.codes)
    assert got == expected


@pytest.fixture(scope="module")
def kernels() -> EveryPath:
    return EveryPath()


# ---- lengths: whole steps of up to 128 elements, units, and what is left over ----


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("length", [64, 192, 448, 2112, 4160])
def test_lengths(kernels: EveryPath, length: int, spec: OperandSpec) -> None:
    for dtype, rows in itertools.product(DTYPES, (1, 3)):
        x = values(rows, length, dtype=dtype)
        wide = np.zeros((rows, length + 8), dtype)
        wide[:, :length] = x  # rows with gaps between them cannot be joined
        for given in (x, wide[:, :length]):
            same(
                kernels.quantize(given, spec, placement=Placement(STREAM)),
                REFERENCE.quantize(given, spec, placement=Placement(STREAM)),
            )


@pytest.mark.parametrize("spec", [*SPECS, TILE], ids=str)
@pytest.mark.parametrize("shape", [(256, 64), (128, 96), (64, 160), (320, 65), (576, 17), (128, 336)])
def test_columns(kernels: EveryPath, shape: tuple[int, int], spec: OperandSpec) -> None:
    if spec.block is BlockShape.TILE and shape[1] % 32:
        shape = (shape[0], 32)
    for dtype in DTYPES:
        x = values(*shape, dtype=dtype)
        for given in (x, np.asfortranarray(x), x[::-1]):
            expected = REFERENCE.quantize(given, spec, axis=0, placement=Placement(STREAM))
            same(kernels.quantize(given, spec, axis=0, placement=Placement(STREAM)), expected)


@pytest.mark.parametrize("bits", [16, 22])
def test_random_bits_of_scattered_rows(kernels: EveryPath, bits: int) -> None:
    x = values(3, 4, 128)
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    for place in (
        Placement(STREAM, (5, 2, 256), (9, 7, 512)),  # rows in groups of 4 out of 7
        Placement(STREAM, (5, 0, 0), (9, 4, 128)),  # rows one after the other
        Placement(STREAM, (5, 0, 128), (9, 4, 256)),
    ):
        same(kernels.quantize(x, spec, placement=place), REFERENCE.quantize(x, spec, placement=place))


# ---- two axes from one read ----


@pytest.mark.parametrize("shape", [(64, 64), (192, 1216), (320, 128), (512, 256), (128, 1088)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dual(kernels: EveryPath, dtype: Any, shape: tuple[int, int]) -> None:
    x = values(*shape, dtype=dtype)
    wide = np.concatenate([x, x], axis=1)
    pairs = [(PLAIN, PLAIN), (SPECS[4], SPECS[2]), (SPECS[6], PLAIN), (TILE, SPECS[5]), (SPECS[1], TILE)]
    if shape[1] % 256 == 0:
        pairs += [(PLAIN, OperandSpec(hadamard=256))]
        pairs += [(OperandSpec(hadamard=256), SPECS[2]), (SPECS[3], OperandSpec(hadamard=128))]
    for given, specs in itertools.product((x, x[::-1], x.T, wide[:, : shape[1]]), pairs):
        streams = STREAM, Stream(seed=1)
        got = kernels.quantize_dual(given, specs, placements=tuple(map(Placement, streams)))
        for axis, q, spec, rng in zip((1, 0), got, specs, streams, strict=True):
            same(q, REFERENCE.quantize(given, spec, axis=axis, placement=Placement(rng)))


@pytest.mark.parametrize("shape", [(33, 250), (130, 1), (1, 31)])
def test_dual_padded(kernels: EveryPath, shape: tuple[int, int]) -> None:
    x = values(*shape)
    got = kernels.quantize_dual(
        x, (SPECS[6], SPECS[4]), placements=(Placement(STREAM), Placement(STREAM)), pads=(True, True)
    )
    for axis, q, spec in zip((1, 0), got, (SPECS[6], SPECS[4]), strict=True):
        same(q, REFERENCE.quantize(x, spec, axis=axis, placement=Placement(STREAM), pad=True))


def test_dual_of_nothing(kernels: EveryPath) -> None:
    for shape in ((0, 64), (64, 0)):
        for q, axis in zip(
            kernels.quantize_dual(np.empty(shape, np.float32), (PLAIN, PLAIN)), (1, 0), strict=True
        ):
            assert q == REFERENCE.quantize(np.empty(shape, np.float32), PLAIN, axis=axis)


# ---- dequantize and Hadamard ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (7, 100), (3, 1000), (2048, 2080)])
def test_dequantize(kernels: EveryPath, shape: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(1)
    length = -(-shape[1] // 32) * 32
    codes = rng.integers(0, 256, (shape[0], length // 2), np.uint8)
    scales = rng.integers(0, 256, (shape[0], length // 32), np.uint8)
    q = MXArray(codes, scales, shape, 1)
    got, expected = (b.dequantize(q, dtype) for b in (kernels, REFERENCE))
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("n", [2, 16, 32, 256])
def test_hadamard_rows_and_columns(kernels: EveryPath, n: int) -> None:
    signs = 0x5A & ((1 << n) - 1)
    for length, dtype in itertools.product((n, 3 * n, 18 * n), DTYPES):
        x = np.nan_to_num(values(67, length, dtype=dtype).astype(np.float32)).astype(dtype)
        for given, axis in ((x, 1), (x.T, 0), (x[:, ::-1], 1), (np.asfortranarray(x), 1)):
            got, expected = (b.hadamard(given, n, signs, axis=axis) for b in (kernels, REFERENCE))
            np.testing.assert_array_equal(got.copy().view(np.uint32), expected.copy().view(np.uint32))


# ---- memory of large results ----

_LARGE = (1536, 1024)


def test_memory_is_lent_again_only_when_no_array_uses_it() -> None:
    first = buffers.empty(_LARGE, np.float32)
    assert first.__array_interface__["data"][0] % buffers.LINE == 0
    part = first.reshape(-1).view(np.uint8)[64:128].T
    address = first.__array_interface__["data"][0]
    del first
    gc.collect()
    second = buffers.empty(_LARGE, np.float32)
    assert second.__array_interface__["data"][0] != address  # `part` still reads it
    second[...] = 1
    part[...] = 7
    assert (second == 1).all()
    del part, second
    gc.collect()
    addresses = {buffers.empty(_LARGE, np.float32).__array_interface__["data"][0] for _ in range(3)}
    assert len(addresses) == 1


def test_memory_that_waits_is_bounded() -> None:
    arrays = [buffers.empty((buffers.KEPT_BYTES // 4,), np.uint8) for _ in range(6)]
    del arrays
    gc.collect()
    assert sum(buffer.size for buffer in buffers._waiting) <= buffers.KEPT_BYTES


def test_results_do_not_share_memory(kernels: EveryPath) -> None:
    x = values(2048, 2048)
    kept = kernels.quantize(x, PLAIN)
    before = kept.codes.copy()
    decoded, negated = kernels.dequantize(kept), kernels.dequantize(kernels.quantize(-x, PLAIN))
    np.testing.assert_array_equal(kept.codes, before)
    np.testing.assert_array_equal(decoded, -negated)
