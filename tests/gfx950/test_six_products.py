"""Products of elements of 6 bits as they are, as compiled for gfx950, executed in the model."""

from __future__ import annotations

import itertools
from types import ModuleType
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
torch = pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import more, same_bits, start_up
from gfx950.driver import on_model
from gfx950.test_mxfp8_kernels import operand
from mxref.formats import (
    E2M3,
    E3M2,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
)
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref.reference import backend as reference

SIX = (MXFP6_E2M3, MXFP6_E3M2)
OTHERS = (MXFP8_E4M3, MXFP8_E5M2, MXFP4, MXFP4_E1M2)
FIRST = (MXFP6_E2M3, MXFP6_E3M2)
PAIRS = [
    pair for pair in itertools.product((*SIX, *OTHERS), repeat=2) if set(pair) & set(SIX) and pair != FIRST
]


@pytest.mark.parametrize(("left", "right"), [FIRST, *more(PAIRS)])
def test_products_of_every_pair(
    package: dict[str, ModuleType], left: BlockFormat, right: BlockFormat
) -> None:
    """The last step along K has one block, and tiles reach over both edges. E1M2 is written as E4M3 first."""
    cores = package["matrix_cores"]
    (own_a, a), (own_b, b) = operand(left, 72, 288, 1), operand(right, 140, 288, 2)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT)
    assert 0 < np.isnan(want).sum() < want.size
    with on_model() as launched:
        got = cores.multiply(a, b, "float32", cores.SIX_TILES[-1])
    assert launched == ["_recode"] * (MXFP4_E1M2 in (left, right)) + ["_multiply_sixes"]
    assert same_bits(got.numpy(), want)


@pytest.mark.study
@pytest.mark.parametrize("out", ["float32", "bfloat16", "onto"])
@pytest.mark.parametrize("tile", [0, 1])
def test_every_tile_and_what_it_writes(package: dict[str, ModuleType], tile: int, out: str) -> None:
    cores = package["matrix_cores"]
    m, n = cores.SIX_TILES[tile].rows + 12, cores.SIX_TILES[tile].columns + 14
    (own_a, a), (own_b, b) = operand(MXFP6_E3M2, m, 512, 1), operand(MXFP4, n, 512, 2)
    dtype = "bfloat16" if out == "bfloat16" else "float32"
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT, out_dtype=dtype)
    gradient = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    held = torch.from_numpy(gradient.copy())
    with on_model() as launched:
        if out == "onto":
            cores.multiply_onto(a, b, held, cores.SIX_TILES[tile])
            got, want = held, want + gradient
        else:
            got = cores.multiply(a, b, dtype, cores.SIX_TILES[tile])
    words = got.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if out == "bfloat16" else got.numpy()
    assert same_bits(words, want)
    assert launched == ["_multiply_sixes"]


@pytest.mark.study
def test_a_prescale_is_undone(package: dict[str, ModuleType]) -> None:
    cores = package["matrix_cores"]
    (own_a, a), (own_b, b) = operand(MXFP6_E2M3, 40, 256, 1), operand(MXFP6_E2M3, 40, 256, 2)
    for q in (own_a, a):
        object.__setattr__(q, "prescale", True)
    want = reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT)
    with on_model():
        got = cores.multiply(a, b, "float32", cores.SIX_TILES[-1])
    # The exact sum is divided and rounded once; the kernel multiplies with a rounded factor.
    np.testing.assert_allclose(got.numpy(), want, rtol=2**-22)


@pytest.mark.study
@pytest.mark.parametrize("tile", [0, 1])
def test_the_check_of_scale_bytes_passes(package: dict[str, ModuleType], tile: int) -> None:
    scales = package["scale_bytes"]
    with on_model() as launched:
        multiply = scales.on_device(torch.device("cpu"), package["matrix_cores"].SIX_TILES[tile])
        assert scales.first_wrong_scale(multiply, scales.SIX_PAIRS) is None
    assert launched == ["_multiply_sixes"] * 2 * len(scales.SIX_PAIRS)


@pytest.mark.study
def test_wrong_products_are_refused_at_start_up(package: dict[str, ModuleType]) -> None:
    """Here the instruction takes one format for the other; the check is made where tiles are timed."""
    cores, six = package["matrix_cores"], package["sixes"]
    swapped = {**six.FORMATS, E2M3: six.FORMATS[E3M2], E3M2: six.FORMATS[E2M3]}
    with (
        start_up(package) as launched,
        patch.object(cores, "SIX_TILES", cores.SIX_TILES),
        patch.object(package["bounded"], "TUNES", True),
    ):
        right = package["backend"].TritonBackend(conversions="portable")
        assert cores.SIX_TILES
        with patch.object(six, "FORMATS", swapped):
            wrong = package["backend"].TritonBackend(conversions="portable")
        assert not cores.SIX_TILES
    assert "_multiply_sixes" in launched
    assert right.way == wrong.way == "mfma"
    assert "6 bits" not in right.details()
    assert "elements of 6 bits are multiplied as E4M3 alone: scale byte" in wrong.details()


@pytest.mark.parametrize(
    ("formats", "n", "k", "takes"),
    [
        ((MXFP6_E2M3, MXFP4), 1 << 20, 128, True), ((MXFP6_E2M3, MXFP4), (1 << 20) + 1, 128, False),
        ((MXFP4, MXFP6_E3M2), 8, (1 << 20) + 32, False), ((MXFP8_E4M3, MXFP4), 8, 128, False),
    ],
)  # fmt: skip
def test_what_may_be_timed(
    package: dict[str, ModuleType], formats: tuple[BlockFormat, BlockFormat], n: int, k: int, takes: bool
) -> None:
    """Offsets within a tile have 32 bits."""
    rows = 8, n
    a, b = (
        MXArray(
            torch.empty((r, made.code_bytes(k)), dtype=torch.uint8, device="meta"),
            torch.empty((r, k // 32), dtype=torch.uint8, device="meta"), (r, k), 1, format=made,
        )
        for r, made in zip(rows, formats, strict=True)
    )  # fmt: skip
    assert package["matrix_cores"]._takes_sixes(a, b) == takes


def test_the_fastest_tile_may_be_one_of_these(package: dict[str, ModuleType]) -> None:
    cores = package["matrix_cores"]
    (own_a, a), (own_b, b) = operand(MXFP6_E2M3, 20, 96, 1), operand(MXFP4, 20, 96, 2)
    (_, c), (_, d) = operand(MXFP8_E4M3, 20, 96, 1), operand(MXFP4, 20, 96, 2)
    timed: list[int] = []

    def bench(run: object) -> float:
        timed.append(1)
        return 10.0 - len(timed)  # the last is the fastest

    with (
        on_model() as launched,
        patch.object(cores, "TUNES", True),
        patch.object(cores, "_fastest", {}),
        patch("triton.testing.do_bench", bench),
    ):
        got = cores.multiply(a, b, "float32")
        assert (len(timed), launched) == (5, ["_multiply_sixes"])
        cores.multiply(c, d, "float32")
        assert (len(timed), launched[-1]) == (8, "_multiply"), (
            "without elements of 6 bits there are three tiles"
        )
    assert same_bits(got.numpy(), reference.scaled_gemm(own_a, own_b, profile=GemmProfile.EXACT))
