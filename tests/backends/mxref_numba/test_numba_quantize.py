"""Every set of Numba kernels against the reference where the conformance kit does not ask: strides, lengths, memory."""

import gc
import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import BlockShape, MXArray, OperandSpec, Rounding, ScaleRule, SignPolicy, Stream, get_backend
from mxref.formats import BLOCK_FORMATS, MXFP4, MXFP8_E4M3, BlockFormat
from mxref.steps.scale import EXPONENT_RULES

pytest.importorskip("numba")

from every_path import EveryPath
from mxref.placement import Placement
from mxref_numba import buffers

REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=70_000, layer=300, operand=2)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
EVERY = [made for made in BLOCK_FORMATS.values() if made in get_backend("numba").capabilities.formats]
OTHERS = [made for made in EVERY if made is not MXFP4]

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


TREATED = [
    *((MXFP4, spec) for spec in SPECS),
    *((made, spec) for made in OTHERS for spec in (PLAIN, SPECS[1], SPECS[3], SPECS[6])),
]


def treatment(spec: OperandSpec, made: BlockFormat) -> OperandSpec:
    """The treatment in another format, without what only powers of two have."""
    stated = {key: value for key, value in spec.stated.items() if key not in ("block", "zero_scale")}
    if not made.scale.powers:
        stated = {key: value for key, value in stated.items() if key not in ("scale_rule", "prescale")}
    zero = made.scale.one_code if spec.zero_scale else 0
    return OperandSpec(made, block=made.tile if spec.block.is_tile else made.row, zero_scale=zero, **stated)


treated = pytest.mark.parametrize(("made", "spec"), TREATED, ids=str)


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    """Values of many magnitudes, with zeros, NaN and, where the type has them, subnormal blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 50)] = -0.0
    flat[rng.integers(0, flat.size, 1 + flat.size // 3000)] = np.nan
    flat[: flat.size // 7] *= 2.0**-136
    return x.astype(dtype)


def check(
    kernels: EveryPath,
    x: NDArray[Any],
    spec: OperandSpec,
    place: Placement = Placement(STREAM),
    **request: Any,
) -> MXArray:
    got, want = (b.quantize(x, spec, placement=place, **request) for b in (kernels, REFERENCE))
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.codes, want.codes)
    assert got == want
    return got


@pytest.fixture(scope="module")
def kernels() -> EveryPath:
    return EveryPath()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sixteen_bit_input(kernels: EveryPath, dtype: Any) -> None:
    if dtype is np.float32:  # its top halves: all bfloat16 values
        x = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for rule in EXPONENT_RULES:
        check(kernels, x.reshape(-1, 32), OperandSpec(scale_rule=rule))
        check(kernels, x.reshape(32, -1), OperandSpec(scale_rule=rule), axis=0)


def _layouts() -> dict[str, tuple[NDArray[Any], int]]:
    base = values(96, 320, seed=3)
    cube = values(4, 6, 64, 32, seed=4)
    return {
        "one row": (base[0], 0),
        "one row of two axes": (base[:1], 1),
        "one column": (base[:, :1], 0),
        "33 rows": (base[:33], 1),
        "several panels": (values(70, 640), 1),
        "axis 0": (base, 0),
        "axis 0 of a Fortran array": (np.asfortranarray(base), 0),
        "axis 1 of a transpose": (base.T[:, :96], 1),
        "rows reversed": (base[::-1], 1),
        "columns reversed": (base[:, ::-1], 1),
        "both reversed, axis 0": (base[::-1, ::-1], 0),
        "every third row": (base[::3], 1),
        "every second column": (base[:, ::2], 1),
        "columns from 7 on": (base[:, 7:71], 1),
        "axis 0 of a slice": (base[:, 5:40], 0),
        "repeated row": (np.broadcast_to(base[0], (40, 320)), 1),
        "repeated value": (np.broadcast_to(base[0, 0], (3, 64)), 1),
        "repeated column, axis 0": (np.broadcast_to(base[:, :1], (96, 20)), 0),
        "4-d, last axis": (cube, 3),
        "4-d, axis 2": (cube, -2),
        "4-d, permuted": (cube.transpose(3, 0, 2, 1), 2),
        "4-d, axis 0 of a permutation": (cube.transpose(2, 3, 1, 0), 0),
        "4-d, sliced leading axes": (cube[::2, 1:4], 3),
        "4-d, lengths of one": (cube[:1, :, None, :, :1], 3),
        "5-d, repeated": (np.broadcast_to(cube[:, :, None], (4, 6, 3, 64, 32)), 4),
    }


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(_layouts()))
def test_strides(kernels: EveryPath, name: str, dtype: Any) -> None:
    x, axis = _layouts()[name]
    if dtype is not np.float32:  # the same strides, scaled to the type
        narrow = np.ascontiguousarray(x).astype(dtype)
        holder = np.empty(tuple(2 * n for n in x.shape), dtype)
        view = holder[tuple(slice(None, None, -2 if s < 0 else 2) for s in x.strides)]
        view[...] = narrow
        x = view
    x.flags.writeable = False
    for spec in (PLAIN, replace(SPECS[4], rounding=Rounding.SR)):
        check(kernels, x, spec, axis=axis)


# ---- lengths: whole steps of up to 128 elements, units, and what is left over ----


@treated
def test_lengths(kernels: EveryPath, made: BlockFormat, spec: OperandSpec) -> None:
    lengths = (64, 192, 448, 2112, 4160)
    for length, dtype in zip(lengths, itertools.cycle(DTYPES), strict=False):
        rows = 1 if length == 448 else 3
        x = values(rows, length, dtype=dtype)
        wide = np.zeros((rows, length + 8), dtype)
        wide[:, :length] = x  # rows with gaps between them cannot be joined
        for given in (x, wide[:, :length]):
            check(kernels, given, treatment(spec, made))
    check(kernels, values(5, 2109), treatment(spec, made), pad=True)


@treated
def test_columns(kernels: EveryPath, made: BlockFormat, spec: OperandSpec) -> None:
    shapes = (256, 64), (128, 96), (64, 160), (320, 65), (576, 17), (128, 336)
    for shape, dtype in zip(shapes, itertools.cycle(DTYPES), strict=False):
        x = values(*shape, dtype=dtype)
        for given in (x, np.asfortranarray(x), x[::-1]):
            check(kernels, given, treatment(spec, made), axis=0)
    check(kernels, values(3, 256, 5), treatment(spec, made), axis=1)


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_tiles_and_nothing(kernels: EveryPath, made: BlockFormat) -> None:
    tile = treatment(TILE, made)
    for x, axis in ((values(2, 64, 512), 1), (values(2, 64, 512), 2), (values(128, 96), 0)):
        check(kernels, x, tile, axis=axis)
    check(kernels, np.empty((0, 64), np.float32), OperandSpec(made), pad=True)


@pytest.mark.parametrize("bits", [16, 22])
def test_random_bits_of_scattered_rows(kernels: EveryPath, bits: int) -> None:
    x = values(3, 4, 128)
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    for place in (
        Placement(STREAM, (5, 2, 256), (9, 7, 512)),  # rows in groups of 4 out of 7
        Placement(STREAM, (5, 0, 0), (9, 4, 128)),  # rows one after the other
        Placement(STREAM, (5, 0, 128), (9, 4, 256)),
    ):
        check(kernels, x, spec, place)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(kernels: EveryPath, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxref_numba.threads.worker_count", lambda elements: workers)
    q = check(kernels, values(67, 320), OperandSpec(MXFP8_E4M3, rounding=Rounding.SR))
    np.testing.assert_array_equal(kernels.dequantize(q).view("u4"), REFERENCE.dequantize(q).view("u4"))
    got, want = kernels.scaled_gemm(q, q), REFERENCE.scaled_gemm(q, q, profile="ordered")
    np.testing.assert_array_equal(got.view("u4"), want.view("u4"))


# ---- two axes from one read ----


@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(
        zip(
            [(64, 64), (192, 1216), (320, 128), (512, 256), (128, 1088)],
            itertools.cycle(DTYPES),
            strict=False,
        )
    ),
)
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
            assert q == REFERENCE.quantize(given, spec, axis=axis, placement=Placement(rng))


@pytest.mark.parametrize("shape", [(33, 250), (130, 1), (1, 31)])
def test_dual_padded(kernels: EveryPath, shape: tuple[int, int]) -> None:
    x = values(*shape)
    got = kernels.quantize_dual(
        x, (SPECS[6], SPECS[4]), placements=(Placement(STREAM), Placement(STREAM)), pads=(True, True)
    )
    for axis, q, spec in zip((1, 0), got, (SPECS[6], SPECS[4]), strict=True):
        assert q == REFERENCE.quantize(x, spec, axis=axis, placement=Placement(STREAM), pad=True)


def test_dual_of_nothing(kernels: EveryPath) -> None:
    for shape in ((0, 64), (64, 0)):
        for q, axis in zip(
            kernels.quantize_dual(np.empty(shape, np.float32), (PLAIN, PLAIN)), (1, 0), strict=True
        ):
            assert q == REFERENCE.quantize(np.empty(shape, np.float32), PLAIN, axis=axis)


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("pair", list(zip(OTHERS, [*OTHERS[1:], MXFP4], strict=True)), ids=str)
def test_dual_of_two_formats(kernels: EveryPath, pair: tuple[BlockFormat, BlockFormat]) -> None:
    for shape, dtype in (((192, 320), np.float32), ((128, 256), ml_dtypes.bfloat16)):
        x = values(*shape, dtype=dtype)
        for first, second in ((PLAIN, PLAIN), (SPECS[2], SPECS[4])):
            specs = treatment(first, pair[0]), treatment(second, pair[1])
            got = kernels.quantize_dual(x, specs, placements=(Placement(STREAM), Placement(STREAM)))
            for axis, q, spec in zip((1, 0), got, specs, strict=True):
                assert q == REFERENCE.quantize(x, spec, axis=axis, placement=Placement(STREAM))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", OTHERS, ids=str)
def test_dequantize_other_formats(kernels: EveryPath, made: BlockFormat, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for shape in ((1, made.k), (5, 96), (7, 100), (3, 1000), (33, 4096)):
        like = REFERENCE.quantize(values(*shape), OperandSpec(made), pad=True)
        codes, scales = (rng.integers(0, 256, each.shape, np.uint8) for each in (like.codes, like.scales))
        q = replace(like, codes=codes, scales=scales)
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
