"""The contrasts in the results of a ladder: differences, outcomes, bounds, predictions, and the power of a pilot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ablation_fakes import ladder, table
from mxref_training.lab.answers import Answers, sentence
from mxref_training.lab.contrasts import Difference, smallest_difference
from mxref_training.lab.measures import Crossing, Measures, Reach
from mxref_training.lab.result_file import plain
from mxref_training.lab.verdict import Outcome

ARMS = ("fp8", "low", "same", "high", "gone", "half", "slow")
LADDER = ladder(
    arm=[{"name": name, "label": name.upper(), "seeds": 4} for name in ARMS]
    + [{"name": "again", "label": "again", "seed_offset": 9}],
    contrast=[
        {
            "name": name,
            "arm": name,
            "against": "fp8",
            "question": f"{name}?",
            "prediction": [{"says": "lower", "source": "a"}, {"says": "diverges", "source": "b"}],
        }
        for name in ARMS[1:]
    ],
)


def measures() -> Measures:
    """Four seeds: noise of 0.002 nats, and differences far above it or at nothing."""
    rng = np.random.default_rng(5)
    shift = {"fp8": 0.0, "low": -0.05, "same": 0.0, "high": 0.05, "half": 0.0, "slow": 0.1}
    seeds = rng.normal(4, 0.1, 4)
    losses = {
        name: {s: float(seeds[s] + by + rng.normal(0, 0.002)) for s in range(4)} for name, by in shift.items()
    }
    losses["half"] = {s: losses["half"][s] for s in (0, 2)}
    crossings: dict[str, dict[int, Crossing]] = {
        name: {s: Crossing(Reach.CROSSED, 1000.0 * (1 + 10 * by / 5) + s) for s in range(4)}
        for name, by in shift.items()
    }
    crossings["gone"] = dict.fromkeys(range(4), Crossing(Reach.DIVERGED, math.nan))
    crossings["half"] |= dict.fromkeys((1, 3), Crossing(Reach.DIVERGED, math.nan))
    crossings["slow"] |= {3: Crossing(Reach.NEVER, 1500.0)}
    diverged = {name: dict.fromkeys(range(4), name == "gone") for name in ARMS}
    diverged["half"] |= {1: True, 3: True}
    return Measures(losses, crossings, diverged)


def rows(found: Measures, lad: Any = LADDER) -> Mapping[str, dict[str, Any]]:
    return {row["name"]: row for row in Answers(lad, found, 4).table()}


def test_outcomes_of_a_ladder() -> None:
    found = rows(measures())
    outcomes = {name: row["outcome"] for name, row in found.items()}
    assert outcomes == {
        "low": "lower", "same": "equal", "high": "higher", "gone": "diverges", "half": "undecided", "slow": "higher",
    }  # fmt: skip
    assert found["low"]["loss"]["nats"] == pytest.approx(-0.05, abs=0.005)
    assert found["low"]["loss"]["low"] < -0.05 < found["low"]["loss"]["high"] < 0
    # Five arms of four seeds are in the pool; the two that diverged are not.
    assert found["low"]["loss"]["freedom"] == 5 * 4 - 5 - 4 + 1
    assert found["half"]["loss"]["own"] is True
    assert found["low"]["pairs"] == 4
    assert found["gone"]["answer"] == "All 4 runs diverged, and none of the other arm's."
    assert found["half"]["answer"].startswith("No difference is computed: 2 of 4 runs diverged, and 0 of 4")
    assert found["low"]["answer"].startswith("Lower by 0.0")


def test_predictions_are_judged_by_the_outcome() -> None:
    found = {name: [p["verdict"] for p in row["predictions"]] for name, row in rows(measures()).items()}
    assert found == {
        "low": ["reproduced", "not reproduced"],
        "same": ["not reproduced", "not reproduced"],
        "high": ["not reproduced", "not reproduced"],
        "gone": ["not reproduced", "reproduced"],
        "half": ["underpowered", "underpowered"],
        # It converges, and does not reach its target in every run.
        "slow": ["not reproduced", "underpowered"],
    }


def test_p_values_are_corrected_for_every_declared_contrast() -> None:
    found = rows(measures())
    raw = {name: row["loss"]["p"] for name, row in found.items() if row["loss"]}
    corrected = {name: row["loss"]["corrected_p"] for name, row in found.items() if row["loss"]}
    smallest = min(raw, key=lambda name: raw[name])
    assert corrected[smallest] == pytest.approx(6 * raw[smallest])
    assert len(raw) == 5  # the arm that diverged has none, and counts


def test_tokens_are_compared_by_their_logarithm_and_a_censored_run_leaves_a_bound() -> None:
    found = rows(measures())
    low = found["low"]["tokens"]
    expected = [math.log((900 + s) / (1000 + s)) for s in range(4)]
    assert low["percent"] == pytest.approx(100 * math.expm1(sum(expected) / 4))
    assert low["low"] < low["percent"] < low["high"]
    slow = found["slow"]["tokens"]
    bound = math.exp(sum(math.log(t / (1000 + s)) for s, t in enumerate((1200, 1201, 1202, 1500))) / 4)
    assert slow == {"percent": pytest.approx(100 * (bound - 1)), "bound": ">"}
    assert found["gone"]["tokens"] is None


def test_tokens_are_equal_within_three_percent() -> None:
    some = measures()
    for percent, equal in ((2, True), (4, False), (-2, True), (-4, False)):
        apart = {s: Crossing(Reach.CROSSED, (1 + percent / 100) * (1000 + s)) for s in range(4)}
        found = rows(replace(some, crossings={**some.crossings, "low": apart}))["low"]["tokens"]
        assert (found["equal_p"] < 0.05) is equal, percent


def test_censored_runs_of_both_arms_leave_no_bound_and_early_ones_the_other() -> None:
    never, first = Crossing(Reach.NEVER, 1500.0), Crossing(Reach.FIRST, 100.0)
    some = measures()

    def bound(arm: Crossing, against: Crossing) -> Any:
        crossings = {"low": {0: arm, 1: Crossing(Reach.CROSSED, 900.0)}}
        crossings["fp8"] = {0: against, 1: Crossing(Reach.CROSSED, 1000.0)}
        found = rows(Measures(some.losses, crossings, some.diverged))["low"]["tokens"]
        return found and found["bound"]

    crossed = Crossing(Reach.CROSSED, 500.0)
    assert [
        bound(never, crossed),
        bound(crossed, never),
        bound(first, crossed),
        bound(crossed, first),
    ] == list("><<>")
    assert [bound(never, never), bound(first, first), bound(crossed, crossed)] == [None, None, None]


def test_an_unfinished_ladder_has_answers_for_what_there_is() -> None:
    some = measures()
    found = rows(
        Measures(
            {"fp8": some.losses["fp8"]},
            {"fp8": some.crossings["fp8"]},
            {"fp8": dict.fromkeys(range(4), False)},
        )
    )
    assert {row["outcome"] for row in found.values()} == {"missing"}
    assert {row["answer"] for row in found.values()} == {"Not run yet."}
    one = {name: {0: some.losses[name][0]} for name in ("fp8", "low")}
    found = rows(Measures(one, {}, {"fp8": {0: False}, "low": {0: False}}))
    assert found["low"]["outcome"] == "underpowered"
    assert "no spread is known" in found["low"]["answer"]
    json.dumps(plain(list(found.values())), allow_nan=False)


def test_a_pilot_of_the_reference_gives_the_power_of_the_planned_seeds() -> None:
    losses = {"fp8": {0: 4.00, 1: 4.02, 2: 4.01}}
    found = Answers(LADDER, Measures(losses, {}, {"fp8": dict.fromkeys(range(3), False)}), 4).power()
    assert (found["source"], found["runs"], found["spread"]) == (
        "pilot",
        3,
        pytest.approx(math.sqrt(2) * 0.01),
    )
    # Seven arms of four seeds are planned.
    freedom = 7 * 4 - 7 - 4 + 1
    assert found["freedom"] == freedom
    assert found["smallest_nats"] == dict.fromkeys(
        ARMS[1:], pytest.approx(smallest_difference(math.sqrt(2) * 0.01, 4, freedom, 6))
    )
    whole = Answers(LADDER, measures(), 4)
    assert (whole.power()["source"], whole.power()["spread"]) == ("ladder", whole.losses.spread)
    nothing = Answers(LADDER, Measures({}, {}, {}), 4).power()
    assert (nothing["source"], math.isnan(nothing["spread"])) == ("", True)


def test_a_ladder_whose_file_names_no_seeds_plans_those_of_the_call() -> None:
    plain_ladder = ladder(contrast=[{"name": "c", "arm": "h16", "against": "bad", "question": "?"}])
    assert [arm["name"] for arm in table()["arm"]] == ["fp8", "fp8-seed2", "h16", "bad"]
    found = Answers(plain_ladder, Measures({}, {}, {}), 3).power()
    assert found["freedom"] == 3 * 3 - 3 - 3 + 1


def test_sentences_say_what_would_decide_and_that_pairs_scatter() -> None:
    none = (0, 3), (0, 3)
    wide = Difference(3, 0.001, 0.01, 60)
    assert sentence(Outcome.UNDERPOWERED, wide, *none, 40).endswith("; about 40 seeds would tell.")
    assert sentence(Outcome.UNDERPOWERED, wide, *none, None).endswith("+0.0210).")
    assert "less than the bound of equality" in sentence(
        Outcome.HIGHER, Difference(3, 0.004, 0.001, 60), *none, None
    )
    for own_spread, marked in ((0.015, False), (0.025, True)):
        found = Difference(3, 0.05, 0.01 / math.sqrt(3), 80, own_spread=own_spread)
        assert ("scatter" in sentence(Outcome.HIGHER, found, *none, None)) is marked
