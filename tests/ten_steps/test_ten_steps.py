"""The tool that compares two trees, and what of its runs depends on no processor."""

import json

import pytest

from mxref.recipe_files import recipe_from_table
from places import ROOT
from ten_steps.__main__ import SIZES, arms, differences, train

LOSSES = {"all-sr": (5.675, 4.271), "all-sr-captured": (5.675, 4.271), "fp8-seed2": (5.714, 4.260)}
"""Training loss of the first and of the last step; 0.01 is more than two processors differ by."""


def test_steps_of_three_arms(tmp_path):
    found = train(ROOT, tmp_path, LOSSES)
    for name, (first, last) in LOSSES.items():
        lines = [json.loads(line) for line in found[name].splitlines()]
        steps = [line for line in lines if "lr" in line]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
        assert [line["tokens"] for line in lines] == [128 * line["step"] for line in lines]
        warmup = SIZES["optim.warmup"]  # of the setting; the preset's is another
        assert [line["lr"] for line in steps] == [2e-3 * min(1, (n + 1) / warmup) for n in range(10)]
        assert (steps[0]["loss"], steps[-1]["loss"]) == pytest.approx((first, last), abs=0.01)


def test_the_arms_are_fourteen_recipes():
    digests = [recipe_from_table(recipe).digest for recipe, _ in arms().values()]
    assert (len(digests), len(set(digests))) == (
        16,
        13,
    )  # two seeds of FP8 share one, and captured arms repeat


def test_a_byte_that_differs_is_named():
    old = {"fp8": b'{"step": 1}\n{"step": 2}\n', "bf16": b'{"step": 1}\n'}
    assert list(differences(old, old)) == []
    assert list(differences(old, old | {"fp8": b'{"step": 1}\n{"step": 3}\n'})) == [
        'fp8: {"step": 2} and {"step": 3}'
    ]
    assert list(differences(old, old | {"bf16": b""})) == ["bf16: the number of lines"]
