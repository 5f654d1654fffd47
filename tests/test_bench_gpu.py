"""The page of GPU numbers is what was recorded, and nothing else."""

import json

import pytest

from bench import render_gpu


def record(tmp_path, date="2026-11-20"):
    """A run of two operations, two products and two errors, and of its tests; written as the tools write them."""
    machine = {"date": date, "gpu": "NVIDIA H200", "driver": "1.2", "torch": "2.11", "triton": "3.6"}

    def row(name, size, ms, per_second, share):
        return {"name": name, "size": size, "ms": ms, "per_second": per_second, "share": share}

    def error(k, *logs):
        ways = ("fp8", "fp8 fast", "ordered", "bf16")
        return {"pattern": "Student-t(3)", "k": k, "log2": dict(zip(ways, logs, strict=True))}

    bench = {
        "machine": machine,
        "copy_tb_per_s": 4.166,
        "quantize": [row("row, RNE", 4096, 0.0123, 3e12, 0.7), row("row, RNE", 8192, 0.05, 3.4e12, 0.815)],
        "gemm": [
            row("cuBLAS bf16", 8192, 1.4, 785e12, 1.0),
            row("MXFP4 ordered", 8192, 1.39, 791e12, 1.007),
        ],
        "error": [
            error(128, -13.5, -9.6, None, None),
            error(512, -12.1, -11.0, None, -20.0),
        ],
    }  # fmt: skip
    tests = {"date": date, "gpu": "NVIDIA H200", "counts": {"passed": 7, "failed": 0, "skipped": 1}, "seconds": 61.2,
             "cases": {"test_all": 4294967296}, "tests": []}  # fmt: skip
    files = tmp_path / "bench.json", tmp_path / "tests.json"
    for path, content in zip(files, (bench, tests), strict=True):
        path.write_text(json.dumps(content))
    return files


def test_tables_say_what_the_records_say(tmp_path):
    bench, tests = (json.loads(path.read_text()) for path in record(tmp_path))
    text = render_gpu.tables_text(bench, tests, ["a.json", "b.json"])
    lines = [line.strip(" *-") for line in text.splitlines()]
    at = lines.index("row, RNE")
    assert lines[at + 1 : at + 4] == ["12", "50", "0.81"]
    at = lines.index("MXFP4 ordered")
    assert lines[at + 1 : at + 3] == ["791", "1.01"]
    at = lines.index("Student-t(3)")
    assert lines[at + 1 : at + 5] == ["2^-12.1 (K = 512)", "2^-9.6 (K = 128)", "0", "2^-20.0 (K = 512)"]
    assert "7 passed, 0 failed, 1 skipped, in 61 s" in text
    assert "4,294,967,296" in text
    assert "4.17 TB/s" in text


def test_records_are_kept_by_gpu_and_date_and_the_newest_is_shown(tmp_path):
    for date in ("2026-11-20", "2027-01-02", "2026-12-31"):
        source, _ = record(tmp_path, date)
        kept = render_gpu.keep("bench_gpu", source, tmp_path / "docs")
        assert kept.name == f"bench_gpu_nvidia-h200_{date}.json"
    assert render_gpu.newest("bench_gpu", tmp_path / "docs").name == "bench_gpu_nvidia-h200_2027-01-02.json"
    with pytest.raises(SystemExit, match=r"no test_gpu_\*.json"):
        render_gpu.newest("test_gpu", tmp_path / "docs")


def test_without_a_record_of_tests_the_page_says_nothing_of_them(tmp_path):
    bench, tests = (json.loads(path.read_text()) for path in record(tmp_path))
    whole, part = (render_gpu.tables_text(bench, t, ["a.json"]) for t in (tests, None))
    assert whole.startswith(part)
    assert "What is proved there" in whole
    assert "What is proved there" not in part


def test_the_page_shows_the_newest_records():
    for name, text in render_gpu.shown().items():
        assert (render_gpu.DOCS / name).read_text(encoding="utf-8") == text
    for path in render_gpu.DOCS.glob("data/test_gpu_*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["counts"]["failed"] == 0
