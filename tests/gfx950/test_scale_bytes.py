"""The check of scale bytes that a gfx950 has to pass before `bounded` goes to its scaled matrix instruction."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import on_tensors, same_bits, start_up
from gfx950.driver import on_model
from gfx950.inputs import random_operand
from mxref.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, BlockFormat
from mxref.gemm import scaled_gemm
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref.reference import backend as reference


@pytest.fixture
def scales(package: dict[str, ModuleType]) -> ModuleType:
    return package["scale_bytes"]


@pytest.mark.parametrize(
    ("made", "other", "largest"),
    [
        (MXFP4, MXFP4, 252),
        (MXFP8_E4M3, MXFP4, 246),
        (MXFP8_E5M2, MXFP8_E4M3, 239),
        (MXFP6_E2M3, MXFP6_E3M2, 252),
        (MXFP6_E3M2, MXFP6_E2M3, 250),
        (MXFP6_E2M3, MXFP4, 252),
        (MXFP8_E4M3, MXFP6_E3M2, 246),
        (MXFP8_E5M2, MXFP6_E2M3, 239),
    ],
    ids=str,
)
def test_every_scale_byte_is_asked_for_at_every_place(
    scales: ModuleType, made: BlockFormat, other: BlockFormat, largest: int
) -> None:
    a = scales.asked(made)
    assert {*range(largest + 1), 255} == set(np.unique(a.scales))
    row, block = np.nonzero(a.scales == 255)
    # A lane holds the scale of row l mod 16 and of block l / 16.
    assert {*zip(row % 16, block % 4, strict=True)} == {(r, b) for r in range(16) for b in range(4)}
    empty = ~a.codes.reshape(384, 8, -1)[row, block].any(axis=1)
    assert 0 < empty.sum() < len(empty), "blocks of NaN with codes, and as quantizers write them"
    want = scaled_gemm(a, scales.partner(other), profile="exact")
    assert same_bits(scaled_gemm(a, scales.partner(other), profile="ordered"), want), (
        "no sum depends on its order"
    )
    finite = want[np.isfinite(want) & (want != 0)]
    assert (np.abs(np.log2(np.abs(finite))) < 40).all(), "far from where results might be flushed"


def test_the_reference_passes(scales: ModuleType) -> None:
    assert scales.first_wrong_scale(lambda a, b: scaled_gemm(a, b, profile="ordered")) is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("byte", "taken"), [(0, 1), (1, 0), (126, 127), (127, 255), (252, 251), (255, 254), (255, 0)]
)
def test_a_byte_that_is_taken_for_another_is_named(
    scales: ModuleType, byte: int, taken: int, side: str
) -> None:
    def wrong(q: MXArray) -> MXArray:
        return replace(q, scales=np.where(q.scales == byte, taken, q.scales).astype(np.uint8))

    def multiply(a: MXArray, b: MXArray) -> np.ndarray:
        return scaled_gemm(*((wrong(a), b) if side == "left" else (a, wrong(b))), profile="ordered")

    said = scales.first_wrong_scale(multiply)
    # 127 stands in every row, beside the byte that a row asks for.
    assert said.startswith("scale byte " if byte == 127 else f"scale byte {byte} of the {side} operand gave ")


@pytest.mark.parametrize(
    ("wrong", "pair"),
    [
        ((MXFP8_E4M3, MXFP4), "MXFP8 E4M3 x MXFP4"),
        ((MXFP4, MXFP8_E4M3), "MXFP4 x MXFP8 E4M3"),
        ((MXFP8_E5M2, MXFP8_E4M3), "MXFP8 E5M2 x MXFP8 E4M3"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fault", ["NaN is 2^128", "halves of K"])
def test_a_fault_of_one_pair_of_formats_is_named(
    scales: ModuleType, fault: str, wrong: tuple[BlockFormat, BlockFormat], pair: str
) -> None:
    def multiply(a: MXArray, b: MXArray) -> np.ndarray:
        if (a.format, b.format) == wrong and fault == "halves of K":
            # Operands of 8 bits read in the order of those of 4.
            runs = a.codes.reshape(len(a.codes), 2, -1, 16)
            a = replace(a, codes=np.roll(runs, 1, 2).reshape(a.codes.shape))
        elif (a.format, b.format) == wrong:
            a, b = (
                replace(q, scales=np.where(q.scales == 255, 254, q.scales).astype(np.uint8)) for q in (a, b)
            )
        return scaled_gemm(a, b, profile="ordered")

    assert scales.first_wrong_scale(multiply).endswith(f" is right, in {pair}")


@pytest.mark.parametrize("made", [MXFP6_E2M3, MXFP6_E3M2, MXFP8_E5M2], ids=str)
def test_a_fault_of_the_kernel_for_six_bits_is_named(scales: ModuleType, made: BlockFormat) -> None:
    """Hardware that flushes subnormal elements of 6 bits, or takes E5M2 for E4M3."""

    def read(q: MXArray) -> MXArray:
        if q.format is not made or made is MXFP8_E5M2:
            return replace(q, format=MXFP8_E4M3) if q.format is made else q
        codes = unpack(q.codes, made.element)
        subnormal = np.abs(np.array(made.element.values))[codes] < 2.0 ** (
            made.element.unit_exponent + made.element.mantissa_bits
        )
        return replace(q, codes=pack(np.where(subnormal, 0, codes).astype(np.uint8), made.element))

    def multiply(a: MXArray, b: MXArray) -> np.ndarray:
        return scaled_gemm(read(a), read(b), profile="ordered")

    said = scales.first_wrong_scale(multiply, scales.SIX_PAIRS)
    assert made.title in (said or "")


@pytest.mark.study
@pytest.mark.parametrize("tile", [0, 1, 2])
def test_the_compiled_kernel_passes(package: dict[str, ModuleType], scales: ModuleType, tile: int) -> None:
    with on_model() as launched:
        multiply = scales.on_device(torch.device("cpu"), package["matrix_cores"].TILES[tile])
        assert scales.first_wrong_scale(multiply) is None
    assert launched == ["_multiply"] * 6


def test_hardware_on_which_byte_255_is_no_nan_multiplies_by_ordered(package: dict[str, ModuleType]) -> None:
    with start_up(package, nan_scales=False, unknown_sums=np.nan):
        backend = package["backend"].TritonBackend()
    assert backend.way == "ordered"
    said = "bounded GEMMs by ordered: the scaled matrix instruction is not as specified, scale byte 255 of the left"
    assert said in backend.details()
    assert (backend.capabilities.bounded_class, backend.capabilities.bounded_max_scale) == ("fp32", 254)
    operands = [random_operand(rows, 128, 0, 255, rows) for rows in (33, 40)]
    operands[0][1][5, 1] = 255
    (own_a, a), (own_b, b) = map(on_tensors, operands)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED)
    assert np.isnan(want).any()
    with on_model(nan_scales=False) as launched:
        made = backend.prepare(b, profile=GemmProfile.BOUNDED)
        got = backend.scaled_gemm(a, made, profile=GemmProfile.BOUNDED)
    assert same_bits(backend.to_numpy(got), want)
    assert launched[-1] == "_ordered"
    assert not backend.range_exceeded()


def test_hardware_as_specified_multiplies_packed_codes(package: dict[str, ModuleType]) -> None:
    with start_up(package) as launched:
        backend = package["backend"].TritonBackend(conversions="portable")
    assert backend.way == "mfma"
    assert (
        "bounded GEMMs by mfma, whose scale bytes gave the reference's bits at start-up" in backend.details()
    )
    assert launched == ["_multiply"] * 6


@pytest.mark.parametrize(
    ("choices", "code", "said"),
    [
        ({}, 0, ["pass  tile 64 x 64: scale bytes are powers of two, 255 is NaN, for MXFP4, MXFP8 and both"]),
        (
            {"nan_scales": False, "unknown_sums": np.nan},
            1,
            ["FAIL  tile 64 x 64: scale byte 255 of the left operand gave ", "MXREF_TRITON_BOUNDED=ordered"],
        ),
    ],
)
def test_the_command(
    package: dict[str, ModuleType],
    choices: dict[str, Any],
    code: int,
    said: list[str],
    monkeypatch: Any,
    capsys: Any,
) -> None:
    check = package["check_scales"]
    monkeypatch.setattr(check, "TILES", package["matrix_cores"].TILES[-1:])
    with on_model(**choices):
        assert check.main() == code
    printed = capsys.readouterr().out
    assert all(part in printed for part in said), printed


def test_the_command_without_a_gfx950() -> None:
    command = [sys.executable, "-W", "error", "-m", "mxref_triton.check_scales"]
    process = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert "needs a gfx950 GPU, and there is none: nothing was checked" in process.stderr
