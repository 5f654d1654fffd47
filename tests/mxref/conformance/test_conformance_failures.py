"""A failure shows the smallest request that still fails, and the command that explains it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conform_command import explained
from mutants import BY_NAME
from mutants.staged import staged
from mutants.stored_faults import Loose
from mxref import GemmProfile, OperandSpec, Rounding, Stream, quantize
from mxref.conformance import check
from mxref.conformance.checking import Subject
from mxref.conformance.finding import explain_command, shrunk_failure
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Request
from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("ties away", 1), ("EVEN at 1.5", 1), ("underflow to +0", 2), ("negative exponents wrap", 1),
        ("applied scale clamped", 1), ("NaN keeps the rest", 2), ("RTZ to nearest", 2), ("prescale missing", 2),
    ],
)  # fmt: skip
def test_a_failure_is_shrunk_to_few_elements_in_the_plainest_treatment(name, most):
    mutant = BY_NAME[name]
    report = check(mutant.make(), clauses=[mutant.clause], level="quick", formats=mutant.formats)
    failure = next(f for f in report.failures if f.clause == mutant.clause)
    live = [w for w in failure.inputs["x"] if int(w, 16)]
    assert len(live) <= most, live
    assert failure.request["shape"] == "(1, 32)"
    assert "hadamard" not in failure.request
    assert failure.differing or failure.expected.split()[1] != failure.got.split()[1]


@pytest.mark.parametrize(
    "name",
    [
        "ties away", "low bits of the half", "seed cut to 32 bits", "operand ignored", "prescale in bfloat16",
        "transform rounded to bfloat16", "halves swapped", "local columns", "zero byte swapped", "blocks of 64",
        "padding after the transform", "Inf to 6", "unpadded length", "axis guessed",
    ],
)  # fmt: skip
def test_the_command_explains_the_expected_side(name):
    mutant = BY_NAME[name]
    report = check(mutant.make(), clauses=[mutant.clause], level="quick", formats=mutant.formats)
    commands = [f for f in report.failures if f.command]
    assert commands
    assert any(f.clause == mutant.clause for f in commands)
    for failure in commands:
        assert explained(failure.command) == failure.expected, failure


@pytest.mark.parametrize("hadamard", [0, 16, 64])
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.SR])
def test_any_block_can_be_explained_where_it_is(hadamard, rounding):
    spec = OperandSpec(
        scale_rule="even", rounding=rounding, sr_bits=9 if rounding is Rounding.SR else 16, hadamard=hadamard,
        signs="per_step" if hadamard else "none", zero_scale=127,
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    x[:, 2] = 0
    request = Request(x, spec, axis=0, rng=Stream(5, 6, 7, 3))
    subject = Subject(staged(pack=lambda self, codes: pack(codes, E2M1) ^ 1)(), shrink=False)
    for row, block in ((0, 0), (1, 1), (2, 0)):
        failure = shrunk_failure(subject, request, (row, block), "c", 1)
        want = request.expected_blocks
        codes = pack(want.codes[row, block], E2M1).tobytes().hex(" ")
        assert failure.expected == f"scale {want.scales[row, block]:02x}  codes {codes}"
        assert explained(failure.command) == failure.expected


def test_a_place_that_words_cannot_reach_has_no_command():
    spec = OperandSpec(rounding=Rounding.SR)
    x = np.ones((1, 32), np.float32)
    far = Request(x, spec, rng=Stream(1), origin=(1 << 30, 0), global_shape=(1 << 31, 32))
    assert explain_command(far, 0, 0) is None
    assert explain_command(replace(far, spec=OperandSpec()), 0, 0) is not None


def test_a_failing_transform_is_shrunk_to_one_group():
    report = check(BY_NAME["stages swapped"].make(), ops=["hadamard"], level="quick")
    failure = report.failures[0]
    assert failure.clause == "hadamard.order"
    assert len(failure.inputs["x"]) == int(failure.request["n"])
    assert failure.expected != failure.got


@pytest.mark.clause("gemm.bounded")
def test_bounded_is_a_tolerance_and_not_a_bit():
    rng = np.random.default_rng(0)
    a, b = (quantize(rng.standard_t(2, (5, 512)).astype(np.float32)) for _ in range(2))
    product = Product(a, b, GemmProfile.BOUNDED)
    assert not product.wrong(Subject(reference))[0].any()
    assert product.wrong(Subject(Loose()))[0].any()


def test_exceptions_and_refusals_are_findings():
    class Raises(ReferenceBackend):
        def _quantize(self, x, plan):
            if plan.axis == 0 and len(plan.shape) == 3:
                raise IndexError("out\nof range")
            return super()._quantize(x, plan)

    report = check(Raises(), ops=["quantize"], level="quick", formats=["mxfp4"])
    failure = next(f for f in report.failures if f.clause == "quantize.axis")
    assert failure.message == "raised IndexError: out of range"
    assert "(64, 2, 3)" in failure.request["shape"]


def test_wrong_metadata_is_a_finding():
    class Forgets(ReferenceBackend):
        def quantize(self, x, spec, **arguments):
            return replace(super().quantize(x, spec, **arguments), prescale=False)

    report = check(Forgets(), ops=["quantize"], level="quick", formats=["mxfp4"])
    assert "prescale of the MXArray is False, expected True" in {f.message for f in report.failures}
