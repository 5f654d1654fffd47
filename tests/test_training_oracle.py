"""The training layer above the GEMMs against an oracle that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest

import training_oracle as oracle
from training_scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_product_follows_the_oracle(tmp_path, name):
    scenario = SCENARIOS[name]
    subject = scenario.make(tmp_path)
    for check in scenario.checks.values():
        check(subject)
