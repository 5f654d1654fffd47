"""The sentences of the page of results: every interval in them is one of the results."""

from __future__ import annotations

import math

import pytest

from ablations import branches, ladders, predictions, raw
from ablations.sentences import INTERVAL, PROSE, contrasts, interval, said

pytestmark = pytest.mark.study


def test_every_interval_in_a_sentence_is_one_of_the_results() -> None:
    known = set()
    for name in ladders.LADDERS:
        results = ladders.results_of(name)
        known |= {said(row) for row in results["contrasts"] if row["loss"] and row["loss"]["low"] is not None}
        known |= {
            interval(nats, nats - half, nats + half)
            for _, nats, half in ladders.intervals(results)
            if math.isfinite(half)
        }
    (moment,) = branches.branches_of("readings")["moments"]
    for arm in moment["arms"][1:]:
        mean, half = (arm["validation_last"][key] for key in ("mean", "half_width"))
        known.add(interval(mean, mean - half, mean + half))
    found = INTERVAL.findall(PROSE)
    assert len(found) >= 6
    assert [text for text in found if text not in known] == []


def test_the_pace_in_the_records_of_the_branches_is_as_wrong_as_the_text_says() -> None:
    records = raw.records(branches.ARCHIVE)
    assert len(records) == 84
    updates, before = 200, 2600
    for record in records:
        own = updates * 16_384 / record["seconds"]
        assert record["tokens_per_second"] / own == pytest.approx((before + updates) / updates)
    assert f"`tokens_per_second` is {(before + updates) // updates} times too high" in PROSE


def test_what_the_text_says_of_predictions_and_of_wgrad() -> None:
    found = predictions.counts(ladders.results_of("readings"))
    assert (
        f"At 20M {found['reproduced']} of {sum(found.values())} predictions are reproduced, "
        f"{found['not reproduced']} are not, and {found['underpowered']} are underpowered."
    ) in PROSE
    p = contrasts("readings")["wgrad"]["loss"]["corrected_p"]
    assert f"which the correction does not leave standing (p = {p:.2f})" in PROSE
