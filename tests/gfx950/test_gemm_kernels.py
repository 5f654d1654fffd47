"""The scaled GEMMs as compiled for gfx950, executed in the model, against the reference bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import gemm_cases

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950 import floats
from gfx950.compare import FOLDED_LAUNCHES, drawn, folded_product, more, on_tensors, same_bits
from gfx950.driver import on_model
from gfx950.inputs import random_operand
from mxref.formats import (
    E4M3,
    E5M2,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
)
from mxref.recipe import GemmProfile
from mxref.reference import backend as reference


def test_ordered_gemm(backend: Any) -> None:
    operands = [on_tensors(random_operand(rows, 256, 0, 255, rows)) for rows in (40, 72)]
    with on_model() as launched:
        got = backend.scaled_gemm(*(theirs for _, theirs in operands), profile=GemmProfile.ORDERED)
    want = reference.scaled_gemm(*(own for own, _ in operands), profile=GemmProfile.ORDERED)
    assert same_bits(backend.to_numpy(got), want)
    assert launched == ["_ordered"]


# formats, scale codes; NVFP4's last scale code is NaN
ORDERED = [
    (NVFP4, NVFP4, (0, 127)), (MXFP6_E2M3, MXFP6_E3M2, (90, 255)), (MXINT8, MXINT8, (0, 200)),
    (MXFP4_E1M2, MXFP4_E1M2, (90, 255)), (MXFP8_E4M3, MXFP8_E4M3, (90, 255)), (MXFP8_E5M2, MXFP8_E4M3, (90, 255)),
    (MXFP6_E3M2, MXFP4, (0, 200)), (MXFP8_E4M3, MXFP4, (0, 200)),
]  # fmt: skip


@pytest.mark.study
@pytest.mark.parametrize(("left", "right", "scales"), ORDERED)
def test_ordered_gemm_of_other_formats(
    backend: Any, left: BlockFormat, right: BlockFormat, scales: tuple[int, int]
) -> None:
    own = [gemm_cases.operand(made, rows, 96, scales, rows) for made, rows in ((left, 40), (right, 72))]
    theirs = [
        replace(q, **{name: torch.from_numpy(array) for name, array in q.arrays().items()}) for q in own
    ]
    want = reference.scaled_gemm(*own, profile=GemmProfile.ORDERED)
    # With elements of 8 bits, sums in float32 say only whether a dot is finite, and float64 has its value.
    eight = any(made.element in (E4M3, E5M2) for made in (left, right))
    assert np.isnan(want).any() == (scales[1] in (127, 255))
    assert not np.isnan(want).all()
    with on_model(unknown_sums=-1e30 if eight else None) as launched:
        got = backend.scaled_gemm(*theirs, profile=GemmProfile.ORDERED)
    assert same_bits(backend.to_numpy(got), want)
    assert launched == ["_ordered"]


@pytest.mark.parametrize(
    ("m", "n", "blocks", "out", "hostile"),
    [
        (64, 130, 6, "bfloat16", True),
        *more(
            [(64, 130, 6, "bfloat16", False), (72, 100, 8, "float32", True), (72, 100, 8, "float32", False)]
        ),
    ],
)
def test_ordered_gemm_on_folded_operands(
    package: dict[str, ModuleType], m: int, n: int, blocks: int, out: str, hostile: bool
) -> None:
    """Rows that fit are multiplied in FP8, the others again from their codes; the model sees to exact dots."""
    got, want, launched = folded_product(package, m, n, blocks, out, hostile)
    assert same_bits(got, want)
    assert np.isnan(want.astype(np.float32)).any() == hostile
    assert launched == FOLDED_LAUNCHES


@pytest.mark.study
@pytest.mark.parametrize(("m", "n", "blocks"), [(1, 33, 3), (17, 1, 1)])
def test_ordered_gemm_on_the_smallest_folded_operands(
    package: dict[str, ModuleType], m: int, n: int, blocks: int
) -> None:
    """Triton takes 1 for a constant."""
    got, want, launched = folded_product(package, m, n, blocks, hostile=False)
    assert same_bits(got, want)
    assert launched == FOLDED_LAUNCHES


# Tiles take one block of K at a time, or as many as divide their number.
BY_BLOCK = [
    (0, 130, 72, 4, "float32", False), (0, 72, 130, 3, "bfloat16", True),
    (1, 66, 70, 9, "bfloat16", True), (0, 130, 130, 12, "float32", True),
]  # fmt: skip


@pytest.mark.study
@pytest.mark.parametrize(("tile", "m", "n", "blocks", "out", "prescale"), BY_BLOCK)
def test_every_tile_of_ordered_gemms_by_block(
    package: dict[str, ModuleType], tile: int, m: int, n: int, blocks: int, out: str, prescale: bool
) -> None:
    with patch.object(package["ordered"], "TILES", package["ordered"].TILES[tile : tile + 1]):
        got, want, launched = folded_product(package, m, n, blocks, out, prescale=prescale)
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


def close(rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an operand, scales of its rows close together but for NaN: every sum is exact.

    So its order, which is not documented, does not matter, and the answer is that of `ordered`.
    """
    codes, scales = random_operand(rows, length, 125, 128, seed)
    scales[seed % rows, 1] = 255
    return codes, scales


# tile, K (480 divides by no depth), what is written, whether A is prescaled
FIRST = (1, 480, "onto", True)
EPILOGUES = [
    (tile, k, out, prescale)
    for tile in range(3) for k in (480, 512) for out in ("float32", "bfloat16", "onto") for prescale in (False, True)
    if (tile, k, out, prescale) != FIRST
]  # fmt: skip


@pytest.mark.parametrize(("tile", "k", "out", "prescale"), [FIRST, *more(EPILOGUES)])
def test_matrix_cores_on_packed_codes(
    package: dict[str, ModuleType], tile: int, k: int, out: str, prescale: bool
) -> None:
    """One program whole and three that reach over the edge, in each tile, with each epilogue."""
    cores = package["matrix_cores"]
    m, n = cores.TILES[tile].rows + 12, cores.TILES[tile].columns + 14
    (own_a, a), (own_b, b) = on_tensors(close(m, k, 1), prescale=prescale), on_tensors(close(n, k, 2))
    dtype = "bfloat16" if out == "bfloat16" else "float32"
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED, out_dtype=dtype)
    gradient = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    held = torch.from_numpy(gradient.copy())
    with on_model() as launched:
        if out == "onto":
            cores.multiply_onto(a, b, held, cores.TILES[tile])
            got, want = held, want + gradient
        else:
            got = cores.multiply(a, b, dtype, cores.TILES[tile])
    words = got.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if out == "bfloat16" else got.numpy()
    assert np.isnan(want.astype(np.float32)).sum() == m + n - 1
    assert same_bits(words, want)
    assert launched == ["_multiply"]


# Wgrad: x and dy along the tokens, axis 0; Dgrad: dy and w along the width of the output
@pytest.mark.study
@pytest.mark.parametrize(("m", "n", "k", "axis"), [(136, 40, 288, 0), (33, 200, 96, 1)])
def test_products_of_a_backward_pass(
    package: dict[str, ModuleType], m: int, n: int, k: int, axis: int
) -> None:
    """Through the backend's own choice of a kernel and of a tile."""
    (own_a, a), (own_b, b) = on_tensors(close(m, k, 4), axis), on_tensors(close(n, k, 5), axis)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED)
    with on_model() as launched:
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        got = backend.to_numpy(backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED))
    assert same_bits(got, want)
    assert launched[-1] == "_multiply"
    assert not backend.range_exceeded(), "NaN is within the range"


@pytest.fixture
def reciprocals(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Return the list of what reciprocals are taken of."""
    taken: list[np.ndarray] = []
    compute = floats.reciprocal

    def recorded(x: np.ndarray, *how: Any) -> np.ndarray:
        taken.append(x.ravel())
        return compute(x, *how)

    monkeypatch.setattr(floats, "reciprocal", recorded)
    return taken


# Every other test keeps subnormal results and takes the nearest float32.
RECIPROCALS = [
    {"rcp_flushes": True},
    {"rcp_flushes": True, "rcp_side": -1, "preload": False},
    {"rcp_side": 1},
]


@pytest.mark.study
@pytest.mark.parametrize("how", RECIPROCALS)
def test_products_do_not_depend_on_what_the_hardware_may_choose(
    package: dict[str, ModuleType], backend: Any, reciprocals: list[np.ndarray], how: dict[str, Any]
) -> None:
    """Whether v_rcp_f32 flushes subnormal results, its last bit, and how arguments arrive.

    Compilers divide integers of 32 bits with a reciprocal, to place a program's tile, and take no other. That of such
    an integer is 2^-32 or more, so none is subnormal.
    """
    (own_a, a), (own_b, b) = on_tensors(close(136, 256, 4)), on_tensors(close(140, 256, 5))
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.ORDERED)
    products = {
        "_ordered": lambda: backend.scaled_gemm(a, b, profile=GemmProfile.ORDERED),
        "_multiply": lambda: package["matrix_cores"].multiply(a, b, "float32"),
    }
    for name, product in products.items():
        with on_model(**how) as launched:
            got = product()
        assert launched == [name]
        assert same_bits(got.numpy(), want)
        assert reciprocals, f"{name} takes no reciprocal any more"
        assert all(((x >= 1) & (x <= 2.0**32)).all() for x in reciprocals)
        reciprocals.clear()
    folded, want, launched = folded_product(package, 72, 100, 8, **how)
    assert launched == FOLDED_LAUNCHES
    assert same_bits(folded, want)
    assert all(((x >= 1) & (x <= 2.0**32)).all() for x in reciprocals)


@pytest.mark.parametrize("side", ["a", *more([("b",)])])
def test_a_scale_out_of_range_is_flagged(package: dict[str, ModuleType], side: str) -> None:
    (_, a), (_, b) = on_tensors(close(33, 96, 4)), on_tensors(close(20, 96, 5))
    (a if side == "a" else b).scales[17, 2] = 253
    with on_model(unknown_sums=np.nan):
        backend = package["backend"].TritonBackend(conversions="portable", bounded="mfma")
        backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
    assert backend.range_exceeded()
