"""Block formats in a conformance run: which checks run or are skipped, and what a failure of MXFP8 shows."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from mutants import BY_NAME
from mutants.staged import with_capabilities
from mxref.capabilities import Capabilities, every_gemm
from mxref.cli import main
from mxref.conformance import CLAUSES, check, checks_of
from mxref.formats import BLOCK_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref.reference import ReferenceBackend
from mxref.reference import backend as reference


def backend_of(*formats):
    gemms = every_gemm({GemmProfile.ORDERED}, formats)
    capabilities = with_capabilities(formats=frozenset(formats), gemms=gemms)
    return type("Narrow", (ReferenceBackend,), {"capabilities": capabilities})()


@pytest.mark.clause("conformance.capabilities")
def test_a_backend_without_mxfp4_is_asked_for_its_own_format():
    report = check(backend_of(MXFP8_E4M3), level="quick")
    assert report.ok, [(f.clause, f.check, f.message) for f in report.failures]
    outcomes = {c.clause: c.outcome for c in report.clauses}
    own = ("formats.fp8", "packing.bytes", "scale.rule.even", "rounding.sr", "hadamard.order", "gemm.special")
    assert {outcomes[clause] for clause in own} == {"passed"}
    assert outcomes["formats.e2m1"] == outcomes["packing.nibbles"] == "skipped"
    reasons = {reason for c in report.clauses for reason in c.reasons}
    assert {"formats: mxfp4", "formats: mxfp8_e5m2", "gemms: ordered of mxfp8_e4m3 x mxfp8_e5m2"} <= reasons


@pytest.mark.clause("conformance.unsupported")
def test_what_is_not_declared_is_skipped_and_counted():
    whole = checks_of(Capabilities(), level="quick")
    ours = [each for each in whole if each.undeclared(Capabilities()) is None]
    assert {made for each in ours for made in each.formats} == {MXFP4}
    undeclared = Counter(each.undeclared(Capabilities()) for each in whole if MXFP4 not in each.formats)
    others = {f"formats: {made}" for made in BLOCK_FORMATS.values() if made is not MXFP4}
    assert others <= set(undeclared)
    # Making their checks takes long, so one for each clause and operation stands for them.
    assert all(undeclared[reason] < 2 * len(CLAUSES) for reason in others)
    assert {each.clause for each in whole} == set(CLAUSES)
    assert {each.title for each in whole if "formats without" in each.title} == {
        f"formats without {name}" for name in BLOCK_FORMATS
    }


def test_a_format_is_chosen_by_its_name():
    caps = reference.capabilities
    chosen = checks_of(caps, level="quick", formats="mxfp8_e4m3")
    assert {made for each in chosen for made in each.formats} == {MXFP8_E4M3}
    assert all(each.title.endswith(", mxfp8_e4m3") for each in chosen if each.formats)
    two = checks_of(caps, level="quick", formats=["mxfp8_e4m3", "mxfp8_e5m2"])
    assert any(each.formats == (MXFP8_E4M3, MXFP8_E5M2) for each in two)


def test_every_family_asks_every_format():
    names = {
        made: {
            each.title.removesuffix(f", {made}")
            for each in checks_of(reference.capabilities, level="quick", ops=["quantize"])
            if each.formats == (made,) and "vector" not in each.title
        }
        for made in BLOCK_FORMATS.values()
        if made.scale.powers  # others have no prescale, one rule, and scales of tensors
    }
    first, *others = names.values()
    for other in others:
        missing = first - other
        assert all("3/4" in title for title in missing), missing  # the prescale is each format's own


def test_the_command_takes_a_format_and_the_report_names_it(tmp_path):
    path = tmp_path / "report.json"
    words = ["conform", "--backend", "reference", "--quick", "--format", "mxfp8_e5m2", "--op", "dequantize"]
    result = CliRunner().invoke(main, [*words, "--json", str(path)])
    assert result.exit_code == 0, result.output
    table = json.loads(path.read_text())
    assert table["formats"] == ["mxfp8_e5m2"]
    assert "formats.fp8" in {clause["clause"] for clause in table["clauses"]}
    wrong = CliRunner().invoke(main, ["conform", "--format", "mxfp6"])
    assert wrong.exit_code == 2
    assert "'mxfp8_e4m3'" in wrong.output


@pytest.mark.parametrize(
    ("name", "most"),
    [("saturates to NaN", 1), ("RCEIL by the 6 of E2M1", 1), ("half up in E5M2", 2), ("prescale of 3/4", 2)],
)
def test_a_failure_of_mxfp8_is_shrunk_and_explained(name, most):
    mutant = BY_NAME[name]
    report = check(mutant.make(), ops=["quantize"], level="quick", formats=mutant.formats)
    failure = next(f for f in report.failures if f.clause == mutant.clause)
    assert failure.request["format"] == mutant.formats[0]
    assert failure.check.endswith(f", {mutant.formats[0]}") or failure.check.startswith("vector ")
    assert failure.request["shape"] == "(1, 32)"
    assert sum(int(word, 16) != 0 for word in failure.inputs["x"]) <= most
    _, codes = failure.expected.split("  codes ")
    assert len(bytes.fromhex(codes)) == 32
    assert failure.command.startswith(f"mxref explain --format {mutant.formats[0]} ")


def test_a_failing_product_of_mxfp8_is_shrunk():
    mutant = BY_NAME["dots rounded to float64"]
    backend = mutant.make()
    report = check(backend, ops=["gemm"], level="quick", formats=mutant.formats, clauses=[mutant.clause])
    failure = next(f for f in report.failures if f.clause == mutant.clause)
    assert failure.request["M, N, K"] == "1, 1, 32"
    assert failure.request["formats"] == "mxfp8_e5m2 x mxfp8_e5m2"
    rows = []
    for name in "AB":
        ((scale, codes),) = (block.split(":") for block in failure.inputs[name])
        packed = np.frombuffer(bytes.fromhex(codes), np.uint8)[None]
        scales = np.array([[int(scale, 16)]], np.uint8)
        rows.append(MXArray(packed, scales, (1, 32), 1, format=MXFP8_E5M2))
        assert np.count_nonzero(packed) <= 3
    got, want = (float(each.scaled_gemm(*rows)[0, 0]) for each in (backend, reference))
    assert f"{want:g}" == failure.expected.split()[0]
    assert got != want


@pytest.mark.clause("gemm.special", "gemm.bounded")
@pytest.mark.parametrize("change", [np.negative, np.nan_to_num], ids=["of the other sign", "finite"])
def test_an_infinity_of_a_bounded_product_is_held_to_its_sign(change):
    class Careless(ReferenceBackend):
        capabilities = with_capabilities(gemms=every_gemm({GemmProfile.BOUNDED}, {MXFP8_E5M2}))

        def _scaled_gemm(self, a, b, profile, out_dtype):
            out = super()._scaled_gemm(a, b, profile, out_dtype)
            return np.where(np.isinf(out), change(out), out)

    report = check(Careless(), ops=["gemm"], clauses=["gemm.special"], level="quick")
    assert {failure.clause for failure in report.failures} == {"gemm.special"}
    honest = check(reference, ops=["gemm"], clauses=["gemm.special"], level="quick")
    assert honest.ok
