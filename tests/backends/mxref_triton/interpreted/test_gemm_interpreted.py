"""The GEMM kernels in Triton's interpreter: `ordered` against the reference, `bounded` within its class and range."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted.gemm_operands import bits, drawn, extreme, hostile, on
from mxref import GemmProfile, MXArray
from mxref.conformance import check
from mxref.errors import RecipeError
from mxref.formats import E2M1, MXFP4, MXFP4_E1M2, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3
from mxref.gemm import bounded_tolerance, scaled_gemm
from mxref_triton import TritonBackend
from mxref_triton.products import bounded, by_value
from mxref_triton.products import fold as folding
from mxref_triton.products.fold import Fold, fold
from mxref_triton.products.ordered import ordered

LOWEST_TOP, HIGHEST_TOP = Fold.of(E2M1).lowest, Fold.of(E2M1).highest
DEVICE = "cpu"

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow) encountered:RuntimeWarning"
)

OUTS = ("float32", "bfloat16")


# ---- ordered ----


PACKED, BY_ROW, BY_BLOCK = "packed", "by_row", "by_block"


def folded_pair(a: MXArray, b: MXArray, way: str) -> tuple[folding.Folded, folding.Folded] | None:
    """What `ordered` takes besides its operands: nothing, or both of them folded for Hopper or for gfx950."""
    if way == PACKED:
        return None
    return fold(a, by_block=way == BY_BLOCK), fold(b, by_block=way == BY_BLOCK)


def check_ordered(a: MXArray, b: MXArray, way: str) -> None:
    for out in OUTS:
        want = scaled_gemm(a, b, profile="ordered", out_dtype=out)
        left, right = on(DEVICE, a), on(DEVICE, b)
        got = ordered(left, right, out, folded_pair(left, right, way))
        differ = bits(got) != bits(want)
        assert not differ.any(), f"{out}: {differ.sum()} differ, the first at {np.argwhere(differ)[0]}"


@pytest.mark.clause("gemm.ordered", "gemm.block_dot", "gemm.nan", "gemm.output", "gemm.prescale")
@pytest.mark.parametrize("way", [BY_ROW, BY_BLOCK])
@pytest.mark.parametrize("prescaled", [0, 1, 2])
def test_hostile_rows_are_the_references(prescaled, way):
    rng = np.random.default_rng(prescaled)
    a, b = (replace(hostile(rng, rows, 6), prescale=prescaled > i) for i, rows in enumerate((100, 90)))
    check_ordered(a, b, way)


@pytest.mark.clause("gemm.ordered", "gemm.operands")
@pytest.mark.parametrize("way", [BY_ROW, BY_BLOCK])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (33, 17, 96), (130, 65, 64), (3, 200, 480)])
def test_shapes(m, n, k, way):
    rng = np.random.default_rng(m)
    check_ordered(drawn(rng, m, k, nan=0.01), drawn(rng, n, k, 120, 134), way)


@pytest.mark.clause("gemm.ordered", "gemm.nan")
@pytest.mark.parametrize("way", [PACKED, BY_ROW, BY_BLOCK])
def test_scales_at_every_border(way):
    rng = np.random.default_rng(0)
    check_ordered(extreme(rng, 80, 256), extreme(rng, 60, 256), way)


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize(
    ("low", "high"),
    [(LOWEST_TOP - 14, LOWEST_TOP), (LOWEST_TOP, 93), (161, HIGHEST_TOP), (240, 254)],
)
@pytest.mark.parametrize("way", [BY_ROW, BY_BLOCK])
def test_folding_at_its_limits_moves_no_rounding(low, high, way):
    rng = np.random.default_rng(low)
    a, b = (drawn(rng, rows, 512, low, high) for rows in (20, 24))
    check_ordered(a, b, way)


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize("by_block", [False, True])
def test_only_rows_that_do_not_fit_are_done_twice(by_block):
    """Elsewhere the answer of the folded kernel stays: here it is made to be zero."""
    rng = np.random.default_rng(0)
    a, b = (on(DEVICE, drawn(rng, rows, 64, 120, 130)) for rows in (200, 150))
    left, right = (fold(q, by_block=by_block) for q in (a, b))
    left.values.view(torch.uint8).zero_()
    left.misfits[:4] = torch.tensor([3, 170, 2, 64])
    right.misfits[:67] = torch.tensor([66, *range(140, 74, -1)])
    got = bits(ordered(a, b, "float32", (left, right)))
    want = bits(ordered(a, b, "float32"))
    again = np.zeros((200, 150), bool)
    again[[170, 2, 64]] = True
    again[:, 75:141] = True
    assert (got[~again] == 0).all()
    assert (got[again] == want[again]).all()
    assert (want[again] != 0).mean() > 0.9


@pytest.mark.clause("gemm.operands", "quantize.strides")
def test_operands_that_are_not_contiguous_or_not_aligned():
    rng = np.random.default_rng(0)
    a, b = (drawn(rng, rows, 128) for rows in (7, 9))
    want = bits(scaled_gemm(a, b, profile="ordered"))
    wide = [torch.from_numpy(np.repeat(np.repeat(t, 2, 0), 2, 1)) for t in (a.codes, a.scales)]
    strided = replace(a, codes=wide[0][::2, ::2], scales=wide[1][::2, ::2])
    assert not strided.codes.is_contiguous()
    memory = torch.empty(9 * 64 + 3, dtype=torch.uint8)
    shifted = memory[3:].view(9, 64)
    shifted.copy_(torch.from_numpy(b.codes))
    crooked = replace(on(DEVICE, b), codes=shifted)
    assert (bits(ordered(strided, crooked, "float32")) == want).all()
    columns = [
        replace(on(DEVICE, q), **{part: torch.from_numpy(np.asfortranarray(getattr(q, part)))})
        for part in ("codes", "scales")
        for q in (a, b)
    ]
    for left, right in (columns[:2], columns[2:]):
        assert (bits(ordered(left, right, "float32")) == want).all()
        profiles = {
            profile: TritonBackend().scaled_gemm(left, right, profile=profile)
            for profile in ("ordered", "bounded")
        }
        assert (bits(profiles["ordered"]) == want).all()
        plain = TritonBackend().scaled_gemm(on(DEVICE, a), on(DEVICE, b), profile="bounded")
        assert (bits(profiles["bounded"]) == bits(plain)).all()
    for way in (BY_ROW, BY_BLOCK):
        got = ordered(strided, crooked, "float32", folded_pair(strided, crooked, way))
        assert (bits(got) == want).all()


@pytest.mark.clause("gemm.operands")
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("profile", ["ordered", "bounded"])
def test_empty(shape, profile):
    backend = TritonBackend()
    a, b = (on(DEVICE, drawn(np.random.default_rng(0), rows, 64)) for rows in shape)
    assert tuple(backend.scaled_gemm(a, b, profile=profile).shape) == shape
    k0 = on(DEVICE, MXArray(np.zeros((2, 0), np.uint8), np.zeros((2, 0), np.uint8), (2, 0), 1))
    assert bits(backend.scaled_gemm(k0, k0, profile=profile)).tolist() == [[0, 0]] * 2


@pytest.mark.clause("gemm.operands")
def test_no_descriptor_is_made_of_an_axis_of_length_0(monkeypatch):
    backend = TritonBackend(bounded="bf16")
    monkeypatch.setattr(by_value, "is_hopper", lambda device: True)
    monkeypatch.setattr(by_value, "_programs", lambda device: 1)
    k0 = MXArray(np.zeros((2, 0), np.uint8), np.zeros((2, 0), np.uint8), (2, 0), 1, format=MXFP8_E4M3)
    assert (
        bits(backend.scaled_gemm(on(DEVICE, k0), on(DEVICE, k0), profile="bounded")).tolist() == [[0, 0]] * 2
    )


# ---- bounded, and what leaves its range ----


@pytest.mark.clause("gemm.bounded", "gemm.prescale", "gemm.nan")
@pytest.mark.parametrize("prescaled", [0, 1, 2])
@pytest.mark.parametrize("out", OUTS)
def test_bounded_is_within_its_class(out, prescaled):
    backend = TritonBackend(bounded="bf16")
    rng = np.random.default_rng(prescaled)
    a, b = (replace(drawn(rng, rows, 512, 0, 160), prescale=prescaled > i) for i, rows in enumerate((19, 22)))
    exact = scaled_gemm(a, b, profile="exact").astype(np.float64)
    got = backend.to_numpy(
        backend.scaled_gemm(on(DEVICE, a), on(DEVICE, b), profile="bounded", out_dtype=out)
    )
    assert (np.abs(got.astype(np.float64) - exact) <= bounded_tolerance(a, b, "fp32", out)).all()
    assert not backend.range_exceeded()
    a.scales[3, 2] = 255
    spoiled = backend.scaled_gemm(on(DEVICE, a), on(DEVICE, b), profile="bounded", out_dtype=out)
    assert torch.isnan(spoiled).sum(dim=1).tolist() == [22 if row == 3 else 0 for row in range(19)]
    assert not backend.range_exceeded()


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("prepared", [False, True])
def test_an_operand_beyond_the_range_is_noticed_once_and_widened_has_no_range(prepared):
    backend = TritonBackend(bounded="bf16")
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 4, 64, 100, 110), drawn(rng, 5, 64, 100, 110)
    b.scales[2, 1] = 253
    b.codes[2, 16:] = 0x77
    left, right = on(DEVICE, a), on(DEVICE, b)
    if prepared:
        right = backend.prepare(right, profile="bounded")
        assert not backend.range_exceeded()  # nothing was multiplied yet
    for _ in range(2):
        backend.scaled_gemm(left, right, profile="bounded")
        assert backend.range_exceeded()
        assert not backend.range_exceeded()
    with backend.widened():
        got = backend.scaled_gemm(left, right, profile="bounded")
        with backend.widened():
            pass
        again = backend.scaled_gemm(left, right, profile="bounded")
    want = bits(scaled_gemm(a, b, profile="ordered"))
    assert (bits(got) == want).all()
    assert (bits(again) == want).all()
    assert not backend.range_exceeded()


@pytest.mark.clause("gemm.bounded")
def test_a_left_operand_that_was_prepared_beyond_the_range_is_noticed_in_each_product():
    backend = TritonBackend(bounded="bf16")
    rng = np.random.default_rng(0)
    far, near = (on(DEVICE, drawn(rng, 4, 64, scale, scale)) for scale in (253, 100))
    left = backend.prepare(far, profile="bounded")
    assert not backend.range_exceeded()
    for right in (near, backend.prepare(near, profile="bounded")):
        backend.scaled_gemm(left, right, profile="bounded")
        assert backend.range_exceeded()
        assert not backend.range_exceeded()


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("profile", [GemmProfile.ORDERED, GemmProfile.BOUNDED])
def test_a_prepared_operand_changes_no_bit(profile, monkeypatch):
    backend = TritonBackend(bounded="bf16")
    rng = np.random.default_rng(0)
    a, b = (on(DEVICE, drawn(rng, rows, 128)) for rows in (30, 20))
    plain = bits(backend.scaled_gemm(a, b, profile=profile))
    made = backend.prepare(b, profile=profile)
    assert (bits(backend.scaled_gemm(a, made, profile=profile)) == plain).all()
    other = backend.prepare(made, profile=GemmProfile.ORDERED)
    assert (bits(backend.scaled_gemm(a, other, profile=profile)) == plain).all()
    left = backend.prepare(a, profile=profile)
    assert (bits(backend.scaled_gemm(left, b, profile=profile)) == plain).all()
    if profile is GemmProfile.BOUNDED:  # decoded once, for all products that share it
        monkeypatch.setattr(by_value, "_decoded", None)
    assert (bits(backend.scaled_gemm(left, made, profile=profile)) == plain).all()


@pytest.mark.clause("gemm.bounded")
def test_a_left_operand_is_folded_into_e5m2_if_that_holds_it_and_it_was_not_prepared(monkeypatch):
    """On a Hopper, as far as the choice goes: the folded product itself is cuBLAS's."""
    backend = TritonBackend(bounded="fp8")
    monkeypatch.setattr(bounded, "is_hopper", lambda device: True)
    monkeypatch.setattr(bounded, "_fp8", lambda a, b, left, right, out: left.values.dtype)
    monkeypatch.setattr(bounded, "_by_value", lambda *_: "values")

    def zeros(width):
        return torch.zeros((16, width), dtype=torch.uint8)

    for left, right, prepared, want in (
        (MXFP4, MXFP6_E2M3, False, torch.float8_e5m2), (MXFP6_E3M2, MXFP4, False, torch.float8_e5m2),
        (MXFP6_E2M3, MXFP4, False, torch.float8_e4m3fn), (MXFP6_E3M2, MXFP4_E1M2, True, torch.float8_e4m3fn),
        (MXFP4_E1M2, MXFP8_E4M3, False, "values"),
    ):  # fmt: skip
        a, b = (
            MXArray(zeros(made.code_bytes(512)), zeros(16), (16, 512), 1, format=made)
            for made in (left, right)
        )
        if prepared:
            a = backend.prepare(a, profile="bounded")
        assert backend.scaled_gemm(a, b, profile="bounded") == want


@pytest.mark.clause("conformance.capabilities")
def test_ways_of_bounded():
    assert TritonBackend().capabilities.bounded_class == "fp32"  # no Hopper here
    assert TritonBackend(bounded="fp8").capabilities.bounded_class == "fp8-hopper"
    with pytest.raises(RecipeError, match="bounded = 'int8' is not one of auto, fp8, bf16"):
        TritonBackend(bounded="int8")


@pytest.mark.clause("conformance.capabilities", "conformance.dual")
def test_conformance_of_the_gemm():
    """In the formats whose dots are long or short; test_formats_interpreted.py multiplies every pair."""
    report = check(
        TritonBackend(), ops=["gemm"], level="quick", shrink=False, formats=["mxfp4", "mxfp8_e5m2"]
    )
    assert report.ok, "\n\n".join(str(f) for f in report.failures)
    assert report.total("passed") > 100
