"""The GEMM of gfx950 in Triton's interpreter, with its matrix instruction emulated, and who rounds where."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted.gemm_operands import bits, drawn, on
from mxref import GemmProfile
from mxref.capabilities import every_gemm
from mxref.conformance import CLAUSES, check
from mxref.errors import BackendError, RecipeError, UnsupportedError
from mxref.formats import MXFP4
from mxref.gemm import bounded_tolerance, scaled_gemm
from mxref.recipe_files import recipe_from_table
from mxref_torch import advance, convert, sole_uses
from mxref_triton import TritonBackend
from mxref_triton.products import bounded, matrix_cores
from mxref_triton.products.fold import MISFIT_PROGRAMS
from mxref_triton.products.matrix_cores import TILES, multiply, multiply_onto
from mxref_triton.products.tiling import COMPUTE_UNITS

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow) encountered:RuntimeWarning"
)


@pytest.mark.clause("gemm.bounded", "gemm.prescale", "gemm.output")
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 64, 128), (1, 1, 32), (65, 130, 96), (37, 3, 416), (130, 64, 160)]
)
def test_edges_of_every_axis(m, n, k, out):
    rng = np.random.default_rng(m)
    a, b = replace(drawn(rng, m, k), prescale=m == 65), drawn(rng, n, k)
    exact = scaled_gemm(a, b, profile="exact").astype(np.float64)
    got = TritonBackend().to_numpy(multiply(on("cpu", a), on("cpu", b), out))
    assert got.shape == (m, n)
    assert (np.abs(got.astype(np.float64) - exact) <= bounded_tolerance(a, b, "fp32", out)).all()


@pytest.mark.clause("gemm.nan")
@pytest.mark.parametrize(("out", "nan"), [("float32", 0x7FC00000), ("bfloat16", 0x7FC0)])
def test_a_nan_block_spoils_its_row_or_column_with_the_canonical_nan(out, nan):
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 5, 96), drawn(rng, 70, 96)
    a.scales[3, 2] = b.scales[66, 0] = 255
    got = bits(multiply(on("cpu", a), on("cpu", b), out))
    spoiled = np.zeros((5, 70), bool)
    spoiled[3] = spoiled[:, 66] = True
    assert ((got == nan) == spoiled).all()


@pytest.mark.parametrize("shape", [(0, 3, 32), (3, 0, 32), (4, 5, 0)])
def test_empty(shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    got = multiply(on("cpu", drawn(rng, m, k)), on("cpu", drawn(rng, n, k)), "float32")
    assert got.shape == (m, n)
    assert not bits(got).any()


def test_a_product_is_added_to_a_gradient_in_place():
    rng = np.random.default_rng(0)
    a, b = on("cpu", drawn(rng, 66, 64)), on("cpu", replace(drawn(rng, 9, 64), prescale=True))
    product = multiply(a, b, "float32")
    gradient = torch.from_numpy(rng.standard_normal((66, 9)).astype(np.float32))
    want = gradient + product
    multiply_onto(a, b, gradient)
    assert (bits(gradient) == bits(want)).all()


@pytest.mark.clause("conformance.dual")
def test_the_backend_adds_where_the_kernel_stores(monkeypatch):
    stored = []
    monkeypatch.setattr(
        bounded, "multiply_onto", lambda a, b, onto: (stored.append(onto), multiply_onto(a, b, onto))
    )
    rng = np.random.default_rng(1)
    a, b = on("cpu", drawn(rng, 7, 64)), on("cpu", drawn(rng, 66, 64))
    held = torch.from_numpy(rng.standard_normal((7, 66)).astype(np.float32))
    held[0, :4] = torch.tensor([np.nan, np.inf, 0.0, -0.0])
    for way, profile, by_kernel in (
        ("mfma", "bounded", True),
        ("mfma", "ordered", False),
        ("bf16", "bounded", False),
    ):
        backend, gradient = TritonBackend(bounded=way), held.clone()
        want = held + backend.scaled_gemm(a, b, profile=profile)
        stored.clear()
        backend.add_product(a, b, gradient, profile=profile)
        assert [t is gradient for t in stored] == [True] * by_kernel
        same = (gradient.view(torch.int32) == want.view(torch.int32)) | (gradient.isnan() & want.isnan())
        assert same.all(), (way, profile)
        assert not backend.range_exceeded()
    backend, gradient = TritonBackend(bounded="mfma"), held.clone()
    a.scales[1, 1] = matrix_cores.MAX_SCALE + 1
    backend.add_product(a, b, gradient, profile="bounded")
    assert backend.range_exceeded()
    stored.clear()
    with backend.widened():
        backend.add_product(a, b, gradient, profile="bounded")
    assert not stored
    assert not backend.range_exceeded()


def test_training_adds_by_the_kernel_and_changes_no_bit(monkeypatch):
    stored = []
    monkeypatch.setattr(
        bounded, "multiply_onto", lambda a, b, onto: (stored.append(onto), multiply_onto(a, b, onto))
    )
    # Undoing the prescale fills a product's mantissa, so that a sum is rounded.
    recipe = recipe_from_table({"gemm": "bounded", "keep_bf16": [], "all": {"prescale": True}})
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32, bias=False))
        context = convert(model, recipe, backend=TritonBackend(bounded="mfma"), seed=1).context
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(1))
        bytes_of = []
        for context.step, batch in enumerate(data):
            for number, x in enumerate(batch):
                context.token_origin, context.global_tokens = 64 * number, 192
                loss = (model(x) - x).square().mean()
                context.sole_uses = sole_uses(loss) if in_place and number else {}
                loss.backward()
            bytes_of += [p.grad.numpy().tobytes() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            advance(model)
        assert len(stored) == 2 * 2 * 2
        found.append([*bytes_of, *(p.detach().numpy().tobytes() for p in model.parameters())])
    assert found[0] == found[1]


def test_an_array_on_another_device_is_refused():
    rng = np.random.default_rng(1)
    a, b = on("cpu", drawn(rng, 7, 64)), on("cpu", drawn(rng, 5, 64))
    with pytest.raises(
        UnsupportedError, match=r"got an array on meta for operands on cpu; move it: onto.to\("
    ):
        TritonBackend(bounded="mfma").add_product(a, b, torch.empty(7, 5, device="meta"), profile="bounded")


@pytest.mark.clause("gemm.bounded")
def test_the_backend_takes_it_and_notices_scales_beyond_its_range():
    backend = TritonBackend(bounded="mfma")
    assert backend.capabilities.bounded_class == "fp32"
    assert backend.capabilities.bounded_max_scale == matrix_cores.MAX_SCALE
    assert "bounded GEMMs by mfma" in backend.details()
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 4, 64, 100, 110), drawn(rng, 5, 64, 100, 110)
    b.scales[0, 0] = 255
    left, right = on("cpu", a), on("cpu", b)
    plain = bits(backend.scaled_gemm(left, right, profile="bounded"))
    assert (plain == bits(multiply(left, right, "float32"))).all()
    assert not backend.range_exceeded()
    # Codes are read as they are, so there is nothing to prepare.
    assert backend.prepare(right, profile="bounded") is right
    right.scales[1, 1] = matrix_cores.MAX_SCALE + 1
    backend.scaled_gemm(left, right, profile="bounded")
    assert backend.range_exceeded()


@pytest.mark.clause("conformance.capabilities")
def test_conformance_of_the_gemm():
    backend = TritonBackend(bounded="mfma")
    # `ordered` does not depend on it.
    backend.capabilities = replace(backend.capabilities, gemms=every_gemm({GemmProfile.BOUNDED}, {MXFP4}))
    report = check(backend, ops=["gemm"], level="quick", shrink=False, formats=["mxfp4"])
    assert report.ok, "\n\n".join(str(f) for f in report.failures)
    assert report.total("passed") > 10


@pytest.fixture
def folding_gfx950(monkeypatch):
    """A backend that takes its device for a gfx950, and every product for one that gains by folding."""
    monkeypatch.setattr(bounded, "is_gfx950", lambda device: True)
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 1)
    return TritonBackend(bounded="mfma")


@pytest.mark.clause("gemm.ordered", "conformance.dual")
def test_ordered_products_are_folded_by_block(folding_gfx950, monkeypatch):
    launched = []
    monkeypatch.setattr(
        "mxref_triton.products.ordered.launch", lambda kernel, *a, **k: launched.append(kernel.__name__)
    )
    rng = np.random.default_rng(0)
    a, b = (on("cpu", drawn(rng, rows, 128)) for rows in (70, 33))
    made = folding_gfx950.prepare(b, profile="ordered")
    assert [tuple(t.shape) for t in made.layout] == [(4, 33, 32), (33, 1), (1 + 33 + MISFIT_PROGRAMS,)]
    for right in (b, made):
        launched.clear()
        folding_gfx950.scaled_gemm(a, right, profile="ordered")
        assert launched == ["_ordered_by_block", "_ordered_misfits"]
    # What `bounded` reads is codes, on the same device.
    assert folding_gfx950.prepare(b, profile="bounded") is b
    monkeypatch.setattr(bounded, "LEAST_FOLDED_WORK", 70 * 33 * 128 + 1)
    launched.clear()
    folding_gfx950.scaled_gemm(a, made, profile="ordered")
    assert launched == ["_ordered"]


@pytest.mark.parametrize(("asked", "least"), [("1", 1), ("0", 1 << 30)])
def test_kernels_of_products_can_be_asked_for(asked, least):
    """Folding of every product, and another way for `bounded`."""
    said = "import mxref_triton as t; print(t.products.bounded.LEAST_FOLDED_WORK, t.backend.backend().way)"
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=True,
        env=os.environ | {"MXREF_TRITON_FOLD": asked, "MXREF_TRITON_BOUNDED": "ordered", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.split() == [str(least), "ordered"]


@pytest.mark.clause("gemm.bounded", "gemm.nan")
def test_bounded_by_the_kernels_of_ordered():
    backend = TritonBackend(bounded="ordered")
    assert "bounded GEMMs by ordered" in backend.details()
    assert (backend.capabilities.bounded_class, backend.capabilities.bounded_max_scale) == ("fp32", 254)
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 4, 64, 100, 110), drawn(rng, 5, 64, 100, 110)
    b.scales[0, 0], b.scales[1, 1] = 255, 254
    left, right = on("cpu", a), on("cpu", b)
    want = bits(scaled_gemm(a, b, profile="ordered"))
    for made in (right, backend.prepare(right, profile="bounded")):
        assert (bits(backend.scaled_gemm(left, made, profile="bounded")) == want).all()
    assert not backend.range_exceeded()


@pytest.mark.clause("gemm.ordered", "gemm.nan", "gemm.prescale", "conformance.dual")
@pytest.mark.parametrize("prepared", [False, True])
def test_folded_products_are_the_references(prepared, folding_gfx950):
    rng = np.random.default_rng(1)
    a, b = replace(drawn(rng, 70, 256, nan=0.01), prescale=True), drawn(rng, 90, 256)
    b.scales[3, 1], b.codes[3, 16:32] = 60, 0x11  # too small for E4M3 beside the rest of its row
    right = folding_gfx950.prepare(on("cpu", b), profile="ordered") if prepared else on("cpu", b)
    got = folding_gfx950.scaled_gemm(on("cpu", a), right, profile="ordered")
    assert (bits(got) == bits(scaled_gemm(a, b, profile="ordered"))).all()


@pytest.mark.clause("conformance.capabilities")
def test_conformance_of_folded_products(folding_gfx950):
    folding_gfx950.capabilities = replace(
        folding_gfx950.capabilities, gemms=every_gemm({GemmProfile.ORDERED}, {MXFP4})
    )
    # The layouts and sums of fused products are asked for above.
    clauses = [clause for clause in CLAUSES if clause.startswith("gemm.")]
    report = check(folding_gfx950, clauses=clauses, level="quick", shrink=False, formats=["mxfp4"])
    assert report.ok, "\n\n".join(str(f) for f in report.failures)
    assert report.total("passed") > 10


def test_the_largest_tile_that_gives_every_compute_unit_work_is_taken(monkeypatch):
    monkeypatch.setattr(matrix_cores, "INTERPRETED", False)
    assert matrix_cores.tile_for(4096, 4096) == matrix_cores.tile_for(2048, 4096) == TILES[0]
    assert matrix_cores.tile_for(2048, 3840) == matrix_cores.tile_for(2048, 2048) == TILES[1]
    assert matrix_cores.tile_for(2048, 1920) == matrix_cores.tile_for(1, 1) == TILES[2]
    for tile, m, n in ((TILES[0], 2048, 4096), (TILES[1], 2048, 2048)):
        assert m * n == tile.rows * tile.columns * COMPUTE_UNITS


def test_tuning_times_every_tile_once_per_shape(monkeypatch):
    monkeypatch.setattr(matrix_cores, "TUNES", True)
    monkeypatch.setattr(matrix_cores, "_fastest", {})
    timed = []

    def bench(run):
        timed.append(bits(run()))
        return {0: 3.0, 1: 1.0, 2: 2.0}[(len(timed) - 1) % 3]

    monkeypatch.setattr("triton.testing.do_bench", bench)
    rng = np.random.default_rng(0)
    a, b = on("cpu", drawn(rng, 40, 64)), on("cpu", drawn(rng, 40, 64))
    got = bits(multiply(a, b, "float32"))
    multiply(a, b, "float32")
    assert len(timed) == 3
    assert all((t == got).all() for t in timed)
    assert matrix_cores._fastest == {(40, 40, 64, "float32", "mxfp4", "mxfp4"): TILES[1]}
    multiply(a, b, "bfloat16")
    assert len(timed) == 6


def test_conversions_are_portable_here():
    assert TritonBackend().native == TritonBackend(conversions="portable").native == frozenset()
    assert "portable conversions" in TritonBackend().details()
    with pytest.raises(BackendError, match="conversions = 'native' needs a gfx950 GPU, and this is none"):
        TritonBackend(conversions="native")
    with pytest.raises(RecipeError, match="conversions = 'hip' is not one of auto, native, portable"):
        TritonBackend(conversions="hip")


def test_stochastic_conversions_need_a_gfx950():
    from mxref_triton import gfx950_sr

    with pytest.raises(BackendError, match="'triton-native-sr' needs a gfx950 GPU"):
        gfx950_sr.backend()
    declared = gfx950_sr.NativeStochasticBackend().capabilities
    assert declared.native_sr
    assert not declared.prescale
    assert declared.max_sr_bits == 16


@pytest.mark.parametrize(
    ("wrong", "asked", "elements", "said"),
    [
        ((), "auto", ("E2M1", "E2M3", "E3M2"), "gave the reference's bits at start-up"),
        ((), "native", ("E2M1", "E2M3", "E3M2"), "gave the reference's bits at start-up"),
        (("E2M3",), "auto", ("E2M1", "E3M2"), "at start-up, to E2M1, E3M2 only: 0x3f800000"),
        (("E2M1", "E2M3", "E3M2"), "auto", (), "portable conversions: those of this gfx950 are not"),
    ],
)
def test_a_gfx950_answers_for_its_conversions_first(wrong, asked, elements, said, monkeypatch):
    from mxref_triton.quantizer import native

    def first_difference(convert, made):
        return f"0x3f800000 / 2^0 became code 1 of {made[0].name}, not 2" if made[0].name in wrong else None

    monkeypatch.setattr(native, "INTERPRETED", False)
    monkeypatch.setattr(native, "is_gfx950", lambda device: True)
    monkeypatch.setattr(native, "first_difference", first_difference)
    used, words = native.native_conversions(asked)
    assert {(element.name, rounding.value) for element, rounding in used} == {(e, "rne") for e in elements}
    assert said in words
    assert native.native_conversions("portable") == (frozenset(), "portable conversions")
    if wrong:
        assert all(f"of {name}, not 2" in words for name in wrong)
        with pytest.raises(BackendError, match="differ from the reference: 0x3f800000"):
            native.native_conversions("native")
