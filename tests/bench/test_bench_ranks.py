"""The benchmark of many ranks: in one process it times steps too, and adds rows to a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner

from bench import bench_gpu_ranks as bench
from bench import render_ranks
from bench.spans import shares

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


def test_the_tables_compare_with_one_gpu(tmp_path: Path) -> None:
    shape = {"parameters": 8_030_261_248, "layers": 32, "seq_len": 8192}

    def row(label: str, ranks: int, recipe: str, rate: float, **more: object) -> dict[str, object]:
        speed = {
            "ms": 10.0,
            "tokens_per_s": rate * ranks,
            "tokens_per_s_per_gpu": rate,
            "tflops_per_gpu": 1.0,
        }
        return {
            "label": label, "ranks": ranks, "recipe": recipe, "compile": "block", "peak_gib": 50.0, "shape": shape,
            "sequences": 1, "losses": [], "layout": {"replicate": 1, "shard": ranks, "tensor": 1}, **speed, **more,
        }  # fmt: skip

    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-22", "driver": ""}
    files = [tmp_path / "x2.json", tmp_path / "x4.json"]
    two = [
        row("losses", 1, "fp8", 1.0, losses=[3.0, 2.0], weights="a"),
        row("losses", 2, "fp8", 1.0, losses=[3.0, 2.5], weights="b"),
        row("weak", 1, "fp8", 1000.0),
        row("weak", 2, "fp8", 970.0),
        row("weak", 1, "fp8", 2000.0, captured=True),
        row("weak", 2, "fp8", 1900.0, captured=True, idle_ms=0.25, nccl_alone_ms=1.5),
        row("weak", 2, "fp8", 1960.0, captured=True, kept=True),
        row("weak", 2, "fp8", 1980.0, captured=True, layout={"replicate": 2, "shard": 1, "tensor": 1}),
    ]
    four = [
        row("full", 4, "bf16", 5000.0),
        row("full", 4, "mxfp4_h16", 6000.0),
        row("full", 2, "bf16", 4000.0),
    ]
    for file, rows in zip(files, (two, four), strict=True):
        file.write_text(json.dumps({"machine": machine, "ranks": rows}))
    assert render_ranks.keep(files, tmp_path).name == "ranks_gpu_nvidia-h200_2026-11-22.json"
    text = render_ranks.parts(tmp_path)["ranks_gpu.inc"]
    for said in (
        "1 of 2",
        "step 2",
        "not equal",
        "0.970",
        "0.950",
        "0.980",
        "0.990",
        "split, kept",
        "whole",
        "- 1.5",
        "- 1.20",
        "8.03 billion",
        "6,000",
    ):
        assert said in text, said
    assert "no record" in render_ranks.parts(tmp_path / "empty")["ranks_gpu.inc"]


def test_time_is_shared_among_kernels_nccl_and_nothing() -> None:
    spans = [("gemm", (0.0, 4.0)), ("ncclDevKernel", (3.0, 6.0)), ("fold", (5.0, 5.5)), ("gemm", (8.0, 10.0))]
    assert shares(spans) == {"nccl_alone": 1.5, "idle": 2.0}
    assert shares([]) == {"nccl_alone": 0.0, "idle": 0.0}
    row = {"ms": 10.0, "idle_ms": 2.0, "nccl_alone_ms": 1.5}
    assert bench.diagnosis(row) == "the GPU waits for Python for 20% of the step"
    assert bench.diagnosis(row | {"idle_ms": 0.1}) == "communication that nothing hides for 15% of the step"
    assert bench.diagnosis(row | {"idle_ms": 0.1, "nccl_alone_ms": 0.1}) == "the GPU computes"
