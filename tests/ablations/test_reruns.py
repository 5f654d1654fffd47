"""Runs that were made twice have the same bits."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from ablations.ladders import lines as results
from ablations.sentences import PROSE
from bench.records import RECORDS

pytestmark = pytest.mark.study

STOPPED = sorted((RECORDS / "paper_50m_stopped").iterdir())
"""Runs that were stopped before they had a result: their whole logs, and what identifies them."""


def _read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def test_reruns_have_the_bits_of_the_first_runs() -> None:
    once = {result["name"]: result for result in results("readings")}
    again = results("readings_reruns")
    assert len(again) == 2
    for rerun in again:
        first = once[rerun["name"]]
        assert rerun["record"]["environment"]["started"] != first["record"]["environment"]["started"]
        assert rerun["key"] == first["key"]
        assert rerun["metrics"] == first["metrics"]
        assert rerun["record"]["losses"] == first["record"]["losses"]


@pytest.mark.parametrize("folder", STOPPED, ids=lambda folder: folder.name)
def test_a_run_that_was_stopped_has_the_log_of_the_run_that_replaced_it(folder: Path) -> None:
    (replaced,) = (result for result in results("paper_50m") if result["name"] == folder.name)
    record, stopped = replaced["record"], _read(folder / "run.json")
    log = lzma.decompress((folder / "metrics.jsonl.xz").read_bytes())
    assert _read(folder / "arm.json") == replaced["key"]
    assert hashlib.sha256(log).hexdigest() == replaced["metrics"]
    # All steps and evaluations are in the log, so what was left was the evaluation in other arithmetic.
    lines = [json.loads(line) for line in log.splitlines()]
    validated = [[line["step"], line["val_loss"]] for line in lines if "val_loss" in line]
    assert validated == record["losses"]
    trained = [line["step"] for line in lines if "loss" in line]
    assert (trained[-1], validated[-1][0]) == (4000, 4000)
    assert f"of {len(trained)} training and {len(validated)} validation losses" in PROSE
    # They are two runs, on hosts of different size.
    first, second = stopped["hardware"], record["environment"]["hardware"]
    assert stopped["started"] < record["environment"]["started"]
    assert stopped["versions"] == record["environment"]["versions"]
    assert (first.pop("cpus"), second.pop("cpus")) == (64, 32)
    assert first == second
    assert f"`{folder.name}`" in PROSE


def test_both_runs_that_were_stopped_are_compared() -> None:
    assert [folder.name for folder in STOPPED] == ["all-sr", "fprop-dgrad-sr"]
