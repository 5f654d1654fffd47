"""The registered text of the protocol against the ladders that it fixes: arms, seeds, claims, digests and lengths."""

from __future__ import annotations

import re

import pytest

from places import ROOT

pytest.importorskip("mxref_training.lab.ladder")

from mxref_training.lab.answers import Answers
from mxref_training.lab.contrasts import equal_power, smallest_difference
from mxref_training.lab.ladder import Ladder, load_ladder
from mxref_training.lab.measures import Measures

PAGE = (ROOT / "docs" / "records" / "ablation_protocol_2026-11-24.txt").read_text(encoding="utf-8")
EXPERIMENTS = (ROOT / "docs" / "records" / "experiments_2026-11-27.txt").read_text(encoding="utf-8")
ROW = re.compile(r"   \* - `([\w-]+)`\n     - (\d)\n     - (.+)\n     - `([0-9a-f]{12})`\n")
SHORT = re.compile(r"   `([\w-]+)`,(\d),`([0-9a-f]{12})`\n")
"""A row of an experiment's arms, which carry no claim."""


@pytest.mark.parametrize("name", ["readings", "tseng"])
def test_arms_of_the_page_are_those_of_the_ladder(name: str) -> None:
    ladder = load_ladder(name)
    table = re.split(rf"\.\. list-table:: Arms of `{name}`.*\n", PAGE)[1].split(".. list-table::")[0]
    rows = [
        (arm.name, str(arm.seeds), arm.paper.overhead if arm.paper else "–", ladder.resolve(arm).digest)
        for arm in ladder.arm
    ]
    assert ROW.findall(table) == rows


@pytest.mark.parametrize("name", ["mx64", "shrinkage", "annealed"])
def test_arms_of_an_experiment_are_those_of_the_ladder(name: str) -> None:
    ladder = load_ladder(name)
    table = re.split(rf"\.\. csv-table:: Arms of `{name}`.*\n", EXPERIMENTS)[1].split(".. csv-table::")[0]
    assert SHORT.findall(table) == [
        (arm.name, str(arm.seeds), ladder.resolve(arm).digest) for arm in ladder.arm
    ]
    assert not any(arm.paper for arm in ladder.arm)


def test_power_of_the_page_is_that_of_the_ladders() -> None:
    table = PAGE.split(".. list-table:: Power of the planned seeds\n")[1].split("\nSo `readings`")[0]
    row = (
        r"   \* - `(\w+)`\n     - (\d+)\n     - (\d+)\n     - (\d)\n     - ([\d.]+) σ\n     - ([\d.]+) nats\n"
    )
    found = re.findall(row, table)
    assert len(found) == 4
    for name, contrasts, freedom, pairs, smallest, largest in found:
        ladder = load_ladder(name)
        power = Answers(ladder, Measures({}, {}, {}), max(arm.seeds for arm in ladder.arm)).power()
        assert (len(ladder.contrast), power["freedom"]) == (int(contrasts), int(freedom))
        planned = {min(ladder.named(side).seeds for side in (c.arm, c.against)) for c in ladder.contrast}
        assert int(pairs) in planned
        counts = (int(pairs), int(freedom))
        assert smallest_difference(1.0, *counts, int(contrasts)) == pytest.approx(float(smallest), abs=0.005)
        assert (
            equal_power(float(largest) - 0.00005, *counts)
            >= 0.8
            > equal_power(float(largest) + 0.00005, *counts)
        )
    # The sentence below the table.
    assert smallest_difference(0.0157, 5, 84, 32) <= 0.029 < smallest_difference(0.0158, 5, 84, 32)


def lengths(ladder: Ladder) -> tuple[str, str, str]:
    steps = ladder.train.run["steps"]
    tokens = f"{steps * 16_384 / 1e6:.1f}M ({steps:,} steps)"
    return f"`{ladder.train.preset}`", tokens, str(len(ladder.arm))


@pytest.mark.parametrize("name", ["readings", "paper_50m", "tseng"])
def test_sizes_of_the_page_are_those_of_the_ladder(name: str) -> None:
    (found,) = re.findall(rf"   \* - `{name}`\n     - (`lab_.+)\n     - (.+)\n     - (.+)\n     - .+\n", PAGE)
    assert found == lengths(load_ladder(name))
