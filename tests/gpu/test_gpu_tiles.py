"""Each tile of a GEMM, also the large ones of training's sizes, on products that are small enough to compare.

The size of a product decides its tile, so most tiles are forced here, and the launched kernel is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import mxref
from gpu.operands_torch import drawn, exact, tolerance
from mxref import MXArray
from mxref_triton import TritonBackend
from mxref_triton.lane.gfx950 import is_gfx950
from mxref_triton.launch import DEVICE
from mxref_triton.products import bounded, matrix_cores, ordered
from mxref_triton.products.scale_bytes import first_wrong_scale, on_device
from mxref_triton.products.scale_range import PART, flag_scales
from mxref_triton.products.tiling import Tile

GPU = torch.device("cuda")
IS_GFX950 = torch.cuda.is_available() and is_gfx950(GPU)
IS_HOPPER = torch.cuda.is_available() and bounded.is_hopper(GPU)
BY_ROW = Tile(128, 64, 128, 4)
"""What Hopper's kernel of folded operands has instead of a choice."""

Spy = Callable[[], list[tuple[str, int, int]]]

needs_gfx950 = pytest.mark.skipif(
    not IS_GFX950, reason="no gfx950, whose matrix cores alone take packed codes"
)
lengths = pytest.mark.parametrize("k", [480, 4096, 16384])


def of_size(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth}"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Return what names the kernels launched since it was last asked, with the rows and columns of their programs."""
    found: list[tuple[str, int, int]] = []
    for module in (matrix_cores, ordered):

        def spy(kernel: Any, *arguments: Any, launch: Any = module.launch, **constants: Any) -> None:
            name = kernel.__name__ + (" onto" if constants.get("ONTO") else "")
            found.append((name, constants["BM"], constants["BN"]))
            launch(kernel, *arguments, **constants)

        monkeypatch.setattr(module, "launch", spy)

    def since() -> list[tuple[str, int, int]]:
        taken = found[:]
        found.clear()
        return taken

    return since


# ---- bounded: packed codes on gfx950's matrix cores ----


def force(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    monkeypatch.setattr(matrix_cores, "TUNES", False)
    monkeypatch.setattr(matrix_cores, "tile_for", lambda m, n: tile)


@needs_gfx950
@pytest.mark.clause("gemm.nan")
@pytest.mark.parametrize("tile", matrix_cores.TILES, ids=of_size)
def test_every_scale_byte_is_a_power_of_two_or_nan(tile):
    assert first_wrong_scale(on_device(GPU, tile)) is None


def check_class(tile: Tile, out: str, m: int, n: int, k: int, launched: Spy) -> None:
    """Compare a product of spread scales with its error class; a block at a wrong place or scale exceeds it by far."""
    backend = TritonBackend(bounded="mfma")
    a, b = drawn(m, k, 4, seed=1), drawn(n, k, 4, seed=2)
    want, magnitude = exact(a, b)
    got = backend.scaled_gemm(a, b, profile="bounded", out_dtype=out)
    assert launched() == [("_multiply", tile.rows, tile.columns)]
    within = (got.double() - want).abs() <= tolerance(k, magnitude, "fp32", out)
    assert within.all(), f"{int((~within).sum())} sums outside class fp32"
    assert not backend.range_exceeded()


@needs_gfx950
@pytest.mark.clause("gemm.bounded", "gemm.output")
@lengths
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", matrix_cores.TILES, ids=of_size)
def test_packed_codes_are_multiplied_within_class_fp32(tile, out, k, launched, monkeypatch, cases):
    force(monkeypatch, tile)
    check_class(tile, out, 300, 530, k, launched)
    cases(300 * 530)


def check_sum(tile: Tile, m: int, n: int, k: int, launched: Spy) -> None:
    """Hold what a gradient becomes to one rounded addition of the product, and what lies beside it to what it was."""
    backend = TritonBackend(bounded="mfma")
    a, b = drawn(m, k, 4, seed=1), drawn(n, k, 4, seed=2)
    want, magnitude = exact(a, b)
    product = backend.scaled_gemm(a, b, profile="bounded")
    generator = torch.Generator(DEVICE).manual_seed(3)
    wide = torch.randn(m + 2, n, device=DEVICE, generator=generator) * product.abs().mean()
    gradient = wide[1:-1]
    gradient[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    gradient[1] = -product[1]
    before = wide.clone()
    launched()
    backend.add_product(a, b, gradient, profile="bounded")
    kernels = launched()
    sums = before[1:-1] + product
    same = gradient.view(torch.int32) == sums.view(torch.int32)
    same |= gradient.isnan() & sums.isnan()
    assert same.all(), f"{int((~same).sum())} sums are no rounded addition of the product"
    assert torch.equal(wide[[0, -1]], before[[0, -1]]), "a row beside the gradient is another"
    assert not gradient[1].any()
    error = (gradient - (before[1:-1] + want)).abs()[2:]
    rounded = 2.0**-24 * (before[1:-1].abs() + magnitude)[2:]
    assert (error <= 1.01 * (tolerance(k, magnitude, "fp32")[2:] + rounded)).all()
    assert kernels == [("_multiply onto", tile.rows, tile.columns)]
    assert not backend.range_exceeded()


@needs_gfx950
@pytest.mark.clause("gemm.bounded")
@lengths
@pytest.mark.parametrize("tile", matrix_cores.TILES, ids=of_size)
def test_products_are_added_to_a_gradient_in_place(tile, k, launched, monkeypatch, cases):
    force(monkeypatch, tile)
    check_sum(tile, 300, 530, k, launched)
    cases(300 * 530)


# ---- ordered: folded operands, by row or by block ----


def on_host(q: MXArray) -> MXArray:
    return MXArray(q.codes.cpu().numpy(), q.scales.cpu().numpy(), q.shape, 1)


def check_ordered(kernel: str, tile: Tile, m: int, n: int, k: int, launched: Spy) -> None:
    """Hold a product to the reference's bits: with NaN, with a row that E4M3 does not hold, and with B prepared."""
    backend = TritonBackend()
    a, b = drawn(m, k, 3, seed=1), drawn(n, k, 3, seed=2)
    a.scales[m // 2, k // 64] = 255
    b.scales[n // 3, 0], b.scales[n // 3, 1] = 180, 60
    want = mxref.get_backend("reference").scaled_gemm(on_host(a), on_host(b)).view(np.int32)
    for right in (b, backend.prepare(b, profile="ordered")):
        got = backend.scaled_gemm(a, right)
        first, second = launched()
        assert first == (kernel, tile.rows, tile.columns)
        assert second[0] == "_ordered_misfits"
        same = got.cpu().view(torch.int32).numpy() == want
        assert same.all(), f"{(~same).sum()} sums have other bits than the reference's"


@pytest.mark.skipif(not IS_HOPPER, reason="no Hopper, which alone multiplies operands folded by row")
@pytest.mark.clause("gemm.ordered", "gemm.nan")
@lengths
def test_operands_folded_by_row_have_the_references_bits(k, launched, monkeypatch, cases):
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 0)
    check_ordered("_ordered_folded", BY_ROW, 300, 260, k, launched)
    cases(2 * 300 * 260)


@pytest.mark.skipif(not IS_GFX950, reason="no gfx950, which alone multiplies operands folded by block")
@pytest.mark.clause("gemm.ordered", "gemm.nan")
@lengths
@pytest.mark.parametrize("tile", ordered.TILES, ids=of_size)
def test_operands_folded_by_block_have_the_references_bits(tile, k, launched, monkeypatch, cases):
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 0)
    monkeypatch.setattr(ordered, "TILES", (tile,))
    check_ordered("_ordered_by_block", tile, 300, 260, k, launched)
    cases(2 * 300 * 260)


# ---- the range of bounded ----


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("size", [1, PART - 1, PART, PART + 16, (1 << 22) + 3])
def test_scales_beyond_the_range_are_noticed_wherever_they_are(size, cases):
    generator = torch.Generator(DEVICE).manual_seed(size)
    inside = torch.randint(0, 253, (size + 1,), dtype=torch.uint8, device=DEVICE, generator=generator)
    other = inside.new_full((PART + 5,), 252)
    word = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for first in (0, 1):  # aligned and not
        scales = inside[first : first + size]
        for place in {0, size // 2, size - 1}:
            kept = int(scales[place])
            for code in (252, 253, 254, 255):
                scales[place] = code
                for operands in ((scales, other), (other, scales), (scales,)):
                    word.zero_()
                    flag_scales(252, word, *operands)
                    assert int(word) == (code in (253, 254))
                    cases(size)
            scales[place] = kept
