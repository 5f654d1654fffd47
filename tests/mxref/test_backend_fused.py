"""Operations of a backend that have a default: both orientations, prepared operands, sums in place."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from protocol_cases import X, narrow

from mxref import (
    GemmProfile,
    OperandSpec,
    PreparedArray,
    Stream,
    UnsupportedError,
    get_backend,
    quantize,
)
from mxref.errors import DtypeError, NonfiniteError, ShapeError
from mxref.placement import Placement
from mxref.reference import ReferenceBackend


@pytest.mark.clause("conformance.dual")
def test_quantize_dual_gives_both_orientations():
    reference = get_backend("reference")
    specs = (OperandSpec(rounding="sr"), OperandSpec(hadamard=32))
    placements = tuple(
        Placement(stream, origin=(64, 0), global_shape=(128, 64)) for stream in (Stream(1), None)
    )
    row, column = reference.quantize_dual(X, specs, placements=placements)
    assert row == reference.quantize(X, specs[0], placement=placements[0])
    assert column == reference.quantize(X, specs[1], axis=0, placement=placements[1])


@pytest.mark.clause("conformance.dual", "quantize.padding")
def test_quantize_dual_pads_each_orientation_on_its_own():
    reference = get_backend("reference")
    x, specs = X[:41, :50], (OperandSpec(hadamard=64), OperandSpec())
    row, column = reference.quantize_dual(x, specs, pads=(True, True))
    assert (row.length, column.length) == (64, 64)
    assert row == reference.quantize(x, specs[0], pad=True)
    assert column == reference.quantize(x, specs[1], axis=0, pad=True)
    for pads, axis in (((True, False), 0), ((False, True), 1)):
        with pytest.raises(ShapeError, match=f"axis {axis} has length"):
            reference.quantize_dual(x, specs, pads=pads)
    with pytest.raises(ShapeError, match=r"takes a matrix, got shape \(64,\)"):
        reference.quantize_dual(X[0], specs)
    with pytest.raises(UnsupportedError, match="hadamard_sizes"):
        narrow.quantize_dual(X, specs)


class Layered(ReferenceBackend):
    """Its GEMM reads scales from a layout, and keeps what it was given."""

    name = "layered"

    def _prepare(self, q, profile):
        return (q.scales.copy(),) if profile is GemmProfile.ORDERED else ()

    def _scaled_gemm(self, a, b, profile, out_dtype):
        self.seen = a, b
        if isinstance(b, PreparedArray):
            b = replace(b, scales=b.layout[0])
        return super()._scaled_gemm(a, b, profile, out_dtype)


@pytest.mark.clause("conformance.dual", "conformance.protocol")
def test_a_prepared_operand_is_read_by_who_prepared_it_and_by_all_others_as_codes():
    layered, reference = Layered(), get_backend("reference")
    a, b = quantize(X), quantize(X[:32], OperandSpec(prescale=True))
    prepared = layered.prepare(b, profile="ordered")
    assert isinstance(prepared, PreparedArray)
    assert prepared == b
    assert prepared.codes is b.codes
    for profile in ("ordered", "exact"):
        want = reference.scaled_gemm(a, b, profile=profile)
        np.testing.assert_array_equal(layered.scaled_gemm(a, prepared, profile=profile), want)
        assert isinstance(layered.seen[1], PreparedArray) == (profile == "ordered")
        np.testing.assert_array_equal(reference.scaled_gemm(a, prepared, profile=profile), want)
    prepared.layout[0][:] = 255  # whoever reads it now gives NaN
    assert np.isnan(layered.scaled_gemm(a, prepared)).all()
    assert not np.isnan(layered.scaled_gemm(a, prepared, profile="exact")).any()
    assert not np.isnan(reference.scaled_gemm(a, prepared)).any()
    namesake = PreparedArray.of(b, "another", "ordered", prepared.layout)
    assert not np.isnan(layered.scaled_gemm(a, namesake)).any()
    assert layered.prepare(b, profile="exact") is b
    assert reference.prepare(b) is b


@pytest.mark.clause("conformance.dual", "conformance.unsupported", evidence="known answer")
def test_prepare_refuses_what_the_gemm_would():
    with pytest.raises(UnsupportedError, match="gemms"):
        narrow.prepare(quantize(X), profile="exact")
    with pytest.raises(UnsupportedError, match="prescale"):
        narrow.prepare(quantize(X, OperandSpec(prescale=True)))
    with pytest.raises(ShapeError, match=r"two axes, got shape \(2, 32, 64\)"):
        narrow.prepare(quantize(X.reshape(2, 32, 64)))


@pytest.mark.clause("conformance.dual", evidence="known answer")
def test_a_product_is_added_in_place_and_rounded_once():
    layered = Layered()
    a, b = (
        quantize(np.ones((2, 32), np.float32)),
        quantize(np.full((3, 32), 0.5, np.float32)),
    )  # products of 16
    onto = np.array([[1.5, -16, 2.0**28 + 32], [np.nan, -np.inf, 0]], np.float32)
    for right in (b, layered.prepare(b)):
        held = onto.copy()
        assert layered.add_product(a, right, held) is None
        # 2^28 + 48 is a tie of float32, which has units of 32 there.
        np.testing.assert_array_equal(held, np.float32([[17.5, 0, 2**28 + 64], [np.nan, -np.inf, 16]]))
        assert isinstance(layered.seen[1], PreparedArray) == (right is not b)
    foreign = PreparedArray.of(b, "another", "ordered", (b.codes,))
    layered.add_product(a, foreign, onto, profile="exact")
    assert not isinstance(layered.seen[1], PreparedArray)
    assert onto[0, 0] == 17.5


@pytest.mark.clause("conformance.dual", "conformance.unsupported", evidence="known answer")
def test_what_cannot_be_added_to_is_refused_and_left_as_it_was():
    reference, a, b = get_backend("reference"), quantize(X[:4]), quantize(X[:6])
    plain, frozen = np.ones((4, 6), np.float32), np.ones((4, 6), np.float32)
    frozen.flags.writeable = False
    for backend, onto, words in (
        (reference, [[1.0] * 6] * 4, "got list"),
        (reference, np.ones((4, 6)), "the array holds float64: cast it to float32, or add the result"),
        (reference, plain.astype(ml_dtypes.bfloat16), "holds bfloat16"),
        (reference, plain.astype(">f4"), "holds >f4"),
        (reference, np.ones((6, 4), np.float32), r"shape \(6, 4\), the product \(4, 6\)"),
        (reference, np.ones((1, 6), np.float32), r"shape \(1, 6\), the product"),
        (
            reference,
            np.ones((6, 4), np.float32).T,
            "in C order, and this one of shape .* give a contiguous copy",
        ),
        (reference, np.ones((4, 12), np.float32)[:, ::2], "in C order"),
        (reference, frozen, "read-only"),
    ):
        with pytest.raises((DtypeError, ShapeError), match=words):
            backend.add_product(a, b, onto)
        assert (np.asarray(onto, np.float32) == 1).all()
    for profile, right, error in (
        ("exact", b, UnsupportedError),
        ("ordered", quantize(X[:6], OperandSpec(prescale=True)), UnsupportedError),
        ("ordered", quantize(X[:6, :32]), ShapeError),
    ):
        with pytest.raises(error):
            narrow.add_product(a, right, plain, profile=profile)
        assert (plain == 1).all()


@pytest.mark.clause("conformance.dual", "scale.nonfinite")
def test_fused_operations_refuse_nan_where_the_policy_does():
    class Fused(ReferenceBackend):
        def _fake_quantize(self, x, plan, dtype):
            return np.zeros(x.shape, dtype)

    bad = X.copy()
    bad[3, 3] = np.nan
    spec = OperandSpec(nonfinite="raise")
    with pytest.raises(NonfiniteError, match="1 blocks"):
        Fused().fake_quantize(bad, spec)
    with pytest.raises(NonfiniteError, match="1 blocks"):
        Fused().quantize_dual(bad, (OperandSpec(), spec))
    assert not Fused().fake_quantize(bad, OperandSpec()).any()
