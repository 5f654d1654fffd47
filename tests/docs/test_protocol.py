"""The page of the protocol against the ladders that it fixes: arms, seeds, claims, digests and lengths."""

from __future__ import annotations

import re

import pytest

from places import ROOT

pytest.importorskip("mxref_training.lab.ladder")

from mxref_training.lab.ladder import Ladder, load_ladder

PAGE = (ROOT / "docs" / "explanation" / "ablation-protocol.rst").read_text(encoding="utf-8")
ROW = re.compile(r"   \* - `([\w-]+)`\n     - (\d)\n     - (.+)\n     - `([0-9a-f]{12})`\n")


@pytest.mark.parametrize("name", ["readings", "tseng"])
def test_arms_of_the_page_are_those_of_the_ladder(name: str) -> None:
    ladder = load_ladder(name)
    table = PAGE.split(f".. list-table:: Arms of `{name}`\n")[1].split(".. list-table::")[0]
    rows = [
        (arm.name, str(arm.seeds), arm.paper.overhead if arm.paper else "–", ladder.resolve(arm).digest)
        for arm in ladder.arm
    ]
    assert ROW.findall(table) == rows


def lengths(ladder: Ladder) -> tuple[str, str, str]:
    steps = ladder.train.run["steps"]
    tokens = f"{steps * 16_384 / 1e6:.1f}M ({steps:,} steps)"
    return f"`{ladder.train.preset}`", tokens, str(len(ladder.arm))


@pytest.mark.parametrize("name", ["readings", "paper_50m", "tseng"])
def test_sizes_of_the_page_are_those_of_the_ladder(name: str) -> None:
    (found,) = re.findall(rf"   \* - `{name}`\n     - (.+)\n     - (.+)\n     - (.+)\n     - .+\n", PAGE)
    assert found == lengths(load_ladder(name))
