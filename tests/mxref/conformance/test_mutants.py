"""Tests of the conformance kit: each planted fault is caught, and the report names the broken clause."""

from collections import Counter

import pytest

from mutants import MUTANTS
from mutants.fused import Adding, Dual, Laid
from mutants.staged import Staged
from mxref.conformance import CLAUSES, check


@pytest.mark.parametrize("stages", [Staged, Dual, Laid, Adding])
def test_the_stages_without_a_fault_conform(stages):
    # The fused stages are those of the reference but for MXFP4.
    report = check(stages(), level="quick", formats=None if stages is Staged else ["mxfp4"])
    assert report.ok, report.failing


@pytest.mark.clause("conformance.arrays")
@pytest.mark.clause("conformance.capabilities")
@pytest.mark.clause("conformance.dual")
@pytest.mark.clause("conformance.protocol")
@pytest.mark.clause("conformance.unsupported")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_fault_is_caught_and_named(mutant):
    # All clauses of the level `full` take too long for what only one of them has.
    clauses = {mutant.clause} if mutant.level == "full" else None
    report = check(
        mutant.make(), level=mutant.level, ops=mutant.ops, clauses=clauses, formats=mutant.formats, shrink=False
    )  # fmt: skip
    assert mutant.clause in report.failing, (mutant.source, report.failing)
    if mutant.first:
        assert report.failing[0] == mutant.clause, report.failing
        assert report.failures[0].clause == mutant.clause


def test_faults_cover_the_clauses():
    assert len(MUTANTS) >= 100
    assert max(Counter(m.name for m in MUTANTS).values()) == 1
    without = set(CLAUSES) - {m.clause for m in MUTANTS}
    # Joins of other clauses, and what the others decode or measure; each has its own tests.
    assert without == {
        "rounding.native_sr", "linear.rotation", "quantize.order",
        "dialect.ocp", "dialect.amd", "dialect.nvidia", "dialect.tseng",
    }  # fmt: skip
