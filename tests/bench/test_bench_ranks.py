"""The benchmark of many ranks: in one process it times steps too, and adds rows to a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner

from bench import bench_gpu_ranks as bench

pytestmark = pytest.mark.study

SMALL = ("--model=tiny", "--layers=1", "--backend=reference", "--recipe=bf16", "--steps=1")


def test_rows_of_two_calls_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "new" / "ranks.json"
    asked = ("--batch=4", "--clip=0", "--drawn", "--label=losses", "--json", str(out))
    for sequences in (2, 4):
        result = CliRunner().invoke(
            bench.main, [*SMALL, *asked, f"--sequences={sequences}"], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        assert "bf16 none x 1: " in result.output
    halves, whole = json.loads(out.read_text())["ranks"]
    assert [row["deterministic"] for row in (halves, whole)] == [True, True]
    assert (halves["micro_batches"], whole["micro_batches"]) == (2, 1)
    assert (whole["label"], whole["recipe"], whole["ranks"]) == ("losses", "bf16", 1)
    assert whole["layout"] == {"replicate": 1, "shard": 1, "tensor": 1}
    assert len(halves["losses"]) == bench.WARM_UP + 1
    assert halves["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6)
    assert whole["tokens_per_s"] == whole["tokens_per_s_per_gpu"] > 0
    assert len(whole["weights"]) == 64


@pytest.mark.parametrize("drawn", [False, True])
def test_kernels_are_chosen_by_their_time_unless_losses_are_compared(
    monkeypatch: pytest.MonkeyPatch, drawn: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(bench, "row_of", lambda *_: seen.append(torch.backends.cudnn.benchmark) or {})
    monkeypatch.setattr(bench, "text_of", lambda row: "a row")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    asked = [*SMALL, "--drawn"] if drawn else SMALL
    result = CliRunner().invoke(bench.main, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert seen == [not drawn]
