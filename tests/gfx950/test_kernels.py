"""Quantizers, Hadamard transforms and dequantizers as compiled for gfx950, executed in the model.

`make test` executes a quantizer of each axis, one with native conversions, and the dequantizer; `make test-model` all
kernels. What is wrong in their source, Triton's interpreter finds in `make test` as well.
Against the reference, bit for bit. The backend's own host code launches them, so tiles, grids, options and
specializations are those of a real gfx950.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import (
    BACKENDS,
    NATIVE,
    PORTABLE,
    RECIPES,
    SHAPE,
    STREAM,
    Conversion,
    as_in_training,
    differences,
    more,
    on_tensors,
    quantized,
    same_bits,
    start_up,
)
from gfx950.driver import on_model
from gfx950.inputs import matrix, random_operand
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.reference import backend as reference

EVEN, SR = RECIPES["plain"], OperandSpec(rounding="sr", scale_rule="even", sr_bits=16)
OPERANDS = {
    **RECIPES,
    "h16": replace(EVEN, hadamard=16),
    "h32": replace(EVEN, hadamard=32),
    "h64": replace(EVEN, hadamard=64),
    "plain floor": OperandSpec(scale_rule="floor"),
    "away": OperandSpec(scale_rule="rceil", rounding="rna", zero_scale=127),
    "toward zero": OperandSpec(scale_rule="ceil", rounding="rtz"),
    "tile": replace(EVEN, block="32x32"),
    "sr16": SR,
    "sr16.h16": replace(SR, hadamard=16),
    "sr22": replace(SR, sr_bits=22),
}
TABLE = [
    *((name, "bfloat16", -1) for name in ("plain", "hadamard", "h16", "h32", "h64", "plain floor", "tile")),
    *((name, "bfloat16", -1) for name in ("sr16", "sr16.h16", "sr22")),
    *((name, kind, -1) for name in ("plain", "h16") for kind in ("float32", "float16")),
    *((name, "bfloat16", 0) for name in ("plain", "hadamard", "h16", "h32", "h64", "plain floor", "tile")),
    *((name, "bfloat16", 0) for name in ("sr16", "sr16.h16", "sr22")),
]
NATIVE_TABLE = [(name, "bfloat16", axis) for name in ("plain", "h16") for axis in (-1, 0)]
"""What aot.table compiles: quantizers as training launches them; the second list by native conversions."""
OTHERS = [
    *(("stochastic", "bfloat16", axis) for axis in (-1, 0)),
    ("floor", "float32", -1), ("away", "float16", -1), ("toward zero", "float16", 0),
]  # fmt: skip


def in_whole_tiles(recipe: str, kind: str, axis: int, seed: int = 0) -> np.ndarray:
    """Return a matrix over whose edges no tile reaches; along columns the tiles fill a band."""
    if axis:
        return matrix(*((64, 512) if recipe == "tile" else (128, 256)), kind, seed)
    return matrix(*((1024, 2048) if recipe == "h64" else (512, 4096)), kind, seed)


@pytest.mark.study
@pytest.mark.parametrize(
    ("recipe", "kind", "axis", "native"),
    [
        *((*case, PORTABLE) for case in TABLE),
        *((*case, NATIVE) for case in NATIVE_TABLE),
    ],
)
def test_quantization_as_in_training(
    package: dict[str, ModuleType],
    backend: Any,
    recipe: str,
    kind: str,
    axis: int,
    native: frozenset[Conversion],
) -> None:
    """By the kernels whose instructions are counted."""
    x = in_whole_tiles(recipe, kind, axis)
    with contextlib.nullcontext() if axis else as_in_training(package):
        wrong, launched = quantized(backend, x, OPERANDS[recipe], axis, native=native)
    assert wrong == 0
    assert launched == ["quantize_rows" if axis else "quantize_columns"]


SHORT = [("plain", "bfloat16", -1), ("sr16.h16", "bfloat16", 0)]


@pytest.mark.parametrize(
    ("recipe", "kind", "axis"), [*SHORT, *more(case for case in [*OTHERS, *TABLE] if case not in SHORT)]
)
def test_quantization(backend: Any, recipe: str, kind: str, axis: int) -> None:
    """A transform of 64 elements takes two blocks of a column, so that 128 rows are whole."""
    rows, columns = (128, 192) if recipe == "h64" else SHAPE
    wrong, launched = quantized(backend, matrix(rows, columns, kind), OPERANDS[recipe], axis)
    assert wrong == 0
    assert launched == ["quantize_rows" if axis else "quantize_columns"]


ODD = [("plain", -1, (71, 224)), ("sr16.h16", -1, (71, 224)), ("plain", 0, (72, 224))]


@pytest.mark.study
@pytest.mark.parametrize(("recipe", "axis", "shape"), ODD)
def test_quantization_of_odd_shapes(backend: Any, recipe: str, axis: int, shape: tuple[int, int]) -> None:
    """Lengths that divide by no tile; 72 rows leave the last block of a column to be padded."""
    assert quantized(backend, matrix(*shape, "bfloat16", 6), OPERANDS[recipe], axis, pad=not axis)[0] == 0


@pytest.mark.study
def test_quantization_does_not_depend_on_how_arguments_arrive(backend: Any) -> None:
    """Elsewhere they arrive in scalar registers; no quantizer takes a reciprocal, so its last bit is no question."""
    assert quantized(backend, matrix(64, 128, "bfloat16", 1), EVEN, -1, preload=False)[0] == 0


# The transform of 4 or 64 elements, whose norm is folded into the divisor, and the largest divisor, of `ceil`.
NATIVE_CASES = [
    (RECIPES["hadamard"], "bfloat16", 0), (RECIPES["floor"], "float32", -1),
    (OperandSpec(hadamard=64, scale_rule="ceil"), "bfloat16", -1),
    (OperandSpec(hadamard=4, scale_rule="ceil"), "float16", -1),
]  # fmt: skip
MORE_NATIVE_CASES = [(OPERANDS[name], kind, axis) for name, kind, axis in NATIVE_TABLE]


@pytest.mark.parametrize(
    ("spec", "kind", "axis"), [*NATIVE_CASES[:1], *more([*NATIVE_CASES[1:], *MORE_NATIVE_CASES])]
)
def test_quantization_by_native_conversions(backend: Any, spec: OperandSpec, kind: str, axis: int) -> None:
    """As the ISA's text defines them."""
    assert quantized(backend, matrix(*SHAPE, kind, 5), spec, axis, native=NATIVE)[0] == 0


NVFP4 = OperandSpec("nvfp4")
NVFP4_CASES = [
    (NVFP4, "bfloat16", -1, PORTABLE), (replace(NVFP4, hadamard=16), "bfloat16", 0, PORTABLE),
    (replace(NVFP4, block="16x16"), "float32", -1, PORTABLE), (NVFP4, "bfloat16", 0, NATIVE),
    (replace(NVFP4, rounding="sr", sr_bits=22), "float32", -1, PORTABLE),
]  # fmt: skip


@pytest.mark.study
@pytest.mark.parametrize(("spec", "kind", "axis", "native"), NVFP4_CASES)
def test_quantization_to_nvfp4(
    backend: Any, spec: OperandSpec, kind: str, axis: int, native: frozenset[Conversion]
) -> None:
    """The scale of the tensor too, by kernels that the fused multiply-add of the model is exact for."""
    wrong, launched = quantized(backend, matrix(*SHAPE, kind, 7), spec, axis, native=native)
    assert wrong == 0
    kernel = "quantize_rows" if axis else "quantize_columns"
    assert launched == [kernel, "_store_scale", kernel]


@pytest.mark.study
def test_dequantization_of_nvfp4(backend: Any) -> None:
    x = matrix(*SHAPE, "float32", 8)
    with on_model():
        q = backend.quantize(backend.from_numpy(x), NVFP4)
        got = backend.to_numpy(backend.dequantize(q))
    assert same_bits(got, reference.dequantize(reference.quantize(x, NVFP4)))


def test_the_start_up_check_accepts_the_conversions(package: dict[str, ModuleType]) -> None:
    with start_up(package) as launched:
        backend = package["backend"].TritonBackend(bounded="mfma")
    assert backend.native == NATIVE
    assert "gave the reference's bits at start-up" in backend.details()
    assert set(launched) == {"_convert"}


FAKE = [
    (-1, PORTABLE, (128, 256)),
    (-1, PORTABLE, SHAPE),
    (-1, NATIVE, SHAPE),
    (0, PORTABLE, SHAPE),
    (0, NATIVE, SHAPE),
]


@pytest.mark.study
@pytest.mark.parametrize(("axis", "native", "shape"), FAKE)
def test_fake_quantization(
    backend: Any, axis: int, native: frozenset[Conversion], shape: tuple[int, int]
) -> None:
    """Values are made of the codes in the same kernel. The first is one of aot.table."""
    x = matrix(*shape, "bfloat16", 3)
    with on_model() as launched, patch.object(backend, "native", native):
        got = backend.fake_quantize(
            backend.from_numpy(x), EVEN, axis=axis, dtype="bfloat16", placement=Placement(STREAM)
        )
    want = reference.fake_quantize(x, EVEN, axis=axis, dtype="bfloat16", placement=Placement(STREAM))
    assert same_bits(backend.to_numpy(got), want)
    assert launched == ["quantize_rows" if axis else "quantize_columns"]


def dual_differences(
    backend: Any, kind: str, names: tuple[str, str], native: frozenset[Conversion] = PORTABLE,
    shape: tuple[int, int] = SHAPE,
) -> tuple[int, list[str]]:  # fmt: skip
    """Quantize along rows and columns at once; return as `quantized` does."""
    x, specs = matrix(*shape, kind, 2), [OPERANDS[name] for name in names]
    with on_model() as launched, patch.object(backend, "native", native):
        both = backend.quantize_dual(
            backend.from_numpy(x), specs, placements=(Placement(STREAM), Placement(STREAM))
        )
    wrong = sum(
        differences(got, reference.quantize(x, spec, axis=axis, placement=Placement(STREAM)))
        for got, spec, axis in zip(both, specs, (-1, 0), strict=True)
    )
    return wrong, launched


DUAL_TABLE = [
    (("plain", "plain"), PORTABLE),
    (("h16", "h16"), PORTABLE),
    (("plain", "h16"), PORTABLE),
    (("plain", "h16"), NATIVE),
]


@pytest.mark.study
@pytest.mark.parametrize(("names", "native"), DUAL_TABLE)
def test_dual_quantization_as_in_training(
    package: dict[str, ModuleType], backend: Any, names: tuple[str, str], native: frozenset[Conversion]
) -> None:
    """See `test_quantization_as_in_training`."""
    with as_in_training(package):
        found = dual_differences(backend, "bfloat16", names, native, (128, 4096))
    assert found == (0, ["quantize_both"])


@pytest.mark.study
@pytest.mark.parametrize(("names", "native"), [(("hadamard", "plain"), PORTABLE), *DUAL_TABLE])
def test_dual_quantization(backend: Any, names: tuple[str, str], native: frozenset[Conversion]) -> None:
    assert dual_differences(backend, "bfloat16", names, native) == (0, ["quantize_both"])


@pytest.mark.study
def test_dual_quantization_with_random_numbers_is_two_kernels(backend: Any) -> None:
    wrong, launched = dual_differences(backend, "bfloat16", ("plain", "stochastic"))
    assert (wrong, launched) == (0, ["quantize_rows", "quantize_columns"])


FLOAT32_COLUMNS = """
from gfx950.test_kernels import *
from gfx950.driver import load_package
with on_model():
    backend = load_package(BACKENDS)["backend"].TritonBackend(bounded="bf16", conversions="portable")
for recipe in ("floor", "plain"):
    assert quantized(backend, matrix(*SHAPE, "float32"), RECIPES[recipe], 0) == (0, ["quantize_columns"])
assert dual_differences(backend, "float32", ("hadamard", "plain")) == (0, ["quantize_both"])
"""


@pytest.mark.study
def test_float32_columns_compile_in_time() -> None:
    """In a process that can be stopped: a pass of the compiler can take hours over the addresses of float32 loads."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BACKENDS.parent / "tests"), *sys.path])}
    process = subprocess.run(
        [sys.executable, "-c", FLOAT32_COLUMNS], env=environment, timeout=250, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.study)])
def test_dequantization(backend: Any, dtype: str) -> None:
    codes, scales = random_operand(64, 256, 0, 255, 3)
    scales[0] = [0, 1, 2, 252, 253, 254, 255, 127]
    own, theirs = on_tensors((codes, scales))
    with on_model() as launched:
        got = backend.to_numpy(backend.dequantize(theirs, dtype))
    assert same_bits(got, reference.dequantize(own, dtype))
    assert launched == ["_dequantize"]


@pytest.mark.study
@pytest.mark.parametrize(("n", "axis"), [(32, 0), (16, -1), (64, -1)])
def test_hadamard(backend: Any, n: int, axis: int) -> None:
    x = matrix(128, 128, "bfloat16", 4)
    with on_model():
        got = backend.to_numpy(backend.hadamard(backend.from_numpy(x), n, 0xB5A3, axis=axis))
    assert same_bits(got, reference.hadamard(x, n, 0xB5A3, axis=axis))
