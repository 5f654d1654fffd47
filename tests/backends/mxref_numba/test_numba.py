"""The Numba backend against the reference, bit for bit, on everything that it declares."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mxref import (
    BlockShape,
    GemmProfile,
    MXArray,
    OperandSpec,
    Rounding,
    ScaleRule,
    SignPolicy,
    Stream,
    UnsupportedError,
    get_backend,
)
from mxref.errors import NonfiniteError
from mxref.formats import CANONICAL_NAN, E2M1, Nonfinite
from mxref.gemm import bounded_tolerance
from mxref.layouts.packed import pack
from mxref.placement import Placement
from mxref.steps.hadamard import SIZES
from strategies import Block, K, any_blocks, crafted_blocks, gemm_operands

numba = pytest.importorskip("numba")

BACKEND = get_backend("numba")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0x0123456789ABCDEF, step=70_000, layer=300, operand=4)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)

Bits = NDArray[Any]


def bits_of(x: NDArray[Any]) -> Bits:
    """Bit patterns with every NaN made the same: those of a transform have no canonical payload."""
    bits = np.array(x).view(f"u{x.dtype.itemsize}")
    bits[np.isnan(x.astype(np.float64))] = CANONICAL_NAN >> (32 - 8 * x.dtype.itemsize)
    return bits


def check_quantize(
    x: NDArray[Any], spec: OperandSpec, place: Placement = Placement(STREAM), **options: Any
) -> MXArray:
    got, expected = (b.quantize(x, spec, placement=place, **options) for b in (BACKEND, REFERENCE))
    differ = got.scales != expected.scales
    assert not differ.any(), f"scales differ first at {np.argwhere(differ)[0]}"
    differ = got.codes != expected.codes
    assert not differ.any(), f"codes differ first at byte {np.argwhere(differ)[0]}"
    assert got == expected
    return got


def crafted(dtype: Any, length: int = K) -> NDArray[Any]:
    """The crafted blocks as rows of `length`, repeated up to a multiple of 32 rows, in a type that may round them."""
    blocks = crafted_blocks().reshape(-1)
    size = -(-blocks.size // (32 * length)) * 32 * length
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.resize(blocks, size).reshape(-1, length).astype(dtype)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(dtype)


# ---- quantize: every treatment ----


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BlockShape)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("rule", ScaleRule)
def test_crafted_blocks(rule: ScaleRule, rounding: Rounding, block: BlockShape, dtype: Any) -> None:
    for prescale in (False, True):
        spec = OperandSpec(scale_rule=rule, rounding=rounding, block=block, prescale=prescale)
        check_quantize(crafted(dtype, 64), spec)
        check_quantize(crafted(dtype).T, spec, axis=0)


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 8, 15, 16, 17, 21, 22])
def test_sr_bits(bits: int, prescale: bool) -> None:
    x = crafted(np.float32, 96)
    codes = check_quantize(x, OperandSpec(rounding=Rounding.SR, sr_bits=bits, prescale=prescale)).codes
    toward_zero = BACKEND.quantize(x, OperandSpec(rounding=Rounding.RTZ, prescale=prescale)).codes
    assert (codes != toward_zero).any()


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("policy", [SignPolicy.NONE, SignPolicy.PER_STEP_LAYER])
@pytest.mark.parametrize("n", SIZES)
def test_hadamard_then_quantize(n: int, policy: SignPolicy) -> None:
    for rounding in (Rounding.RNE, Rounding.SR):
        spec = OperandSpec(hadamard=n, signs=policy, rounding=rounding)
        check_quantize(crafted(np.float32, 256), spec)
        check_quantize(normal(5, 768, dtype=ml_dtypes.bfloat16), spec)
    check_quantize(normal(512, 33), OperandSpec(hadamard=n, signs=policy), axis=0)
    check_quantize(normal(64, 512), OperandSpec(hadamard=n, signs=policy, block=BlockShape.TILE))


@pytest.mark.parametrize("zero_scale", [0, 127])
@pytest.mark.parametrize("block", BlockShape)
def test_zero_blocks_keep_signs(zero_scale: int, block: BlockShape) -> None:
    x = np.zeros((64, 64), np.float32)
    x[::3] = -0.0
    x[40, 40] = 1
    check_quantize(x, OperandSpec(zero_scale=zero_scale, block=block))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sixteen_bit_input(dtype: Any) -> None:
    if dtype is np.float32:  # its top halves: all bfloat16 values
        x = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for rule in ScaleRule:
        check_quantize(x.reshape(-1, K), OperandSpec(scale_rule=rule))
        check_quantize(x.reshape(K, -1), OperandSpec(scale_rule=rule), axis=0)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nonfinite_is_refused_when_asked(bad: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    with pytest.raises(NonfiniteError, match=r"\(1, 1\)"):
        BACKEND.quantize(x, OperandSpec(nonfinite=Nonfinite.RAISE))
    assert BACKEND.quantize(x, OperandSpec()).scales.tolist() == [[125, 125], [125, 255], [125, 125]]


# ---- quantize: every placement ----

SR_SPEC = OperandSpec(rounding=Rounding.SR, hadamard=16, signs=SignPolicy.FIXED)


def _layouts() -> dict[str, tuple[NDArray[Any], int]]:
    base = normal(96, 320, seed=3)
    cube = normal(4, 6, 64, 32, seed=4)
    return {
        "one row": (base[0], 0),
        "one row of two axes": (base[:1], 1),
        "one column": (base[:, :1], 0),
        "33 rows": (base[:33], 1),
        "several panels": (normal(70, 640), 1),
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
def test_strides(name: str, dtype: Any) -> None:
    x, axis = _layouts()[name]
    if dtype is not np.float32:  # the same strides, scaled to the type
        narrow = np.ascontiguousarray(x).astype(dtype)
        holder = np.empty(tuple(2 * n for n in x.shape), dtype)
        view = holder[tuple(slice(None, None, -2 if s < 0 else 2) for s in x.strides)]
        view[...] = narrow
        x = view
    x.flags.writeable = False
    for spec in (OperandSpec(), SR_SPEC):
        check_quantize(x, spec, axis=axis)


@pytest.mark.parametrize("axis", [-1, -2])
def test_tiles_in_three_dimensions(axis: int) -> None:
    x = normal(3, 64, 96)
    for view in (x, x[::-1], x.transpose(0, 2, 1), x[:, ::-1, 32:]):
        check_quantize(view, OperandSpec(block=BlockShape.TILE), axis=axis)


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (0, 0), (2, 0, 32), (2, 32, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float32)
    for axis in range(x.ndim):
        if shape[axis] % 64 in (0, 32):
            q = check_quantize(x, OperandSpec(), axis=axis)
            assert BACKEND.dequantize(q).shape == shape
            assert BACKEND.hadamard(x, 32, axis=axis).shape == shape


@pytest.mark.parametrize("length", [1, 2, 31, 33, 250, 257, 300])
@pytest.mark.parametrize("n", [0, 16, 256])
def test_padding(length: int, n: int) -> None:
    for axis, shape in ((1, (37, length)), (0, (length, 37))):
        for rounding in (Rounding.RNE, Rounding.SR):
            q = check_quantize(
                normal(*shape), OperandSpec(rounding=rounding, hadamard=n), axis=axis, pad=True
            )
            check_dequantize(q)


@pytest.mark.parametrize("bits", [16, 22])
def test_shards_see_the_random_bits_of_the_whole(bits: int) -> None:
    x = normal(64, 192)
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    for axis in (0, 1):
        shape, origin = (300, 512), (128, 64)
        q = check_quantize(x, spec, Placement(STREAM, origin, shape), axis=axis)
        part = (slice(32, 64), slice(96, 192))
        shard = check_quantize(x[part], spec, Placement(STREAM, (160, 160), shape), axis=axis)
        codes = q.codes[32:, 48:] if axis else q.codes[96:, 16:]
        np.testing.assert_array_equal(shard.codes, codes)


@pytest.mark.parametrize("bits", [16, 17])
def test_random_groups_beyond_32_bits(bits: int) -> None:
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    check_quantize(normal(8, 64), spec, Placement(STREAM, (2**36 - 5, 1024), (2**36 + 3, 4096)))
    check_quantize(normal(64, 8), spec, Placement(STREAM, (2**40, 3), (2**40 + 64, 11)), axis=0)


@st.composite
def specs(draw: st.DrawFn) -> OperandSpec:
    hadamard = draw(st.sampled_from((0, *SIZES[:6])))
    return OperandSpec(
        scale_rule=draw(st.sampled_from(ScaleRule)),
        rounding=draw(st.sampled_from(Rounding)),
        sr_bits=draw(st.integers(1, 22)),
        zero_scale=draw(st.sampled_from((0, 127))),
        prescale=draw(st.booleans()),
        hadamard=hadamard,
        signs=draw(st.sampled_from(SignPolicy)) if hadamard else SignPolicy.NONE,
    )


@settings(max_examples=150, deadline=None)
@given(x=any_blocks(64), spec=specs(), operand=st.integers(0, 5))
def test_drawn_blocks(x: NDArray[np.float32], spec: OperandSpec, operand: int) -> None:
    stream = Stream(seed=2**64 - 1, step=2**32 - 1, layer=2**24 - 1, operand=operand)
    check_quantize(x, spec, Placement(stream))


# ---- Hadamard and dequantize ----


@pytest.mark.parametrize("n", SIZES)
def test_hadamard(n: int) -> None:
    signs = int.from_bytes(np.random.default_rng(n).bytes(n // 8 or 1), "little") & (1 << n) - 1
    inputs = [(crafted(np.float32, 256), 1), (normal(512, 35), 0), (normal(3, 256, 5)[:, ::-1], 1)]
    inputs += [(normal(7, 512, dtype=dtype), 1) for dtype in DTYPES[1:]]
    for x, axis in inputs:
        for pattern in (0, signs):
            got, expected = (b.hadamard(x, n, pattern, axis=axis) for b in (BACKEND, REFERENCE))
            assert got.dtype == np.float32
            assert got.shape == x.shape
            np.testing.assert_array_equal(bits_of(got), bits_of(expected))


def check_dequantize(q: MXArray) -> None:
    for dtype in ("float32", "bfloat16"):
        got, expected = (b.dequantize(q, dtype) for b in (BACKEND, REFERENCE))
        assert got.dtype == expected.dtype
        assert got.shape == q.shape
        bits = f"u{got.dtype.itemsize}"
        np.testing.assert_array_equal(got.copy().view(bits), expected.copy().view(bits))


@pytest.mark.clause("conformance.capabilities")
def test_dequantize_every_code_at_every_scale() -> None:
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.tile(pack(np.tile(np.arange(16, dtype=np.uint8), 2), E2M1), (256, 1))
    check_dequantize(MXArray(codes, scales, (256, 32), 1))
    check_dequantize(MXArray(codes, scales, (32, 256), 0))
    check_dequantize(MXArray(codes[::-1], scales[::-1], (256, 31), 1))  # padded, and of negative strides
    check_dequantize(MXArray(codes.reshape(4, 64, 16), scales.reshape(4, 64, 1), (4, 32, 64), 1))


# ---- GEMM ----


def operand(rows: int, length: int, low: int, high: int, seed: int, **fields: Any) -> MXArray:
    """Any codes, one block in ten all zeros, under scale bytes drawn from [low, high]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, length // K, K // 2), np.uint8)
    codes[rng.random(codes.shape[:2]) < 0.1] &= 0x88
    scales = rng.integers(low, high + 1, codes.shape[:2]).astype(np.uint8)
    return MXArray(codes.reshape(rows, length // 2), scales, (rows, length), 1, **fields)


def check_gemm(a: MXArray, b: MXArray) -> None:
    for dtype in ("float32", "bfloat16"):
        got, expected = (backend.scaled_gemm(a, b, out_dtype=dtype) for backend in (BACKEND, REFERENCE))
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(
            got.view(f"u{got.dtype.itemsize}"), expected.view(f"u{got.dtype.itemsize}")
        )


# Ranges of scale bytes on both sides of where float32 stops holding every product.
RANGES = [
    (120, 134),
    (0, 254),
    (0, 255),
    (0, 3),
    (252, 255),
    (50, 56),
    (53, 54),
    (54, 60),
    (180, 185),
    (186, 188),
]


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("scales", RANGES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 7, 64), (130, 259, 96), (3, 300, 512), (257, 2, 160)])
def test_gemm_ordered(shape: tuple[int, int, int], scales: tuple[int, int]) -> None:
    m, n, k = shape
    check_gemm(operand(m, k, *scales, seed=1), operand(n, k, *scales, seed=2))


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 244, 245, 253, 254, 255])
def test_gemm_one_scale_against_all(byte: int) -> None:
    every = np.arange(256, dtype=np.uint8)
    codes = operand(256, K, 0, 0, seed=3).codes
    a = MXArray(codes, np.full((256, 1), byte, np.uint8), (256, K), 1)
    for i in range(0, 256, 8):  # few bytes at a time, so that both ways of accumulating are reached
        b = MXArray(codes[i : i + 8], every[i : i + 8, None], (8, K), 1)
        check_gemm(a, b)
        check_gemm(b, a)


def test_gemm_overflow_stays() -> None:
    big = operand(40, 256, 186, 192, seed=4)
    out = BACKEND.scaled_gemm(big, big)
    assert np.isinf(out).any()
    assert not np.isnan(out).any()
    check_gemm(big, big)
    check_gemm(operand(9, 256, 250, 254, seed=5), operand(9, 256, 0, 254, seed=6))


@pytest.mark.parametrize("scales", [(110, 140), (0, 255)])
@pytest.mark.parametrize("prescaled", [(True, False), (False, True), (True, True)])
def test_gemm_undoes_prescale(prescaled: tuple[bool, bool], scales: tuple[int, int]) -> None:
    a, b = (operand(33, 128, *scales, seed=i, prescale=p) for i, p in enumerate(prescaled))
    check_gemm(a, b)


@pytest.mark.parametrize("shape", [(0, 4, 32), (4, 0, 32), (4, 3, 0), (0, 0, 0)])
def test_gemm_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operand(m, k, 1, 2, seed=1, prescale=True), operand(n, k, 1, 2, seed=2)
    check_gemm(a, b)
    assert not BACKEND.scaled_gemm(a, b).any()


def test_gemm_of_quantized_arrays() -> None:
    tokens, inputs, outputs = normal(96, 64), normal(64, 160), normal(96, 160)
    spec = OperandSpec(hadamard=16, rounding=Rounding.SR, prescale=True)
    x, w = (
        BACKEND.quantize(tokens, spec, placement=Placement(STREAM)),
        BACKEND.quantize(inputs, spec, axis=0, placement=Placement(STREAM)),
    )
    check_gemm(x, w)
    dy = BACKEND.quantize(outputs, spec, axis=0, placement=Placement(STREAM))
    check_gemm(dy, BACKEND.quantize(tokens, spec, axis=0, placement=Placement(STREAM)))
    strided = MXArray(x.codes[::-2], x.scales[::-2], (48, 64), 1, prescale=True, rotation=x.rotation)
    check_gemm(strided, w)


def from_blocks(blocks: list[Block]) -> MXArray:
    codes = np.array([block[1] for block in blocks], np.uint8).reshape(1, -1)
    scales = np.array([block[0] for block in blocks], np.uint8).reshape(1, -1)
    return MXArray(pack(codes, E2M1), scales, codes.shape, 1)


@settings(max_examples=150, deadline=None)
@given(gemm_operands())
def test_gemm_of_drawn_rows(operands: tuple[list[Block], list[Block]]) -> None:
    check_gemm(*(from_blocks(blocks) for blocks in operands))


@pytest.mark.clause("conformance.capabilities", "gemm.bounded")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [(120, 134), (60, 190), (0, 252), (240, 252)])
@pytest.mark.parametrize("k", [32, 1024])
def test_gemm_bounded(k: int, scales: tuple[int, int], dtype: str) -> None:
    a, b = operand(35, k, *scales, seed=8, prescale=True), operand(21, k, *scales, seed=9)
    a.scales[3, 0] = 255
    got = BACKEND.scaled_gemm(a, b, profile=GemmProfile.BOUNDED, out_dtype=dtype)
    exact = REFERENCE.scaled_gemm(a, b, profile=GemmProfile.EXACT)
    bound = bounded_tolerance(a, b, BACKEND.capabilities.bounded_class, dtype)
    assert got.shape == exact.shape
    assert (got[3].view(f"u{got.dtype.itemsize}") == CANONICAL_NAN >> (32 - 8 * got.dtype.itemsize)).all()
    rows = np.arange(35) != 3
    with np.errstate(invalid="ignore"):  # Inf - Inf, where anything goes
        error = np.abs(got[rows].astype(np.float64) - exact[rows])
    # The exact profile rounds once itself, by half a unit in the last place.
    assert ((error <= bound[rows] + np.abs(exact[rows]) * 2.0**-24) | np.isinf(bound[rows])).all()


@pytest.mark.parametrize("byte", [253, 254])
def test_bounded_refuses_what_float32_cannot_decode(byte: int) -> None:
    fine, large = operand(4, 64, 100, 252, seed=1), operand(4, 64, byte, byte, seed=2)
    for a, b in ((fine, large), (large, fine)):
        with pytest.raises(UnsupportedError, match=f"bounded_max_scale = 252.*{byte}"):
            BACKEND.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)


# ---- what holds for all operations ----


def _operations() -> dict[str, Callable[[], Any]]:
    x = normal(67, 320)
    a, b = operand(131, 128, 100, 255, seed=1), operand(270, 128, 100, 140, seed=2)
    return {
        "quantize": lambda: BACKEND.quantize(x, SR_SPEC, placement=Placement(STREAM)),
        "quantize, padded": lambda: BACKEND.quantize(x, OperandSpec(), axis=0, pad=True),
        "quantize, tiles": lambda: BACKEND.quantize(x[:64], OperandSpec(block=BlockShape.TILE)),
        "dequantize": lambda: BACKEND.dequantize(a),
        "dequantize, bfloat16": lambda: BACKEND.dequantize(a, "bfloat16"),
        "hadamard": lambda: BACKEND.hadamard(x, 64, 5),
        "gemm": lambda: BACKEND.scaled_gemm(a, b),
        "gemm, bfloat16": lambda: BACKEND.scaled_gemm(a, b, out_dtype="bfloat16"),
        "gemm, wide exponents": lambda: BACKEND.scaled_gemm(a, operand(9, 128, 0, 254, seed=3)),
    }


def _bytes(result: Any) -> list[bytes]:
    arrays = (result.codes, result.scales) if isinstance(result, MXArray) else (result,)
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("name", list(_operations()))
def test_every_byte_of_a_result_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = _operations()[name]
    expected = _bytes(operation())  # compiles, which must see the true numpy.empty
    empty = np.empty

    for poison in (0x00, 0xA5, 0xFF):

        def poisoned(*args: Any, poison: int = poison, **kwargs: Any) -> NDArray[Any]:
            out = empty(*args, **kwargs)
            out.view(np.uint8)[...] = poison
            return out

        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", poisoned)
            got = operation()
        assert _bytes(got) == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", list(_operations()))
def test_results_do_not_depend_on_the_number_of_threads(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = _operations()[name]
    expected = _bytes(operation())
    monkeypatch.setattr("mxref_numba.compiled.worker_count", lambda elements: workers)
    assert _bytes(operation()) == expected


def _no_copy() -> dict[str, tuple[NDArray[Any], int]]:
    x = normal(512, 1024)
    return {
        "as it is": (x, 1),
        "axis 0": (x, 0),
        "transpose": (x.T, 1),
        "reversed": (x[::-1, ::-1], 1),
        "reversed, axis 0": (x[::-1, ::-1], 0),
        "columns of a wider array": (normal(512, 2048)[:, 512:1536], 1),
        "permuted": (x.reshape(8, 64, 1024).transpose(1, 0, 2), 2),
        "permuted, axis 0": (x.reshape(64, 8, 1024).transpose(0, 2, 1), 0),
        "bfloat16 transpose": (x.astype(ml_dtypes.bfloat16).T, 1),
        "float16": (x.astype(np.float16), 0),
    }


@pytest.mark.parametrize("name", list(_no_copy()))
def test_inputs_are_not_copied(name: str) -> None:
    x, axis = _no_copy()[name]
    BACKEND.quantize(x, OperandSpec(), axis=axis)
    tracemalloc.start()
    try:
        q = BACKEND.quantize(x, OperandSpec(), axis=axis)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < q.codes.nbytes + q.scales.nbytes + x.nbytes // 4  # panels, whatever the size


@pytest.mark.clause("conformance.unsupported", evidence="known answer")
def test_undeclared_is_refused() -> None:
    q = operand(4, 32, 100, 140, seed=1)
    with pytest.raises(UnsupportedError, match="gemms"):
        BACKEND.scaled_gemm(q, q, profile=GemmProfile.EXACT)
    with pytest.raises(UnsupportedError, match="dequantize_dtypes"):
        BACKEND.dequantize(q, "float64")


def test_without_numba_the_import_names_it() -> None:
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "try:\n    import mxref_numba\n"
        "except ImportError as err:\n    print(err.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "numba"
