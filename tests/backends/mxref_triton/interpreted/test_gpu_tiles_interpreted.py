"""What a gfx950's owner runs, run here: the bodies of its tests pass, and a kernel that is wrong fails them."""

from dataclasses import replace

import pytest
import torch

from bench import bench_gpu
from gpu import test_gpu_tiles as tiles
from gpu.operands_torch import drawn, exact, tolerance
from gpu.test_gpu_tiles import launched  # noqa: F401
from mxref.gemm import bounded_tolerance
from mxref_triton import TritonBackend
from mxref_triton.products import bounded, fold, matrix_cores, ordered

SIZE = 40, 70
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow) encountered:RuntimeWarning"
)


@pytest.mark.parametrize("k", [128, 480])
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", matrix_cores.TILES, ids=tiles.of_size)
def test_products_of_packed_codes(tile, out, k, launched, monkeypatch):  # noqa: F811
    tiles.force(monkeypatch, tile)
    tiles.check_class(tile, out, *SIZE, k, launched)


@pytest.mark.parametrize("tile", matrix_cores.TILES, ids=tiles.of_size)
def test_products_added_to_a_gradient(tile, launched, monkeypatch):  # noqa: F811
    tiles.force(monkeypatch, tile)
    tiles.check_sum(tile, *SIZE, 480, launched)


@pytest.mark.parametrize("k", [64, 480])
@pytest.mark.parametrize("tile", ordered.TILES, ids=tiles.of_size)
def test_products_of_operands_folded_by_block(tile, k, launched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bounded, "is_gfx950", lambda device: True)
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 0)
    monkeypatch.setattr(ordered, "TILES", (tile,))
    tiles.check_ordered("_ordered_by_block", tile, *SIZE, k, launched)


# ---- kernels that are wrong ----


def scales_of_the_next_block(codes, scales):
    scales[3] = scales[3].roll(1)


def scales_of_another_row(codes, scales):
    scales[[8, 9]] = scales[[9, 8]]


def no_last_block(codes, scales):
    codes[5, -16:] &= 0x88


def odd_elements_first(codes, scales):
    codes[7] = (codes[7] >> 4) | (codes[7] << 4)


WRONG = [scales_of_the_next_block, scales_of_another_row, no_last_block, odd_elements_first]
wrongly = pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)


def misread(monkeypatch, module, spoil, rows):
    """Let kernels read other codes or scales of the operand with so many rows."""
    rows_of = module.rows_of

    def wrong(q):
        codes, scales = (t.clone() for t in rows_of(q))
        if len(codes) == rows:
            spoil(codes, scales)
        return codes, scales

    monkeypatch.setattr(module, "rows_of", wrong)


@wrongly
@pytest.mark.parametrize(("rows", "out"), [(SIZE[0], "float32"), (SIZE[1], "bfloat16")])
def test_misread_packed_codes_are_found(spoil, rows, out, launched, monkeypatch):  # noqa: F811
    tile = matrix_cores.TILES[-1]
    tiles.force(monkeypatch, tile)
    misread(monkeypatch, matrix_cores, spoil, rows)
    with pytest.raises(AssertionError, match="outside class fp32"):
        tiles.check_class(tile, out, *SIZE, 480, launched)


@wrongly
def test_misread_operands_of_a_fold_are_found(spoil, launched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bounded, "is_gfx950", lambda device: True)
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 0)
    misread(monkeypatch, fold, spoil, SIZE[0])
    with pytest.raises(AssertionError, match="other bits than the reference's"):
        tiles.check_ordered("_ordered_by_block", ordered.TILES[-1], *SIZE, 160, launched)


def test_another_tile_than_is_asked_for_is_found(launched, monkeypatch):  # noqa: F811
    tiles.force(monkeypatch, matrix_cores.TILES[1])
    with pytest.raises(AssertionError, match="_multiply"):
        tiles.check_class(matrix_cores.TILES[0], "float32", *SIZE, 64, launched)


def adds_twice(onto, product):
    onto += product
    onto += product


def forgets(onto, product):
    onto.copy_(product)


def rounds_first(onto, product):
    onto += product.bfloat16().float()


def apart(onto, product):
    onto += product


def a_row_too_far(onto, product):
    onto += product
    torch.as_strided(onto, (1,), (1,), onto.storage_offset() + onto.numel()).add_(1)


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (adds_twice, "no rounded addition"),
        (forgets, "no rounded addition"),
        (rounds_first, "no rounded addition"),
        (a_row_too_far, "beside the gradient"),
        (apart, "_multiply onto"),
    ],
)
def test_wrong_additions_are_found(add, said, launched, monkeypatch):  # noqa: F811
    tile = matrix_cores.TILES[-1]
    tiles.force(monkeypatch, tile)

    def add_product(self, a, b, onto, *, profile):
        add(onto, self.scaled_gemm(a, b, profile=profile))

    monkeypatch.setattr(TritonBackend, "add_product", add_product)
    with pytest.raises(AssertionError, match=said):
        tiles.check_sum(tile, *SIZE, 480, launched)


# ---- what the tests and the times are held to ----


@pytest.mark.clause("gemm.bounded", "gemm.output")
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("error_class", ["fp32", "fp8-hopper"])
def test_the_bound_on_tensors_is_that_of_the_reference(error_class, out):
    a, b = drawn(5, 96, 4, seed=1), drawn(7, 96, 4, seed=2)
    want = bounded_tolerance(tiles.on_host(a), tiles.on_host(b), error_class, out)
    assert torch.allclose(tolerance(96, exact(a, b)[1], error_class, out), torch.from_numpy(want), rtol=1e-12)


def products_of(a, b, change=lambda product: product, error_class="fp32"):
    """What is timed for a backend whose `bounded` products are changed."""
    backend = TritonBackend(bounded="mfma")
    backend.capabilities = replace(backend.capabilities, bounded_class=error_class)
    multiply = backend.scaled_gemm

    def changed(a, b, *, profile):
        product = multiply(a, b, profile=profile)
        return change(product) if profile == "bounded" else product

    backend.scaled_gemm = changed
    return bench_gpu.products(backend)


def test_times_are_taken_of_products_within_the_class_that_is_declared():
    a, b = drawn(70, 256, 2, seed=1), drawn(60, 256, 2, seed=2)
    bench_gpu.check_gemm(products_of(a, b), a, b)
    off = lambda product: product * (1 + 2.0**-9)  # noqa: E731
    bench_gpu.check_gemm(products_of(a, b, off, "fp8-hopper"), a, b)
    with pytest.raises(SystemExit, match="bounded by mfma lies outside its class, fp32"):
        bench_gpu.check_gemm(products_of(a, b, off), a, b)
    with pytest.raises(SystemExit, match="lies outside its class"):
        bench_gpu.check_gemm(products_of(a, b, lambda product: product * torch.nan, "fp8-hopper"), a, b)
    a.scales[0, 0] = 253
    with pytest.raises(SystemExit, match="bounded by mfma: the operands exceed its range"):
        bench_gpu.check_gemm(products_of(a, b), a, b)
