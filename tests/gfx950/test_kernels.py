"""The backend's kernels as compiled for gfx950, executed in the software model, against the reference bit for bit.

The backend's own host code launches them, so tiles, grids, options and specializations are those of a real gfx950.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.driver import load_package, on_model  # noqa: E402
from gfx950.inputs import matrix, random_operand  # noqa: E402
from mxref.mxarray import MXArray  # noqa: E402
from mxref.philox import Stream  # noqa: E402
from mxref.recipe import GemmProfile, OperandSpec  # noqa: E402
from mxref.reference import backend as reference  # noqa: E402
from mxref.rounding import Rounding  # noqa: E402

BACKENDS = Path(__file__).parents[2] / "backends"
SHAPE = (96, 256)
"""Of most inputs: two programs of the row-wise kernel, the second one masked."""


@pytest.fixture(scope="module")
def package() -> dict[str, ModuleType]:
    return load_package(BACKENDS, "gfx950_check", "gfx950_gemm")


@pytest.fixture(scope="module")
def backend(package: dict[str, ModuleType]) -> Any:
    with on_model():
        return package["backend"].TritonBackend(bounded="bf16", conversions="portable")


def differences(got: Any, want: MXArray) -> int:
    """Return the number of bytes of codes and scales that differ."""
    pairs = ((got.codes, want.codes), (got.scales, want.scales))
    return sum(int((np.asarray(g) != w).sum()) for g, w in pairs)


def quantized(backend: Any, x: np.ndarray, spec: OperandSpec, axis: int, **how: Any) -> tuple[int, list[str]]:
    """Quantize in the model; return the number of bytes that differ from the reference's, and what was executed."""
    rng = Stream(seed=0x123456789ABCDEF0, step=3, layer=2, operand=4)
    with on_model(**how) as launched:
        got = backend.quantize(backend.from_numpy(x), spec, axis=axis, rng=rng)
    return differences(got, reference.quantize(x, spec, axis=axis, rng=rng)), launched


RECIPES = {
    "plain": OperandSpec(scale_rule="even"),
    "hadamard": OperandSpec(scale_rule="even", hadamard=16, signs="per_step"),
    "stochastic": OperandSpec(rounding="sr", sr_bits=16, hadamard=16, signs="per_step", prescale=True),
    "floor": OperandSpec(scale_rule="floor", hadamard=32),
    "away": OperandSpec(scale_rule="rceil", rounding="rna", zero_scale=127),
    "tile": OperandSpec(scale_rule="even", block="32x32"),
}
CASES = [
    ("plain", "bfloat16", -1), ("plain", "bfloat16", 0), ("hadamard", "bfloat16", -1), ("hadamard", "bfloat16", 0),
    ("stochastic", "bfloat16", -1), ("stochastic", "bfloat16", 0), ("floor", "float32", -1),
    ("away", "float16", -1), ("tile", "bfloat16", -1),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "kind", "axis"), CASES)
def test_quantization(backend: Any, recipe: str, kind: str, axis: int) -> None:
    wrong, launched = quantized(backend, matrix(*SHAPE, kind), RECIPES[recipe], axis)
    assert wrong == 0
    assert launched == ["quantize_rows" if axis else "quantize_columns"]


def test_quantization_does_not_depend_on_what_the_hardware_may_choose(backend: Any) -> None:
    """How arguments arrive, and the last bit of reciprocals, which compilers divide integers with."""
    x = matrix(64, 128, "bfloat16", 1)
    for preload, ulps in ((False, 0), (True, -1), (True, 1)):
        assert quantized(backend, x, RECIPES["plain"], -1, preload=preload, rcp_ulps=ulps)[0] == 0


@pytest.mark.parametrize("kind", ["bfloat16"])
def test_dual_quantization(backend: Any, kind: str) -> None:
    x, specs = matrix(*SHAPE, kind, 2), (RECIPES["hadamard"], RECIPES["plain"])
    rng = Stream(seed=5)
    with on_model() as launched:
        both = backend.quantize_dual(backend.from_numpy(x), specs, rngs=(rng, rng))
    for got, spec, axis in zip(both, specs, (-1, 0), strict=True):
        assert differences(got, reference.quantize(x, spec, axis=axis, rng=rng)) == 0
    assert launched == ["quantize_both"]


FLOAT32_COLUMNS = """
from gfx950.test_kernels import *
with on_model():
    backend = load_package(BACKENDS)["backend"].TritonBackend(bounded="bf16", conversions="portable")
assert quantized(backend, matrix(*SHAPE, "float32"), RECIPES["floor"], 0) == (0, ["quantize_columns"])
test_dual_quantization(backend, "float32")
"""


def test_float32_columns_compile_in_time() -> None:
    """In a process that can be stopped: a pass of the compiler can take hours over the addresses of float32 loads."""
    environment = os.environ | {"PYTHONPATH": str(BACKENDS.parent / "tests")}
    process = subprocess.run(
        [sys.executable, "-c", FLOAT32_COLUMNS], env=environment, timeout=100, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]


def on_tensors(operand: tuple[np.ndarray, np.ndarray]) -> tuple[MXArray, MXArray]:
    """Return an operand [rows, K] for the reference and for the backend."""
    codes, scales = operand
    shape = (len(codes), 2 * codes.shape[1])
    return MXArray(codes, scales, shape, 1), MXArray(
        torch.from_numpy(codes), torch.from_numpy(scales), shape, 1
    )


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether float arrays have the same bits, every NaN being alike."""
    words = [np.asarray(a).view(f"u{a.itemsize}") for a in (got, want)]
    nan = [np.isnan(a.astype(np.float32)) for a in (got, want)]
    return bool(((words[0] == words[1]) | (nan[0] & nan[1])).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantization(backend: Any, dtype: str) -> None:
    codes, scales = random_operand(64, 256, 0, 255, 3)
    scales[0] = [0, 1, 2, 252, 253, 254, 255, 127]
    own, theirs = on_tensors((codes, scales))
    with on_model() as launched:
        got = backend.to_numpy(backend.dequantize(theirs, dtype))
    assert same_bits(got, reference.dequantize(own, dtype))
    assert launched == ["_dequantize"]


@pytest.mark.parametrize(("n", "axis"), [(16, -1), (32, 0)])
def test_hadamard(backend: Any, n: int, axis: int) -> None:
    x = matrix(128, 128, "bfloat16", 4)
    with on_model():
        got = backend.to_numpy(backend.hadamard(backend.from_numpy(x), n, 0xB5A3, axis=axis))
    assert same_bits(got, reference.hadamard(x, n, 0xB5A3, axis=axis))


def test_native_conversions(package: dict[str, ModuleType], backend: Any) -> None:
    """As the ISA's text defines them: the backend's start-up check passes, and so does a kernel that uses them."""
    check = package["gfx950_check"]
    with on_model():
        assert check.first_difference(check.on_device(torch.device("cpu"))) is None
    portable = backend.native
    backend.native = frozenset({Rounding.RNE})
    try:
        assert quantized(backend, matrix(*SHAPE, "bfloat16", 5), RECIPES["hadamard"], -1)[0] == 0
    finally:
        backend.native = portable


def test_ordered_gemm(backend: Any) -> None:
    operands = [on_tensors(random_operand(rows, 256, 0, 255, rows)) for rows in (40, 72)]
    with on_model() as launched:
        got = backend.scaled_gemm(*(theirs for _, theirs in operands), profile=GemmProfile.ORDERED)
    want = reference.scaled_gemm(*(own for own, _ in operands), profile=GemmProfile.ORDERED)
    assert same_bits(backend.to_numpy(got), want)
    assert launched == ["_ordered"]


def drawn(rows: int, blocks: int, seed: int, hostile: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return an operand with blocks of zeros; if hostile, of NaN too, and rows that E4M3 does not hold."""
    rng = np.random.default_rng(seed)
    codes, scales = random_operand(rows, 32 * blocks, 118, 126, seed)
    if hostile:
        scales[rng.random(scales.shape) < 0.01] = 255
        for row in rng.integers(0, rows, 3):
            scales[row] = rng.integers(0, 255, blocks)
    whole = codes.reshape(rows, blocks, 16)
    whole[rng.random(scales.shape) < 0.1] &= 0x88
    return codes, scales


def folded_product(
    package: dict[str, ModuleType], m: int, n: int, blocks: int, out: str = "float32", hostile: bool = True
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return what the model gives for A B^T under `ordered`, what is right, and the kernels that were executed.

    Of rows with NaN, and of rows that do not fit, the FP8 product is anything: nothing of it may be kept.
    """
    (own_a, a), (own_b, b) = (on_tensors(drawn(rows, blocks, rows, hostile)) for rows in (m, n))
    with (
        on_model(spoil_sums=hostile) as launched,
        patch.object(package["gemm"], "LEAST_FOLDED_WORK", 1),
        patch.object(package["ordered"], "_MISFIT_PROGRAMS", 3),
    ):
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        made = backend.prepare(b, profile=GemmProfile.ORDERED)
        got = backend.scaled_gemm(a, made, profile=GemmProfile.ORDERED, out_dtype=out)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED, out_dtype=out)
    return backend.to_numpy(got), want, list(launched)


FOLDED_LAUNCHES = ["_fold", "_fold", "_ordered_by_block", "_ordered_misfits"]


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("m", "n", "blocks", "out"), [(72, 100, 8, "float32"), (64, 130, 6, "bfloat16")])
def test_ordered_gemm_on_folded_operands(
    package: dict[str, ModuleType], m: int, n: int, blocks: int, out: str, hostile: bool
) -> None:
    """Rows that fit are multiplied in FP8, the others again from their codes; the model sees to exact dots."""
    got, want, launched = folded_product(package, m, n, blocks, out, hostile)
    assert same_bits(got, want)
    assert np.isnan(want.astype(np.float32)).any() == hostile
    assert launched == FOLDED_LAUNCHES


@pytest.mark.parametrize(("m", "n", "blocks"), [(1, 33, 3), (17, 1, 1)])
def test_ordered_gemm_on_the_smallest_folded_operands(
    package: dict[str, ModuleType], m: int, n: int, blocks: int
) -> None:
    """Triton takes 1 for a constant."""
    got, want, launched = folded_product(package, m, n, blocks, hostile=False)
    assert same_bits(got, want)
    assert launched == FOLDED_LAUNCHES


def test_the_large_tile_of_ordered_gemms(package: dict[str, ModuleType]) -> None:
    with patch.object(package["ordered"], "TILES", package["ordered"].TILES[:1]):
        got, want, launched = folded_product(package, 130, 72, 4)
    assert same_bits(got, want)
    assert launched == FOLDED_LAUNCHES


def test_folding(package: dict[str, ModuleType]) -> None:
    """By block, as gfx950's GEMM reads it, against the same by row and against the values themselves."""
    codes, scales = drawn(24, 12, 7)
    own, theirs = on_tensors((codes, scales))
    fold = package["fold"].fold
    with on_model() as launched:
        by_block, by_row = fold(theirs, by_block=True), fold(theirs)
    assert launched == ["_fold", "_fold"]
    blocks = by_block.values.view(torch.uint8).numpy().transpose(1, 0, 2)
    assert (blocks == by_row.values.view(torch.uint8).numpy().reshape(24, 12, 32)).all()
    misfits = sorted(by_block.misfits[1 : 1 + int(by_block.misfits[0])].tolist())
    assert misfits == sorted(by_row.misfits[1 : 1 + int(by_row.misfits[0])].tolist())
    assert 0 < len(misfits) < 24
    # A row that fits has its values: even elements first, then odd ones.
    fits = np.setdiff1d(np.flatnonzero((scales != 255).all(axis=1)), misfits)
    assert len(fits) > 4
    wide = blocks.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * by_block.scale.numpy()[:, :, None]
    values = reference.dequantize(own, "float32").reshape(24, 12, 32).astype(np.float64)
    assert (wide[fits] == np.concatenate([values[fits, :, ::2], values[fits, :, 1::2]], axis=2)).all()


def test_scaled_matrix_cores(package: dict[str, ModuleType]) -> None:
    """Scales close together: every sum is exact, so its order, which is not documented, does not matter."""
    operands = [on_tensors(random_operand(rows, 256, 125, 128, rows)) for rows in (40, 72)]
    with on_model() as launched:
        got = package["gfx950_gemm"].multiply(*(theirs for _, theirs in operands), "float32")
    want = reference.scaled_gemm(*(own for own, _ in operands), profile=GemmProfile.ORDERED)
    assert same_bits(got.numpy(), want)
    assert launched == ["_multiply"]
