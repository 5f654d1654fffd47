"""Tests of the training oracle: each planted fault is caught, first by the check of its own stage."""

from collections import Counter

import pytest

from training_oracle.faults.every import FAULTS
from training_oracle.scenarios import SCENARIOS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_is_caught_by_the_check_of_its_stage(tmp_path, monkeypatch, fault):
    scenario = SCENARIOS[fault.scenario]
    with monkeypatch.context() as patch:
        fault.plant(patch)
        subject = scenario.make(tmp_path)
    assert scenario.first_failing(subject) == fault.check


def test_faults_cover_the_checks():
    assert len(FAULTS) >= 40
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    checks = {(name, check) for name, scenario in SCENARIOS.items() for check in scenario.checks}
    planted = {(fault.scenario, fault.check) for fault in FAULTS}
    assert planted <= checks
    assert {check for _, check in planted} == {check for _, check in checks}
