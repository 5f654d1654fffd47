"""Faults planted in a copy of the kernels' source: the model must see each of them.

`make test` plants one of a kind; the interpreter's tests find the others too, in the code that both compilers share.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import (
    BACKENDS,
    FOLDED_LAUNCHES,
    NATIVE,
    RECIPES,
    SHAPE,
    folded_product,
    more,
    quantized,
    same_bits,
    start_up,
)
from gfx950.driver import load_package, on_model
from gfx950.errors import Gfx950Error
from gfx950.inputs import matrix
from mxref.errors import BackendError
from mxref.formats import E2M1, E2M3, E3M2
from mxref.recipe import OperandSpec

# name: (file, what stands there once, what is put there instead, recipe)
WRONG_BITS = {
    "ties go away from zero": ("lane/treatment.py", "Rounding.RNE: -1", "Rounding.RNE: 1 << 21", "plain"),
    # Of amax. Biased exponents 1 and 2 both give the smallest scale, so a carry out of 1 lost changes no bit.
    "the carry out of amax's exponent 2 is lost": (
        "lane/scale.py",
        "(amax_bits + carry) >> 23",
        "(amax_bits + tl.where((amax_bits >> 23) == 2, 0, carry)) >> 23",
        "plain",
    ),
    # Of an element: 1.75 and what lies above has to become 2, and E2M1's exponent goes from 1 to 2.
    "the carry out of an element's exponent 1 is lost": (
        "lane/rounding.py",
        "code = _to_even(v)",
        "code = _to_even(v) - ((v < 2) & (_to_even(v) & 15 == 0)).to(tl.uint32)",
        "plain",
    ),
    "the same, rounding stochastically": (
        "lane/rounding.py",
        "return (position + r) >> 22",
        "return tl.where(position >> 23 == 1, tl.minimum(position + r, 0x00FFFFFF), position + r) >> 22",
        "stochastic",
    ),
    "nibbles are swapped": ("lane/rounding.py", "tl.abs(values[i])", "tl.abs(values[i ^ 1])", "plain"),
    "Inf is taken for a number": (
        "lane/scale.py",
        "amax_bits < _INFINITY",
        "amax_bits <= _INFINITY",
        "plain",
    ),
    "a stage of the transform is missing": ("lane/hadamard.py", "if H == N:", "if 2 * H == N:", "hadamard"),
    "Philox has nine rounds": ("lane/random.py", "static_range(10)", "static_range(9)", "stochastic"),
}


def planted(folder: Path, file: str, there: str, instead: str) -> dict[str, ModuleType]:
    """Return the backend's modules with one piece of their text, found once, replaced."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(BACKENDS / "mxref_triton", folder / "mxref_triton", ignore=ignored)
    path = folder / "mxref_triton" / file
    source = path.read_text()
    assert source.count(there) == 1, (
        f"{file} has no {there!r} any more, or several: plant this fault elsewhere"
    )
    path.write_text(source.replace(there, instead))
    return load_package(folder)


def planted_backend(folder: Path, file: str, there: str, instead: str) -> Any:
    """Return the backend with that fault."""
    package = planted(folder, file, there, instead)
    with on_model():
        return package["backend"].TritonBackend(bounded="bf16", conversions="portable")


@pytest.mark.parametrize("fault", ["ties go away from zero", *more((f,) for f in list(WRONG_BITS)[1:])])
def test_wrong_bits_are_seen(fault: str, tmp_path: Path) -> None:
    file, there, instead, recipe = WRONG_BITS[fault]
    backend = planted_backend(tmp_path, file, there, instead)
    wrong, launched = quantized(backend, matrix(*SHAPE, "bfloat16"), RECIPES[recipe], -1)
    assert wrong > 0
    assert launched == ["quantize_rows"]


def test_a_store_outside_the_output_is_seen(tmp_path: Path) -> None:
    backend = planted_backend(
        tmp_path,
        "quantizer/row.py",
        "tl.store(target, stored[block], mask=mask)",
        "tl.store(target, stored[block])",
    )
    with pytest.raises(Gfx950Error, match=r"buffer_store_.*access of \d bytes at offset"):
        quantized(backend, matrix(*SHAPE, "bfloat16"), RECIPES["plain"], -1)


def test_a_missing_wait_state_is_seen(tmp_path: Path) -> None:
    instead = '_NEAREST = (lambda text: tl.constexpr(text.replace("s_nop 0", "")))('
    backend = planted_backend(tmp_path, "lane/gfx950.py", "_NEAREST = tl.constexpr(", instead)
    with pytest.raises(Gfx950Error, match="s_nop 0 is missing"):
        quantized(backend, matrix(*SHAPE, "bfloat16"), RECIPES["plain"], -1, native=NATIVE)


def test_a_result_over_a_source_is_seen(tmp_path: Path) -> None:
    """Nothing holds the sources until the result is written; the compiler saves registers then."""
    backend = planted_backend(
        tmp_path, "lane/gfx950.ll",
        "<6 x i32> %codes, <16 x float> %even15, <16 x float> %odd15, float %divisor) #1\n"
        "  %out = extractelement <6 x i32> %kept, i32 %word\n  ret i32 %out\n}\n\ndefine",
        "<6 x i32> %codes, <16 x float> poison, <16 x float> poison, float poison) #1\n"
        "  %out = extractelement <6 x i32> %kept, i32 %word\n  ret i32 %out\n}\n\ndefine",
    )  # fmt: skip
    spec = OperandSpec("mxfp6_e2m3", "even")
    with pytest.raises(Gfx950Error, match="2xpk16_fp6_f32 .* lies over a source"):
        quantized(backend, matrix(*SHAPE, "bfloat16"), spec, -1, native=NATIVE)


# name: (file, what stands there once, what is put there instead, elements whose conversions are wrong then)
WRONG_CONVERSIONS = {
    "two bytes of a word are swapped": (
        "lane/gfx950.py", '"0,0,1,0", "0,0,0,1"', '"0,0,0,1", "0,0,1,0"', {E2M1},
    ),
    "a byte of a word is never written": (
        "lane/gfx950.py", '"0,0,0,1", "0,0,1,1"', '"0,0,0,1", "0,0,0,1"', {E2M1},
    ),
    "values are multiplied with the divisor": (
        "lane/gfx950.py",
        "return float_of(_ONE_TWICE - bits_of(factor))",
        "return factor",
        {E2M1, E2M3, E3M2},
    ),
    "the divisor is twice as large": (
        "lane/gfx950.py",
        "_ONE_TWICE = tl.constexpr(254 <<",
        "_ONE_TWICE = tl.constexpr(255 <<",
        {E2M1, E2M3, E3M2},
    ),
    "values of even and of odd index change places": (
        "lane/gfx950.ll",
        "2xpk16.fp6.f32(\n      <16 x float> %even15, <16 x float> %odd15",
        "2xpk16.fp6.f32(\n      <16 x float> %odd15, <16 x float> %even15",
        {E2M3},
    ),
    "one format is converted to the other": (
        "lane/gfx950.ll", "%codes = call <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.bf6",
        "%codes = call <6 x i32> @llvm.amdgcn.cvt.scalef32.2xpk16.fp6", {E3M2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_CONVERSIONS)
def test_wrong_conversions_are_refused_at_start_up(fault: str, tmp_path: Path) -> None:
    *change, wrong = WRONG_CONVERSIONS[fault]
    package = planted(tmp_path, *change)
    said = r"the reference.* 0x[0-9a-f]{8} / 2\^-?\d+ became code \d+ of E\dM\d, not \d+"
    with start_up(package) as launched:
        backend = package["backend"].TritonBackend(bounded="mfma")
        assert backend.native == frozenset(made for made in NATIVE if made[0] not in wrong)
        assert bool(backend.native) != ("portable conversions: " in backend.details())
        assert re.search(said, backend.details())
        with pytest.raises(BackendError, match=said):
            package["backend"].TritonBackend(bounded="mfma", conversions="native")
    assert set(launched) == {"_convert"}


# name: (file, what stands there once, what is put there instead)
WRONG_PRODUCTS = {
    "blocks in descending order": (
        "products/fold.py",
        "at = block.to(tl.int64)[None, :] * rows",
        "at = (blocks - 1 - block).to(tl.int64)[None, :] * rows",
    ),
    "only the first row is listed as one that does not fit": (
        "products/fold.py",
        "tl.store(misfits + 1 + slot, row, bad)",
        "tl.store(misfits + 1 + slot, row * 0, bad)",
    ),
    "a row's power of two is one too small": (
        "products/fold.py",
        "power = (top - LIFT) << 23",
        "power = (top - LIFT - 1) << 23",
    ),
    "the left operand stays at its first block": ("products/ordered.py", "a += rows * 32", "a += rows * 0"),
}


@pytest.mark.parametrize(
    "fault", ["blocks in descending order", *more((f,) for f in list(WRONG_PRODUCTS)[1:])]
)
def test_wrong_products_are_seen(fault: str, tmp_path: Path) -> None:
    got, want, launched = folded_product(planted(tmp_path, *WRONG_PRODUCTS[fault]), 64, 64, 8)
    assert not same_bits(got, want)
    assert launched == FOLDED_LAUNCHES


def test_an_addition_inside_the_matrix_instruction_is_seen(tmp_path: Path) -> None:
    """Without its limit the dot takes the accumulator as addend; how that sum is rounded is not documented."""
    package = planted(
        tmp_path, "products/ordered.py", "tl.load(b + b_at), max_num_imprecise_acc=32)", "tl.load(b + b_at))"
    )
    with pytest.raises(Gfx950Error, match=r"v_mfma_f32_16x16x32_fp8_fp8 .* order or width"):
        folded_product(package, 64, 64, 8, hostile=False)
