"""A backend with several faults: every finding shows a block that only its own fault breaks."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from mutants import MUTANTS
from mutants.staged import Staged, staged
from mxref.conformance import check, finding
from mxref.conformance.checking import Subject
from mxref.conformance.requests.quantizing import all_of_it
from mxref.steps.hadamard import Rotation
from mxref.steps.hadamard import hadamard as transform
from mxref.steps.random import random_integers


class Unsigned(Staged):
    def rotate(self, v, rotation):
        return transform(v, Rotation(rotation.n))


BY_NAME = {mutant.name: type(mutant.make()) for mutant in MUTANTS if mutant.name in (
    "EVEN at 1.5", "zero byte swapped", "ties away", "operand ignored", "tile amax by row",
)}  # fmt: skip
FAULTS = {
    "scale.rule.even": BY_NAME["EVEN at 1.5"],
    "scale.zero": BY_NAME["zero byte swapped"],
    "rounding.rne": BY_NAME["ties away"],
    "random.stream": BY_NAME["operand ignored"],
    "scale.block.tile": BY_NAME["tile amax by row"],
    "hadamard.policy": Unsigned,
}


def joined(classes):
    """Return a backend with the faults of classes, each of which overrides another stage."""
    changed = [{name: method for name, method in vars(each).items() if callable(method)} for each in classes]
    assert sum(map(len, changed)) == len(reduce(lambda a, b: a | b, changed))
    return type("Joined", (Staged,), reduce(lambda a, b: a | b, changed))()


def wrong(backend, request, row, block):
    got = request.answer(Subject(backend))
    return bool(all_of_it(got, request.expected_blocks)[0][row, block])


def words(request, row, block):
    bits = finding.unit_rows(request, row, block).view(np.uint32).ravel()
    return tuple(f"0x{int(each):08x}" for each in bits)


@pytest.mark.clause("conformance.protocol")
def test_each_finding_of_a_backend_with_several_faults_shows_its_own(monkeypatch):
    shown = []
    explain = finding.explain_command
    monkeypatch.setattr(
        finding, "explain_command", lambda *place: (shown.append(place[:3]), explain(*place))[1]
    )
    report = check(joined(FAULTS.values()), ops=["quantize"], level="quick", formats=["mxfp4"])
    failures = {failure.clause: failure for failure in report.failures}
    assert set(FAULTS) <= set(failures)
    for clause, fault in FAULTS.items():
        failure = failures[clause]
        request, row, block = next(
            each
            for each in reversed(shown)
            if each[0].describe() == failure.request and failure.inputs["x"] == words(*each)
        )
        assert wrong(fault(), request, row, block), (clause, failure)
        others = [each for name, each in FAULTS.items() if name != clause]
        assert not wrong(joined(others), request, row, block), (clause, failure)
        assert set(failure.inputs["x"]) - {"0x00000000"} or clause == "scale.zero", failure
    assert len({failures[clause].inputs["x"] for clause in FAULTS}) == len(FAULTS)


def rows_of_blocks(self, plan):
    """The random index of rows padded to blocks of 32 alone, not to the Hadamard groups."""
    length = -(-plan.global_shape[plan.axis] // 32) * 32
    return random_integers(
        plan.global_rows(), plan.first, plan.length, length, plan.stream, plan.spec.sr_bits
    )


@pytest.mark.clause("random.index")
def test_the_clause_of_the_random_index_alone_finds_a_wrong_stride():
    report = check(staged(integers=rows_of_blocks)(), clauses=["random.index"], level="quick", shrink=False)
    assert [failure.check for failure in report.failures] == [
        "R = 16, padded length, nvfp4", "vector quantize.place.sr.whole"
    ]  # fmt: skip
