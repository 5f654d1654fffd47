"""Elements other than E2M1 on every set of Numba kernels, quantized and decoded with the bits of the reference."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from differential import assert_same_blocks
from mxref import BlockShape, MXArray, OperandSpec, Rounding, ScaleRule, SignPolicy, Stream, get_backend
from mxref.formats import BLOCK_FORMATS, MXFP4, BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement

pytest.importorskip("numba")

from every_path import EveryPath

REFERENCE = get_backend("reference")
FORMATS = [each for each in BLOCK_FORMATS.values() if each is not MXFP4]
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
PLACE = Placement(Stream(seed=0xFEDCBA9876543210, step=3, layer=9, operand=2))
K = 32
TURNS = (0, 1, 0x3FFFFF, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x77FFFF, 0x780000, 0x7FFFFF)
"""Mantissas of amax at which a scale rule turns, and their neighbours."""


@pytest.fixture(scope="module")
def kernels() -> EveryPath:
    return EveryPath()


@pytest.fixture(params=FORMATS, ids=str)
def block_format(request: pytest.FixtureRequest) -> BlockFormat:
    chosen: BlockFormat = request.param
    return chosen


def blocks(made: BlockFormat) -> NDArray[np.float32]:
    """Blocks that decide: grid points and ties with their neighbours, turns of amax in every binade, and specials."""
    rng = np.random.default_rng(made.element.mantissa_bits)
    grid = np.array(made.element.magnitudes)
    points = np.concatenate(
        [grid, (grid[1:] + grid[:-1]) / 2, (grid[1:] + grid[:-1]) / 2 / made.element.prescale]
    )
    rows = []
    for e in (-127, -126, -30, 0, 90):
        words = (points * 2.0**e).astype(np.float32).view(np.uint32).astype(np.int64)
        near = np.clip(words[:, None] + np.arange(-1, 2), 0, 0x7F7FFFFF).astype(np.uint32).ravel()
        rng.shuffle(near)
        body = np.resize(near, (-(-near.size // (K - 1)), K - 1))
        # The largest element keeps the scale at 2^e; below it nothing saturates, or a little does.
        tops = rng.choice([grid[-1], grid[-1] * 1.0625, 2.0**made.element.max_exponent], len(body)) * 2.0**e
        rows.append(np.concatenate([body, tops.astype(np.float32).view(np.uint32)[:, None]], axis=1))
    exponents = rng.permutation(255)[:, None, None].astype(np.uint32) << 23
    amax = (exponents[::4] | np.array(TURNS, np.uint32)[None, :, None]).reshape(-1, 1)
    below = np.maximum(amax.astype(np.int64) - rng.integers(0, 20 << 23, (len(amax), K - 1)), 0)
    rows.append(np.concatenate([below.astype(np.uint32), amax], axis=1))
    special = rng.integers(0, 1 << 31, (24, K)).astype(np.uint32)
    special[:8, 5] = (0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF) * 2
    special[8:12] = 0
    special[12:16] = np.uint32([1, 0x7FFFFF, 0x800000, 0x7F7FFFFF])[:, None]
    rows.append(special)
    bits = np.concatenate(rows)
    bits = np.resize(bits, (-(-len(bits) // K) * K, K))
    signs = rng.integers(0, 2, bits.shape).astype(np.uint32) << np.uint32(31)
    return (bits | signs).view(np.float32)


def values(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    x = np.random.default_rng(0).standard_normal(shape) * np.exp2(
        np.random.default_rng(1).integers(-9, 9, shape)
    )
    return x.astype(dtype)


def check(kernels: EveryPath, x: NDArray[Any], spec: OperandSpec, **request: Any) -> MXArray:
    got, expected = (b.quantize(x, spec, **{"placement": PLACE, **request}) for b in (kernels, REFERENCE))
    element = got.format.element
    assert_same_blocks(
        unpack(got.codes, element), got.scales, unpack(expected.codes, element), expected.scales
    )
    assert got == expected
    return got


# ---- quantize ----


@pytest.mark.clause("conformance.capabilities", "rounding.saturate")
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("rule", ScaleRule)
def test_every_rule_and_rounding(
    kernels: EveryPath, block_format: BlockFormat, rule: ScaleRule, rounding: Rounding
) -> None:
    x = blocks(block_format)
    for prescale, block in itertools.product((False, True), BlockShape):
        spec = OperandSpec(
            format=block_format, scale_rule=rule, rounding=rounding, prescale=prescale, block=block
        )
        check(kernels, x, spec)
    if rule is ScaleRule.FLOOR:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = [x.astype(dtype) for dtype in DTYPES[1:]]
        for given in narrow:
            check(kernels, given, OperandSpec(format=block_format, rounding=rounding))
            check(
                kernels,
                given.reshape(-1, 4 * K).T,
                OperandSpec(format=block_format, rounding=rounding),
                axis=0,
            )


@pytest.mark.clause("rounding.sr")
@pytest.mark.parametrize("bits", [1, 8, 16, 17, 22])
def test_random_bits(kernels: EveryPath, block_format: BlockFormat, bits: int) -> None:
    x = blocks(block_format)[: 32 * K].reshape(-1, 2 * K)
    spec = OperandSpec(format=block_format, rounding=Rounding.SR, sr_bits=bits)
    check(kernels, x, spec)
    where = Placement(PLACE.stream, (2**36 - 5, 1024), (2**36 + len(x), 4096))
    check(kernels, x, spec, placement=where)


@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.SR])
@pytest.mark.parametrize("n", [0, 16, 256])
def test_layouts(kernels: EveryPath, block_format: BlockFormat, n: int, rounding: Rounding) -> None:
    """Whole steps of 128 elements and what is left over, columns, strides, padding and tiles, in every type."""
    signs = SignPolicy.PER_STEP if n else SignPolicy.NONE
    spec = OperandSpec(format=block_format, hadamard=n, signs=signs, rounding=rounding)
    for dtype in DTYPES:
        wide = values(5, 2400, dtype=dtype)
        for x in (wide, wide[:, 3:2112], wide[::-2, ::2]):
            check(kernels, x, spec, pad=True)
        tall = values(320, 70, dtype=dtype)
        for x in (tall, tall.T.copy().T, tall[::-1]):
            check(kernels, x, spec, axis=0, pad=True)
    check(
        kernels,
        values(2, 64, 512),
        OperandSpec(format=block_format, block=BlockShape.TILE, rounding=rounding),
    )
    check(kernels, values(3, 256, 5), spec, axis=1)
    check(kernels, np.empty((0, 64), np.float32), spec, pad=True)


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("other", BLOCK_FORMATS.values(), ids=str)
def test_both_axes_at_once(kernels: EveryPath, block_format: BlockFormat, other: BlockFormat) -> None:
    for shape, dtype in (((192, 320), np.float32), ((128, 256), ml_dtypes.bfloat16)):
        x = values(*shape, dtype=dtype)
        for n, rounding in ((0, Rounding.RNE), (16, Rounding.SR)):
            specs = (
                OperandSpec(format=block_format, hadamard=n, rounding=rounding),
                OperandSpec(format=other, hadamard=n),
            )
            got = kernels.quantize_dual(x, specs, placements=(PLACE, PLACE))
            for axis, q, spec in zip((1, 0), got, specs, strict=True):
                assert q == REFERENCE.quantize(x, spec, axis=axis, placement=PLACE)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(
    kernels: EveryPath, block_format: BlockFormat, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxref_numba.compiled.worker_count", lambda elements: workers)
    spec = OperandSpec(format=block_format, rounding=Rounding.SR)
    q = check(kernels, values(67, 320), spec)
    same_bits(kernels.dequantize(q), REFERENCE.dequantize(q))
    same_bits(kernels.scaled_gemm(q, q), REFERENCE.scaled_gemm(q, q, profile="ordered"))


# ---- dequantize ----


def same_bits(got: NDArray[Any], want: NDArray[Any]) -> None:
    assert got.dtype == want.dtype
    words = f"u{want.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(words), np.ascontiguousarray(want).view(words)
    )


@pytest.mark.clause("dequantize.value", "dequantize.nan", "dequantize.overflow")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_at_every_scale(kernels: EveryPath, block_format: BlockFormat, dtype: str) -> None:
    every = np.arange(256) % (1 << block_format.element.bits)
    codes = np.tile(pack(every.astype(np.uint8), block_format.element), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for shape, axis in (((256, 256), 1), ((256, 251), 1), ((256, 256), 0), ((4, 64, 256), 2)):
        rows = [n for i, n in enumerate(shape) if i != axis]
        q = MXArray(codes.reshape(*rows, -1), scales.reshape(*rows, 8), shape, axis, format=block_format)
        same_bits(kernels.dequantize(q, dtype), REFERENCE.dequantize(q, dtype))


def test_values_after_quantization(kernels: EveryPath, block_format: BlockFormat) -> None:
    x, spec = values(70, 160), OperandSpec(format=block_format, rounding=Rounding.SR)
    for dtype in ("float32", "bfloat16"):
        got, want = (b.fake_quantize(x, spec, dtype=dtype, placement=PLACE) for b in (kernels, REFERENCE))
        same_bits(got, want)
