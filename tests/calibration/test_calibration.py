"""How often `mxref identify` is right: the drawn checkpoints are what they say, and the record keeps its promise."""

from __future__ import annotations

import pytest

from bench.records import newest, read
from calibration import identify as study
from calibration.drawn import KINDS, same_as_reference


def test_what_is_drawn_is_quantized_as_the_reference_does():
    assert same_as_reference()


def test_the_record_is_of_1000_checkpoints_and_right_in_99_of_100():
    rows = read(newest("identify"))["rows"]
    assert len({row["number"] for row in rows}) == len(rows) == 1000
    assert {row["kind"] for row in rows} == set(KINDS)
    said = [row for row in rows if row["said"]]
    assert sum(map(study.wrong, said)) <= 0.01 * len(said)
    assert all(row["format"] in row["formats"] for row in rows)
    assert {row["layout"] for row in rows} == {"rows", None}


def test_a_few_checkpoints_have_the_answers_of_the_record():
    record = read(newest("identify"))
    few = [row for row in record["rows"] if row["blocks"] <= 4096 and row["lead"] > 12 and row["said"]][:3]
    assert len(few) == 3
    for row in few:
        assert study.answer(row["number"], record["seed"])["said"] == row["said"] == row["rule"]


def test_an_interval_is_wilsons():
    low, high = study.interval(99, 100)
    assert (round(low, 4), round(high, 4)) == (0.9455, 0.9982)
    assert study.interval(0, 0) == (0.0, 1.0)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_other_checkpoints_are_answered_as_rightly():
    rows = study.run(range(200), seed=11, jobs=2)
    said = [row for row in rows if row["said"]]
    assert len(said) > 80
    assert sum(map(study.wrong, said)) <= 2
