"""Conformance: which backends pass, and which checks they get."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from conform_command import TOY
from mutants import BY_NAME
from mutants.staged import Staged, with_capabilities
from mxref import GemmProfile, OperandSpec, Rounding, Stream, quantize
from mxref.capabilities import Capabilities
from mxref.conformance import CLAUSES, check, checks_of
from mxref.conformance.checking import Op, Plan, unit_amax
from mxref.conformance.outcome import Level
from mxref.conformance.requests.crafted import crafted_blocks, crafted_tensors, tame, ties
from mxref.dialects import dialects_of
from mxref.discovery import get_backend
from mxref.errors import RecipeError
from mxref.formats import BLOCK_FORMATS, MXFP4, NVFP4
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.quotient import Arithmetic
from mxref.steps.scale import ScaleRule, rules_of

EVERYTHING = os.environ.get("MXREF_CONFORMANCE_ALL") == "1"
"""Whether `make test-conformance` asks the reference for every format at level full."""


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("level", [Level.QUICK, pytest.param(Level.FULL, marks=pytest.mark.study)])
def test_the_reference_passes_all_that_it_declares(level):
    """Other formats, and level full, ask Numba, whose answers are compared with the reference's."""
    formats = [MXFP4.name] if level is Level.FULL else [MXFP4.name, NVFP4.name]
    report = check(reference, level=level, formats=None if EVERYTHING else formats)
    assert report.ok, report.failing
    assert {reason for c in report.clauses for reason in c.reasons} == {"native_sr"}


def test_a_choice_holds_every_check_that_it_names():
    whole = checks_of(reference.capabilities, level=Level.QUICK)
    assert {check.clause for check in whole} == set(CLAUSES)
    for clause in CLAUSES:
        chosen = checks_of(reference.capabilities, level=Level.QUICK, clauses=[clause])
        assert chosen == [check for check in whole if check.clause == clause]
    for op in Op:
        chosen = checks_of(reference.capabilities, level=Level.QUICK, ops=[op])
        assert chosen == [check for check in whole if check.asked.op is op]


@pytest.mark.parametrize(
    "made",
    [
        made if made is MXFP4 else pytest.param(made, marks=pytest.mark.study)
        for made in BLOCK_FORMATS.values()
    ],
    ids=str,
)
def test_numba_passes_on_every_path_and_skips_only_what_it_does_not_declare(made):
    """Every path is asked for every format at level quick, in test_warm_up.py."""
    pytest.importorskip("numba")
    from every_path import EveryPath

    backend = EveryPath() if made is MXFP4 else get_backend("numba")
    report = check(backend, formats=[made.name])
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    skipped = {c.clause: set(c.reasons) for c in report.clauses if c.reasons}
    missing = {"exact", "bounded"} - backend.capabilities.profiles(made, made)
    undeclared = {
        "native_sr",
        "dequantize_dtypes: float64",
        "bounded_max_scale: 254",
        "bounded_max_scale: 253",
    }
    undeclared |= {f"gemms: {profile} of {made} x {made}" for profile in missing}
    undeclared |= {f"arithmetics: {each}" for each in set(Arithmetic) - backend.capabilities.arithmetics}
    undeclared |= {f"four_over_six: {each}" for each in set(FourOverSix) - backend.capabilities.four_over_six}
    assert set.union(*skipped.values()) <= undeclared
    nothing = {c.clause for c in report.clauses if c.outcome == "skipped"}
    orders = {"scale.arithmetic", "scale.four_over_six", *(f"dialect.{name}" for name in dialects_of(made))}
    assert nothing <= {"rounding.native_sr", "gemm.exact", "gemm.bounded"} | (
        set() if made.scale.powers else orders
    )
    assert "gemm.ordered" not in nothing


@pytest.mark.clause("conformance.unsupported")
def test_the_toy_backend_passes_what_it_declares():
    report = check(get_backend(TOY), level="quick")
    assert report.ok, report.failing
    outcomes = {c.clause: c.outcome for c in report.clauses}
    assert outcomes["scale.rule.floor"] == outcomes["rounding.rne"] == outcomes["gemm.ordered"] == "passed"
    assert outcomes["scale.rule.even"] == outcomes["hadamard.order"] == outcomes["random.index"] == "skipped"
    assert outcomes["conformance.unsupported"] == outcomes["quantize.order"] == "passed"
    (drawn,) = [c for c in report.clauses if c.clause == "quantize.order"]
    assert drawn.passed >= 60


@pytest.mark.parametrize(
    "fields",
    [
        {"in_dtypes": frozenset({"bfloat16"})},
        {"scale_rules": frozenset({ScaleRule.EVEN}), "roundings": frozenset({Rounding.SR})},
        {"max_sr_bits": 16, "hadamard_sizes": frozenset({16, 64}), "gemm_dtypes": frozenset({"bfloat16"})},
        {"gemms": frozenset(), "dequantize_dtypes": frozenset()},
    ],
)
def test_narrow_declarations_are_asked_for_what_they_hold(fields):
    narrow = type("Narrow", (ReferenceBackend,), {"capabilities": with_capabilities(**fields)})()
    report = check(narrow, level="quick", formats=["mxfp4"])
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    passed = {c.clause for c in report.clauses if c.passed}
    assert {"scale.amax", "rounding.sign", "quantize.axis", "conformance.unsupported"} <= passed
    assert next(c for c in report.clauses if c.clause == "quantize.order").passed >= 60
    if "roundings" in fields:
        assert "random.index" in passed


def _spread(array):
    """Return the same array with a gap after every element in memory, and its rows in reverse."""
    if array.size == 0:
        return array
    wide = np.full((*array.shape, 2), array.reshape(-1)[0])[::-1]
    wide[..., 0] = array
    return wide[..., 0]


class Strided(ReferenceBackend):
    name = "strided"

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        return _spread(codes), _spread(scales)

    def _dequantize(self, q, dtype):
        return _spread(super()._dequantize(q, dtype))

    def _hadamard(self, x, rotation, axis):
        return _spread(super()._hadamard(x, rotation, axis))

    def _scaled_gemm(self, a, b, profile, out_dtype):
        return _spread(super()._scaled_gemm(a, b, profile, out_dtype))


@pytest.mark.clause("conformance.dual")
def test_a_fault_of_one_orientation_says_which_and_where():
    backend = BY_NAME["dual without padding"].make()
    (failure,) = check(backend, level="quick", clauses={"conformance.dual"}, formats=["mxfp4"]).failures
    assert re.fullmatch(r"along axis 0: .* \d+ of \d+ blocks.* row \d+, block \d+", failure.message)
    assert "pad=True" in failure.request["along axis 0"]


@pytest.mark.clause("conformance.dual")
def test_a_fault_of_a_layout_is_not_one_of_the_gemm():
    report = check(BY_NAME["layout loses NaN"].make(), level="quick", ops=["gemm"], formats=["mxfp4"])
    assert report.failing == ("conformance.dual",)
    assert "B prepared" in report.failures[0].check
    # A GEMM that is wrong by itself is not blamed on the layout as well.
    report = check(BY_NAME["NaN rows dropped"].make(), level="quick", ops=["gemm"], formats=["mxfp4"])
    assert "conformance.dual" not in report.failing


@pytest.mark.clause("conformance.protocol")
def test_results_may_have_any_strides():
    assert not _spread(np.ones((2, 3))).flags.c_contiguous
    assert check(Strided(), level="quick", formats=["mxfp4"]).failing == ()


class HardwareRandom(Staged):
    capabilities = with_capabilities(native_sr=True)
    bias = 0.0

    def integers(self, plan):
        rng = np.random.default_rng(int(np.random.default_rng().integers(1 << 60)))
        r = rng.random((plan.rows, plan.length)) ** (1 + self.bias)
        return (r * 2**plan.spec.sr_bits).astype(np.uint32)


class Leaving(HardwareRandom):
    """One element of many goes two steps on the grid."""

    def round(self, v, spec, random):
        codes = super().round(v, spec, random)
        codes[-1, -1, -1] ^= 2
        return codes


@pytest.mark.clause("rounding.native_sr")
def test_native_sr_is_asked_for_statistics_only():
    good, biased, leaving = HardwareRandom(), HardwareRandom(), Leaving()
    biased.bias = 1.0
    report = check(good, level="quick", ops=["quantize"], formats=["mxfp4"])
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    outcomes = {c.clause: c.outcome for c in report.clauses}
    assert outcomes["rounding.native_sr"] == "passed"
    assert outcomes["rounding.sr"] == outcomes["random.philox"] == "skipped"
    for backend, message in ((biased, "is biased"), (leaving, "elements left their two neighbours")):
        report = check(backend, level="quick", clauses=["rounding.native_sr"], formats=["mxfp4"])
        assert report.failing == ("rounding.native_sr",)
        assert message in report.failures[0].message


@pytest.mark.parametrize("made", [made for made in BLOCK_FORMATS.values() if made.scale.powers], ids=str)
def test_crafted_blocks_hold_what_they_promise(made):
    crafted = crafted_blocks(made)
    bits = crafted.x.view(np.uint32)
    assert len(set(crafted.names)) == len(crafted.names) == len(crafted.x)
    amax = (bits & 0x7FFFFFFF).max(axis=1)
    finite = amax[amax < 0x7F800000]
    assert set(range(255)) <= set((finite >> 23).tolist())
    values = np.abs(crafted.x[amax < 0x7F800000].astype(np.float64))
    # A block holds ten ties, so those of a finer grid are spread over the exponents; every tie is held somewhere.
    every = (0,) if len(ties(made.element)) > 10 else (-127, -126, 0, 100)
    for e in every:
        around = np.arange(e - 13, e + 14) if len(every) == 1 else np.array([e])
        assert np.isin(np.outer(ties(made.element), 2.0**around), values).any(axis=1).all()
    largest = made.element.max_value
    for above in (largest, largest + (largest - made.element.magnitudes[-2]) / 2):
        assert (values == above).any()
    for special in (0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001):
        assert (bits == special).any(), hex(special)
    assert np.isin(crafted_blocks(made, False).x.view(np.uint32), bits).mean() > 0.2
    assert not crafted.x.flags.writeable


def test_crafted_tensors_reach_every_scale_and_both_ends():
    for tensor in crafted_tensors(NVFP4):
        finite = tensor.x[np.isfinite(tensor.x).all(axis=1)]
        amax = None if tensor.amax is None else np.array([tensor.amax], np.float32)
        q = quantize(finite, OperandSpec(NVFP4), placement=Placement(amax=amax))
        most = 75 if tensor.amax == 2.0**-149 else 127
        found = set(q.scales.ravel().tolist())
        assert tensor.amax == 2.0**-149 or {0, 1} <= found, tensor.where
        assert "larger" in tensor.where or len(found) >= most - 1, tensor.where
        assert not tensor.x.flags.writeable


@pytest.mark.parametrize(
    ("rule", "made"),
    [(rule, made) for made in BLOCK_FORMATS.values() for rule in rules_of(made.scale)],
    ids=str,
)
def test_tame_values_are_exact_under_every_rounding(rule, made):
    x = tame(np.random.default_rng(0), (50, 96), made=made)
    amax = unit_amax(made)
    at = Placement(Stream(1), amax=None if amax is None else np.array([amax], np.float32))
    first, *others = (
        quantize(x, OperandSpec(format=made, scale_rule=rule, rounding=r), placement=at) for r in Rounding
    )
    assert all(first == other for other in others)


def test_filters():
    caps = Capabilities()
    checks = checks_of(caps, ops=["hadamard"], level="quick")
    assert {c.asked.op for c in checks} == {Op.HADAMARD}
    checks = checks_of(caps, clauses=["gemm.nan"], level="quick")
    assert {c.clause for c in checks} == {"gemm.nan"}
    for bad, value in (
        ({"ops": ["quantise"]}, "quantise"), ({"clauses": ["scale.rul"]}, "scale.rul"), ({"level": "some"}, "some"),
        ({"seed": -1}, "-1"), ({"formats": ["mxfp8"]}, "mxfp8"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=value):
            checks_of(caps, **bad)


def test_the_seed_changes_the_draws_and_nothing_else():
    drawn = {"level": "quick", "clauses": ["quantize.order"]}
    first, again, other = (
        [c for c in checks_of(Capabilities(), seed=s, **drawn) if c.title == "drawn combination 3"]
        for s in (0, 0, 1)
    )
    assert first[0].asked.spec == again[0].asked.spec
    assert first[0].asked.describe() == again[0].asked.describe()
    assert first[0].asked.describe() != other[0].asked.describe()
    assert check(reference, seed=7, level="quick", formats=["mxfp4"]).ok


def test_plan_takes_the_plainest_that_is_declared():
    narrow = with_capabilities(scale_rules=frozenset({ScaleRule.EVEN}), in_dtypes=frozenset({"float16"}))
    plan = Plan.of(Level.QUICK, 3, narrow, MXFP4)
    assert (plan.base.scale_rule, plan.base.rounding, plan.dtype) == (ScaleRule.EVEN, Rounding.RNE, "float16")


def test_a_backend_of_torch_tensors_is_asked_with_tensors():
    torch = pytest.importorskip("torch")

    class Tensors(ReferenceBackend):
        capabilities = with_capabilities(arrays="torch")

        def from_numpy(self, array):
            if array.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        def to_numpy(self, array):
            if array.dtype == torch.bfloat16:
                return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return array.numpy()

        def _quantize(self, x, plan):
            assert isinstance(x, torch.Tensor)
            return tuple(map(self.from_numpy, super()._quantize(self.to_numpy(x), plan)))

        def _on(self, q):
            return replace(q, codes=self.to_numpy(q.codes), scales=self.to_numpy(q.scales))

        def _dequantize(self, q, dtype):
            return self.from_numpy(np.ascontiguousarray(super()._dequantize(self._on(q), dtype)))

        def _hadamard(self, x, rotation, axis):
            return self.from_numpy(np.ascontiguousarray(super()._hadamard(self.to_numpy(x), rotation, axis)))

        def _scaled_gemm(self, a, b, profile, out_dtype):
            return self.from_numpy(super()._scaled_gemm(self._on(a), self._on(b), profile, out_dtype))

    report = check(Tensors(), level="quick", formats=["mxfp4"])
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    (strides,) = [c for c in report.clauses if c.clause == "quantize.strides"]
    assert strides.reasons == {"arrays: numpy": 3}


class Narrow(ReferenceBackend):
    """Gives wrong `bounded` products unless it is widened, and admits it or not."""

    def __init__(self, honest):
        self.honest, self.wide, self.flag = honest, False, False

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if profile is not GemmProfile.BOUNDED or self.wide:
            return out
        self.flag = self.honest
        return np.where(np.isnan(out), out, 1).astype(out.dtype)

    def range_exceeded(self):
        found, self.flag = self.flag, False
        return found

    @contextmanager
    def widened(self):
        self.wide = True
        yield
        self.wide = False


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("honest", [True, False])
def test_a_result_out_of_range_counts_only_if_the_backend_did_not_say_so(honest):
    report = check(Narrow(honest), clauses=["gemm.bounded"], level="quick", formats=["mxfp4"])
    assert report.total("passed") + report.total("failed") > 10
    assert report.ok is honest
