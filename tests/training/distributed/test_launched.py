"""The command under `torchrun`: an error of all ranks, or of one, is said once, and the launcher ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launch import errors, torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CRASH = """
import os
from mxref_training import steps
take = steps.EagerSteps.take

def crashes(self, batch, step, *rest):
    if os.environ["RANK"] == "1" and step == 1:
        raise ZeroDivisionError("planted")
    return take(self, batch, step, *rest)

steps.EagerSteps.take = crashes
from mxref.cli import main
main()
"""
SMALL = (
    "--set", "run.steps=3", "--backend", "reference", "--recipe", "bf16", "--set", "run.eval_tokens=64", "--set",
    "model.vocab=280",
)  # fmt: skip


def test_a_setting_that_is_wrong_on_all_ranks_is_said_once(tmp_path: Path) -> None:
    mxref = str(Path(sys.executable).with_name("mxref"))
    done = torchrun(
        "--no-python", mxref, "train", "tiny", "--set", "run.micro_batch=1", "--out", str(tmp_path / "run"),
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    (error,) = errors(done)
    assert "run.micro_batch = 1 sequences do not split over 2 ranks" in error
    assert not (tmp_path / "run").exists()


def test_the_rank_that_crashes_is_the_root_cause_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASH)
    for side, count in (("train", 60), ("val", 8)):
        lines = [
            json.dumps({"text": f"{side} {number} " + "block scale round code " * 20})
            for number in range(count)
        ]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
    data = ("--data", str(tmp_path / "train.jsonl"), "--set", f"data.val={tmp_path / 'val.jsonl'}")
    out = tmp_path / "run"
    done = torchrun(str(script), "train", "tiny", *SMALL, *data, "--out", str(out), folder=tmp_path)
    assert done.returncode != 0
    (error,) = errors(done)
    assert "rank 1: the run stopped after 1 of 3 steps: ZeroDivisionError: planted" in error
    launcher = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in launcher
    log = (out / "log.txt").read_text()
    assert log.count("ZeroDivisionError: planted") == 1
    assert "Connection closed" not in log
