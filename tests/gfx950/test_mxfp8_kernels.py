"""Kernels of MXFP8 as compiled for gfx950, executed in the model, against the reference bit for bit."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import STREAM, as_in_training, differences, more, quantized, same_bits
from gfx950.driver import on_model
from gfx950.inputs import corners
from mxref.formats import (
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
)
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.reference import backend as reference
from mxref.steps.scale import ScaleRule

E4M3, E5M2 = MXFP8_E4M3, MXFP8_E5M2


def inputs(made: BlockFormat, kind: str, shape: tuple[int, int] = (96, 160)) -> np.ndarray:
    """Return a matrix of elements at every border of a format, with zeros, a NaN and an Inf."""
    blocks = corners(made, ScaleRule.RCEIL, (0, 1, 9, 120, 254)).reshape(-1)
    x = np.resize(np.random.default_rng(0).permutation(blocks.reshape(-1, 32)), shape)
    x[5], x[9, 3], x[11, 70] = -0.0, np.nan, np.inf
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)


IN_TABLE = (OperandSpec(E4M3, "rceil"), "bfloat16", -1)
CASES = [
    IN_TABLE,
    (OperandSpec(E4M3, "floor"), "float32", 0),
    (OperandSpec(E5M2, "even", rounding="sr", hadamard=16), "bfloat16", -1),
]
MORE_CASES = [
    (OperandSpec(E5M2, "rceil"), "bfloat16", 0),
    (OperandSpec(E4M3, "even", rounding="rna", prescale=True), "float16", -1),
    (OperandSpec(E4M3, "ceil", rounding="rtz", block="32x32"), "bfloat16", -1),
    (OperandSpec(E4M3, rounding="sr", sr_bits=22), "float32", 0),
]


@pytest.mark.parametrize(("spec", "kind", "axis"), [*CASES[2:], *more([*CASES[:2], *MORE_CASES])])
def test_quantization(backend: Any, spec: OperandSpec, kind: str, axis: int) -> None:
    wrong, launched = quantized(backend, inputs(spec.format, kind), spec, axis)
    assert (wrong, launched) == (0, ["quantize_rows" if axis else "quantize_columns"])


@pytest.mark.study
def test_quantization_as_in_training(backend: Any) -> None:
    """By a kernel of aot.table: no tile reaches over an edge."""
    spec, kind, axis = IN_TABLE
    wrong, launched = quantized(backend, inputs(spec.format, kind, (128, 256)), spec, axis)
    assert (wrong, launched) == (0, ["quantize_rows"])


@pytest.mark.study
def test_both_orientations_as_in_training(package: dict[str, ModuleType], backend: Any) -> None:
    with as_in_training(package):
        check_both_orientations(backend, (E4M3, E4M3), (128, 4096))


@pytest.mark.study
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (MXFP4, E5M2)])
def test_both_orientations(backend: Any, pair: tuple[BlockFormat, BlockFormat]) -> None:
    check_both_orientations(backend, pair, (96, 160))


def check_both_orientations(
    backend: Any, pair: tuple[BlockFormat, BlockFormat], shape: tuple[int, int]
) -> None:
    x, specs = inputs(E4M3, "bfloat16", shape), [OperandSpec(made, "rceil") for made in pair]
    with on_model() as launched:
        both = backend.quantize_dual(backend.from_numpy(x), specs)
    assert launched == ["quantize_both"]
    for got, spec, axis in zip(both, specs, (-1, 0), strict=True):
        assert differences(got, reference.quantize(x, spec, axis=axis, placement=Placement(STREAM))) == 0


@pytest.mark.parametrize(
    ("made", "dtype"), [(E4M3, "bfloat16"), *more([(E5M2, "bfloat16"), (E4M3, "float32")])]
)
def test_every_code_under_scales_of_both_ends(backend: Any, made: BlockFormat, dtype: str) -> None:
    scales = np.uint8([0, 1, 3, 10, 11, 127, 239, 246, 247, 253, 254, 255])
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    stored = codes, np.repeat(scales[:, None], 8, axis=1)
    q = MXArray(*stored, codes.shape, 1, format=made)
    with on_model():
        got = backend.dequantize(MXArray(*map(torch.from_numpy, stored), codes.shape, 1, format=made), dtype)
    assert same_bits(backend.to_numpy(got), reference.dequantize(q, dtype))


# ---- products ----


def operand(made: BlockFormat, rows: int, k: int, seed: int) -> tuple[MXArray, MXArray]:
    """Return small whole numbers and halves under scales that nearly agree, so that every sum of products is exact."""
    rng = np.random.default_rng(seed)
    grid = np.array(made.element.values)
    few = np.flatnonzero(np.isin(np.abs(grid), [0, 0.5, 1, 1.5, 2, 3]))
    codes = pack(rng.choice(few, (rows, k)).astype(np.uint8), made.element)
    scales = rng.integers(125, 130, (rows, k // 32)).astype(np.uint8)
    scales[rows // 2, -1] = 255
    return both(codes, scales, made, k)


def both(codes: np.ndarray, scales: np.ndarray, made: BlockFormat, k: int) -> tuple[MXArray, MXArray]:
    """Return an operand for the reference and for the backend."""
    shape = (len(codes), k)
    return MXArray(codes, scales, shape, 1, format=made), MXArray(
        torch.from_numpy(codes), torch.from_numpy(scales), shape, 1, format=made
    )


AS_THEY_ARE = (E4M3, E5M2, MXFP4)
SHORT_PAIR = (E4M3, MXFP4)
PAIRS = [
    pair for pair in itertools.product(AS_THEY_ARE, repeat=2) if pair not in (SHORT_PAIR, (MXFP4, MXFP4))
]


@pytest.mark.parametrize(("left", "right"), [SHORT_PAIR, *more(PAIRS)])
def test_products_of_every_pair(
    package: dict[str, ModuleType], left: BlockFormat, right: BlockFormat
) -> None:
    """By the scaled matrix instruction; and block by block, as within `widened`."""
    (own_a, a), (own_b, b) = operand(left, 72, 288, 1), operand(right, 80, 288, 2)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT)
    assert np.isnan(want).sum() == 72 + 80 - 1
    with on_model() as launched:
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        got = backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
        assert not backend.range_exceeded()
        with backend.widened():
            by_block = backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
    assert launched[-2:] == ["_multiply", "_multiply_blocks"]
    assert same_bits(backend.to_numpy(got), want)
    assert same_bits(backend.to_numpy(by_block), want)


@pytest.mark.study
@pytest.mark.parametrize("made", [E4M3, E5M2])
def test_every_code_in_a_product(package: dict[str, ModuleType], made: BlockFormat) -> None:
    """One code other than 0 in each row, at every place along K; NaN and Inf are what they are."""
    codes = np.zeros((256, 128), np.uint8)
    codes[np.arange(256), np.arange(256) * 37 % 128] = np.arange(256)
    scales = np.random.default_rng(0).integers(100, 150, (256, 4)).astype(np.uint8)
    own_a, a = both(codes, scales, made, 128)
    one = made.element.values.index(1.0)
    own_b, b = both(np.full((16, 128), one, np.uint8), np.full((16, 4), 127, np.uint8), made, 128)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT)
    with on_model():
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        got = backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
    assert same_bits(backend.to_numpy(got), want)


@pytest.mark.study
@pytest.mark.parametrize(("made", "limit"), [(E4M3, 246), (E5M2, 239)])
def test_a_scale_out_of_a_formats_range_is_flagged(
    package: dict[str, ModuleType], made: BlockFormat, limit: int
) -> None:
    (_, a), (_, b) = operand(made, 20, 96, 4), operand(MXFP4, 20, 96, 5)
    with on_model(unknown_sums=np.nan):
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        for scale in (limit, limit + 1):
            a.scales[3, 1] = scale
            b.scales[4, 0] = limit + 1  # within the range of MXFP4
            backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
            assert backend.range_exceeded() == (scale > limit)


# ---- elements that the instruction, or Triton's word for it, does not read ----

RECODED = (MXFP6_E2M3, MXFP6_E3M2, MXFP4_E1M2)
SHORT_RECODED = (MXFP6_E2M3, E4M3)
MORE_RECODED = [
    pair
    for pair in itertools.product((*RECODED, *AS_THEY_ARE), repeat=2)
    if pair != SHORT_RECODED and not set(pair) <= set(AS_THEY_ARE)
]


@pytest.mark.parametrize(("left", "right"), [SHORT_RECODED, *more(MORE_RECODED)])
def test_products_of_recoded_elements(
    package: dict[str, ModuleType], left: BlockFormat, right: BlockFormat
) -> None:
    """Elements of 6 bits, and of E1M2, are read as E4M3; their scales stay."""
    (own_a, a), (own_b, b) = operand(left, 72, 288, 1), operand(right, 80, 288, 2)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT)
    with on_model() as launched:
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        got = backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
        assert not backend.range_exceeded()
    recoded = sum(made in RECODED for made in (left, right))
    assert launched[-1 - recoded :] == ["_recode"] * recoded + ["_multiply"]
    assert same_bits(backend.to_numpy(got), want)


@pytest.mark.parametrize("made", [MXFP6_E3M2, *more([(MXFP6_E2M3,), (MXFP4_E1M2,)])])
def test_every_code_recoded(package: dict[str, ModuleType], made: BlockFormat) -> None:
    codes = np.tile(np.arange(2 * made.element.sign, dtype=np.uint8), 32).reshape(-1, 32)
    q = MXArray(
        torch.from_numpy(pack(codes, made.element)), torch.full((len(codes), 1), 127, dtype=torch.uint8),
        codes.shape, 1, format=made,
    )  # fmt: skip
    with on_model() as launched:
        got, _, element = package["matrix_cores"]._recoded(q)
    assert launched == ["_recode"]
    want = np.array(made.element.values)[codes]
    values = np.array(element.values)[got.numpy()]
    assert (values == want).all()
    assert (np.signbit(values) == np.signbit(want)).all()
