"""Products of formats other than MXFP4 in Triton's interpreter: `ordered` bit for bit, `bounded` within its class."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted.gemm_operands import bits, on
from mxref import GemmProfile, MXArray
from mxref.backend import within_range
from mxref.formats import (
    CANONICAL_NAN,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
)
from mxref.gemm import bounded_tolerance, scaled_gemm
from mxref.layouts.packed import pack, unpack
from mxref_triton import TritonBackend
from mxref_triton.products import by_value
from mxref_triton.products.fold import fold
from mxref_triton.products.ordered import ordered, sums_in_fp8

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow|divide by zero) encountered:RuntimeWarning"
)
PAIRS = [*itertools.product((MXFP4, MXFP8_E4M3, MXFP8_E5M2), repeat=2)][1:]
SHORT_PAIRS = [*itertools.product((MXFP4, MXFP4_E1M2, MXFP6_E2M3, MXFP6_E3M2), repeat=2)][1:]
OTHER_PAIRS = [
    (MXFP6_E3M2, MXFP8_E4M3), (MXFP8_E5M2, MXFP6_E2M3), (MXINT8, MXINT8), (MXINT8, MXFP8_E5M2), (MXFP4, MXINT8),
    (NVFP4, NVFP4),
]  # fmt: skip


def declared(pairs):
    return [pair for pair in pairs if (GemmProfile.BOUNDED, *pair) in TritonBackend.capabilities.gemms]


def drawn(made, rows, k, low, high, seed, special=False):
    """An operand of drawn codes, finite ones unless `special`, under scale codes from `low` to `high`.

    Scales with a mantissa have all their codes, and a scale of the tensor above them.
    """
    rng, element = np.random.default_rng(seed), made.element
    codes = rng.integers(0, element.max_code + 1, (rows, k)) | element.sign * rng.integers(0, 2, (rows, k))
    if special:
        codes = rng.integers(0, 1 << element.bits, (rows, k))
    codes = pack(codes.astype(np.uint8), element)
    if not made.scale.powers:
        low, high = 0, made.scale.max_code
    scales = rng.integers(low, high + 1, (rows, k // made.k)).astype(np.uint8)
    tensor = np.float32([0.3 + seed]) if made.tensor_scale else None
    return MXArray(codes, scales, (rows, k), 1, format=made, tensor_scale=tensor)


def values(q):
    """Its values in float64."""
    grid, scales = np.array(q.format.element.values), np.array(q.format.scale.values)[q.scales]
    tensor = 1.0 if q.tensor_scale is None else float(q.tensor_scale[0])
    return grid[unpack(q.codes, q.format.element)] * np.repeat(scales, q.format.k, axis=1) * tensor


def multiplied(backend, a, b, out="float32", prepared=False):
    """The product by a backend, done over if it left its range, and whether it did."""
    left, right = on("cpu", a), on("cpu", b)
    if prepared:
        right = backend.prepare(right, profile="bounded")
    runs = []

    def work():
        runs.append(None)
        return backend.scaled_gemm(left, right, profile="bounded", out_dtype=out)

    return backend.to_numpy(within_range(backend, work)), len(runs) > 1


def assert_within_class(got, a, b, out):
    total = values(a) @ values(b).T / np.prod([q.format.element.prescale for q in (a, b) if q.prescale])
    tolerance = bounded_tolerance(a, b, "fp32", out)
    wide = got.astype(np.float64)
    near = np.abs(wide - total) <= tolerance
    assert (near | ~np.isfinite(tolerance) | np.isnan(wide) & np.isnan(total)).all()


def ids(pair):
    return "-".join(map(str, pair))


@pytest.mark.clause("gemm.bounded", "gemm.prescale", "gemm.output", "conformance.dual")
@pytest.mark.parametrize(
    ("pair", "way"),
    [
        *itertools.product(PAIRS, ("bf16", "mfma", "ordered")),
        *itertools.product([*SHORT_PAIRS, *declared(OTHER_PAIRS)], ("bf16", "mfma", "ordered")),
    ],
    ids=lambda value: value if isinstance(value, str) else ids(value),
)
def test_products_are_of_their_class(pair, way):
    backend = TritonBackend(bounded=way)
    for low, high, out, prescale in (
        (100, 150, "float32", True),
        (0, 254, "float32", False),
        (60, 70, "bfloat16", False),
    ):
        a = replace(drawn(pair[0], 17, 96, low, high, 1), prescale=prescale)
        b = drawn(pair[1], 40, 96, low, high, 2)
        a.scales[3, 1], b.scales[5, 2] = 255, 255
        if not pair[0].scale.powers:
            a = replace(a, prescale=False)
        got, widened = multiplied(backend, a, b, out, prepared=low == 100)
        assert_within_class(got, a, b, out)
        assert np.isnan(got[3].astype(np.float32)).all()
        # Bfloat16 holds the values of E1M2 under every scale, all of NVFP4, and nearly all of MXINT8.
        if not {MXFP4_E1M2, MXINT8, NVFP4} & {*pair}:
            assert widened == (high == 254 and way != "ordered")


@pytest.mark.clause("gemm.ordered", "gemm.prescale", "gemm.nan", "gemm.output")
@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=ids)
def test_ordered_has_the_bits_of_the_reference(pair):
    """From packed codes; and folded, by row and by block, where FP8 sums a block without loss."""
    for low, high, prescale in ((100, 150, True), (0, 254, False)):
        a = replace(drawn(pair[0], 17, 96, low, high, 1), prescale=prescale)
        b = drawn(pair[1], 40, 96, low, high, 2)
        a.scales[3, 1], b.scales[5, 2] = 255, 255
        b.codes[7] = 0xFF  # the largest, all of one sign
        left, right = on("cpu", a), on("cpu", b)
        ways = [None]
        if sums_in_fp8(left, right):
            ways += [(fold(left, by_block=blocks), fold(right, by_block=blocks)) for blocks in (False, True)]
        assert (len(ways) == 3) == (pair[0].element.bits == pair[1].element.bits == 4)
        for out, folded in itertools.product(("float32", "bfloat16"), ways):
            want = scaled_gemm(a, b, profile="ordered", out_dtype=out)
            assert np.array_equal(bits(ordered(left, right, out, folded)), bits(want))


@pytest.mark.clause("gemm.nan")
@pytest.mark.parametrize("way", ["bf16", "mfma", "ordered"])
@pytest.mark.parametrize(
    "pair", [(MXFP8_E5M2, MXFP8_E5M2), (MXFP8_E4M3, MXFP8_E5M2), (MXFP4, MXFP8_E5M2)], ids=str
)
def test_nan_and_inf_codes_give_what_their_values_give(pair, way):
    backend = TritonBackend(bounded=way)
    a, b = (drawn(made, rows, 32, 120, 130, rows) for made, rows in zip(pair, (24, 40), strict=True))
    for q in (a, b):
        largest, sign = q.format.element.max_code, q.format.element.sign
        if q.format is not MXFP4:
            beyond = np.arange(largest + 1, sign)
            q.codes[np.arange(8), 3] = np.resize(np.concatenate([beyond, beyond | sign]), 8)
    got, _ = multiplied(backend, a, b)
    want = scaled_gemm(a, b, profile="exact")
    finite = np.isfinite(want)
    assert 0 < finite.sum() < want.size
    assert np.isinf(want).any()
    assert np.array_equal(got[~finite].view(np.uint32), want[~finite].view(np.uint32))
    assert (got[np.isnan(want)].view(np.uint32) == CANONICAL_NAN).all()


@pytest.mark.clause("gemm.bounded")
def test_what_bfloat16_does_not_hold_is_seen_and_nothing_else():
    """By scale code: the largest element overflows from the first limit on, the smallest is lost below the second."""
    backend = TritonBackend(bounded="bf16")
    one = on(
        "cpu",
        MXArray(
            np.zeros((16, 32), np.uint8), np.full((16, 1), 127, np.uint8), (16, 32), 1, format=MXFP8_E4M3
        ),
    )
    for made, largest, smallest in ((MXFP8_E4M3, 246, 3), (MXFP8_E5M2, 239, 10)):
        for code, scale, wanted in (
            (made.element.max_code, largest, False), (made.element.max_code, largest + 1, True),
            (1, smallest, False), (1, smallest - 1, True), (0, 0, False), (0, 254, False), (0x80, 255, False),
            (made.element.max_code + 1, 127, False),
        ):  # fmt: skip
            codes = np.zeros((16, 32), np.uint8)
            codes[7, 9] = code
            q = on("cpu", MXArray(codes, np.full((16, 1), scale, np.uint8), (16, 32), 1, format=made))
            for left, right in ((q, one), (one, backend.prepare(q, profile="bounded"))):
                backend.scaled_gemm(left, right, profile="bounded")
                assert backend.range_exceeded() == wanted, (made, code, scale)


@pytest.mark.clause("conformance.dual")
def test_a_prepared_weight_is_read_in_place_of_its_codes(monkeypatch):
    backend = TritonBackend(bounded="bf16")
    a, b = (on("cpu", drawn(MXFP8_E4M3, rows, 64, 120, 130, rows)) for rows in (16, 24))
    want = backend.scaled_gemm(a, b, profile="bounded")
    made = backend.prepare(b, profile="bounded")
    decoded = []
    kept = by_value.dequantize
    monkeypatch.setattr(
        by_value, "dequantize", lambda q, *rest, **how: (decoded.append(q.shape), kept(q, *rest, **how))[1]
    )
    assert np.array_equal(bits(backend.scaled_gemm(a, made, profile="bounded")), bits(want))
    assert decoded == [(16, 64)]


@pytest.mark.clause("conformance.dual", "gemm.tensor_scale")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("way", ["bf16", "mfma", "ordered"])
@pytest.mark.parametrize(
    "pair",
    declared(
        [(MXFP8_E5M2, MXFP8_E4M3), (MXFP6_E2M3, MXFP4), (NVFP4, NVFP4), (MXFP4, MXFP4), (MXINT8, MXFP4)]
    ),
    ids=ids,
)
def test_products_are_added_where_they_are_stored(pair, way, prepared):
    backend = TritonBackend(bounded=way)
    a, b = (
        on("cpu", drawn(made, rows, 64, 120, 130, rows)) for made, rows in zip(pair, (16, 24), strict=True)
    )
    if prepared:
        b = backend.prepare(b, profile="bounded")
    product = backend.scaled_gemm(a, b, profile="bounded")
    onto = torch.linspace(-1, 1, 16 * 24).reshape(16, 24) * product.abs().max()
    want = onto + product
    backend.add_product(a, b, onto, profile="bounded")
    assert torch.equal(onto, want)


@pytest.mark.clause("gemm.tensor_scale", "gemm.bounded")
@pytest.mark.skipif(not declared([(NVFP4, NVFP4)]), reason="not declared")
def test_the_scales_of_tensors_are_applied_to_the_sum_and_that_of_a_first():
    """One alone would overflow the sum, the other would make it vanish."""
    backend = TritonBackend(bounded="bf16")
    a, b = (drawn(NVFP4, rows, 64, 0, 0, rows) for rows in (16, 24))
    for t_a, t_b in ((2.0**100, 2.0**-100), (2.0**-100, 2.0**100), (2.0**60, 2.0**60), (2.0**-140, 2.0**-9)):
        left, right = (replace(q, tensor_scale=np.float32([t])) for q, t in ((a, t_a), (b, t_b)))
        got, widened = multiplied(backend, left, right)
        assert not widened
        assert_within_class(got, left, right, "float32")
    assert (got != 0).any()
