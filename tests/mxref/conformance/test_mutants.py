"""Tests of the conformance kit: each planted fault is caught, and the report names the broken clause."""

from collections import Counter

import pytest

from mutants import MUTANTS
from mutants.fused_faults import Adding, Dual, Laid
from mutants.misleading_faults import BLAME_MUTANTS
from mutants.mutant import Mutant
from mutants.run_faults import Rare
from mutants.staged import Staged
from mxref import DIALECTS
from mxref.conformance import CLAUSES, ClauseResult, Level, Report, check

DUAL = "conformance.dual"
FIRST = {mutant.clause: mutant for mutant in reversed(MUTANTS)}
"""The first fault of each clause, which is asked for all clauses: checks of those after it may show the fault too."""


@pytest.mark.parametrize("stages", [Staged, Dual, Laid, Adding])
def test_the_stages_without_a_fault_conform(stages):
    # The fused stages are those of the reference but for MXFP4; only their mutants are asked about them.
    if stages is Staged:
        made = {name for mutant in MUTANTS for name in mutant.formats}
        report = check(stages(), level="quick", formats=made, clauses=set(CLAUSES) - {DUAL})
    else:
        report = check(stages(), level="quick", formats=["mxfp4"])
    assert report.ok, report.failing


def asked_of(mutant: Mutant) -> set[str] | None:
    """Return the clauses that a backend with this fault is checked for; None for all."""
    if mutant.level == "full":  # all clauses of this level take too long for what only one of them has
        return {mutant.clause}
    if mutant.clause == DUAL or mutant in BLAME_MUTANTS:
        return None
    if mutant.clause.startswith("conformance.") or mutant is FIRST[mutant.clause]:
        # Fused operations are compared with the backend's own plain ones, which have the fault too, so their checks
        # say nothing about it. They are nearly half of the suite, and their clause comes after those of the faults.
        return set(CLAUSES) - {DUAL}
    # The clause must be the first that fails, so nothing after it is asked.
    return set(CLAUSES[: CLAUSES.index(mutant.clause) + 1])


@pytest.mark.clause("conformance.arrays")
@pytest.mark.clause("conformance.capabilities")
@pytest.mark.clause("conformance.dual")
@pytest.mark.clause("conformance.protocol")
@pytest.mark.clause("conformance.unsupported")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_fault_is_caught_and_named(mutant):
    report = check(
        mutant.make(), level=mutant.level, ops=mutant.ops, clauses=asked_of(mutant), formats=mutant.formats,
        shrink=False,
    )  # fmt: skip
    assert mutant.clause in report.failing, (mutant.source, report.failing)
    if mutant.first:
        assert report.failing[0] == mutant.clause, report.failing
        assert report.failures[0].clause == mutant.clause


@pytest.mark.parametrize(("calls", "seen"), [(1, 1), (59, 20), (8620, 2877)])
def test_a_run_states_how_rare_a_fault_it_has_seen(calls, seen):
    report = Report("x", Level.QUICK, 0, (), (ClauseResult("gemm.nan", passed=1, calls=calls),), 0.0)
    assert report.seen_fault == seen
    assert (1 - 1 / seen) ** calls <= 0.05 < (1 - 1 / (seen + 1)) ** calls
    assert f"in {calls:,} calls, a fault in 1 of {seen:,} calls at random would have shown" in str(report)


def test_a_rare_fault_is_seen_as_often_as_the_report_states():
    rare, often = (
        check(Rare(every), level="quick", ops=["dequantize"], formats=["mxfp4"]) for every in (10_000, 60)
    )
    assert 60 < rare.seen_fault < 10_000
    assert rare.ok
    assert not often.ok


def test_faults_cover_the_clauses():
    assert len(MUTANTS) >= 100
    assert max(Counter(m.name for m in MUTANTS).values()) == 1
    without = set(CLAUSES) - {m.clause for m in MUTANTS}
    # Joins of other clauses, and what the others decode or measure; each has its own tests.
    assert without == {
        "rounding.native_sr", "linear.rotation", "quantize.order",
        *(f"dialect.{name}" for name in DIALECTS),
    }  # fmt: skip
