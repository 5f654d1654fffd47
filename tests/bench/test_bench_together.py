"""The benchmark of models side by side: it starts its processes once, adds their rates, and says which one ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from click.testing import CliRunner

import warm
from bench import bench_gpu_together as bench

pytestmark = pytest.mark.study

SMALL = ("--model=tiny", "--mode=eager", "--backend=reference", "--recipe=bf16", "--seconds=0.1")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes begin with PyTorch imported."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return (warm.Popen if command[0] == sys.executable else subprocess.Popen)(command, **options)

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))


def test_two_processes_train_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "new" / "together.json"
    result = CliRunner().invoke(
        bench.main, [*SMALL, "--together=1", "--together=2", "--json", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [row["together"] for row in rows] == [1, 2]
    for row in rows:
        assert row["tokens_per_s"] >= row["fastest"] >= row["slowest"] > 0
        assert row["together"] * row["slowest"] <= row["tokens_per_s"] + 1e-6
        assert f"tiny bf16 x {row['together']}: {row['tokens_per_s']:,.0f} tokens/s" in result.output
        assert {"import", "model", "first step", "capture"} <= set(row["start"])


def test_a_process_that_ends_is_reported() -> None:
    result = CliRunner().invoke(
        bench.main, ["--model=tiny", "--recipe=mxfp5", "--backend=reference", "--together=1"]
    )
    assert result.exit_code == 1
    assert "mxfp5: a process ended with exit code 1" in result.output
