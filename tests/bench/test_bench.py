"""The benchmark times the named operations and refuses a wrong backend, and its page shows the recorded numbers."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from bench import bench_demo, machine, operations, render, timing
from bench.goals import AVX2_COPY_RATIO, COPY_RATIO, MM_RATIO
from bench.plot import charts, plot
from bench.records import newest, read
from mxref import get_backend
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref_numba import path
from places import ROOT

TINY = ["--sizes=64", "--gemm-sizes=64", "--threads=1", "--seconds=0.01", "--no-peers"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.bench_cpu", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_in_turns_tells_slow_from_fast_and_waiting_from_working() -> None:
    order = []

    def wait() -> None:
        order.append("wait")
        time.sleep(0.02)

    slow, fast = timing.in_turns(0.1, wait, lambda: order.append("go"))
    assert 20 <= slow.min_ms <= slow.median_ms
    assert slow.cpu_ms < 10
    assert fast.min_ms < 10
    assert slow.repeats == fast.repeats >= timing.LEAST_REPEATS
    assert order == ["wait", "go"] * (slow.repeats + 1)


class _OneCode(ReferenceBackend):
    """The reference, except that one code is wrong, at a place that moves."""

    name = "one-code"
    place = 0

    def _quantize(self, x: Any, plan: Any) -> tuple[Any, Any]:
        codes, scales = super()._quantize(x, plan)
        codes.reshape(-1)[self.place] ^= 1
        return codes, scales


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    "label",
    [
        "quantize float32",
        "quantize SR",
        "quantize axis 0",
        "quantize_dual, twice",
        "fake_quantize",
        "quantize MXFP8 E4M3",
    ],
)
def test_one_wrong_code_at_either_end_is_found(place: int, label: str) -> None:
    operation = next(op for op in operations.OPERATIONS if op.label == label)
    x = operations.inputs(128)[operation.dtype]
    right, wrong = get_backend("reference"), _OneCode()
    wrong.place = place
    q = right.quantize(x, operations.PLAIN)
    operations.check_bits("right", operation, operation.run(right, x, q), x)
    with pytest.raises(operations.BitsDiffer, match=f"one-code: {label}"):
        operations.check_bits("one-code", operation, operation.run(wrong, x, q), x)


def test_every_operation_passes_on_the_reference_and_checks_all_of_a_small_matrix() -> None:
    reference = get_backend("reference")
    for row in operations.measure(reference, 64, 0.0, 1):
        assert row["min_ms"] > 0
        copies = 2 if "twice" in row["operation"] else 1
        assert row["ratio"] == pytest.approx(copies * row["copy_ms"] / row["min_ms"])


WRONG = """
from mxref.reference import ReferenceBackend
from mxref_numba import path

class OneCode(ReferenceBackend):
    name = "one-code"

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        codes.reshape(-1)[-1] ^= 1
        return codes, scales

backend = OneCode()
"""


def test_a_wrong_backend_is_not_timed(tmp_path: Path) -> None:
    out, wrong = tmp_path / "out.json", tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    done = bench(*TINY, f"--backend={wrong}:backend", f"--json={out}")
    assert done.returncode == 1
    assert "one-code: quantize float32 differs from the reference; nothing is timed" in done.stderr
    assert not out.exists()


def test_a_whole_run_in_small(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(*TINY, f"--json={out}")
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    kinds = {row["kind"] for row in results["rows"]}
    assert kinds == {"operation", "gemm", "overhead", "first call"}
    measured = {row["operation"] for row in results["rows"]}
    assert measured >= COPY_RATIO.keys()
    assert measured >= MM_RATIO.keys()
    assert results["machine"]["cores"] >= 1
    assert "quantize float32" in done.stdout
    paths = {row["path"] for row in results["rows"] if row["operation"] == "quantize float32"}
    assert paths == set(path.available())


def test_bad_arguments_are_named() -> None:
    done = bench("--sizes=64,big")
    assert done.returncode == 2
    assert "64,big" in done.stderr


def test_a_busy_machine_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert machine.busy_share(0.5) > 0.5 / (machine.describe()["cores"] + 1)
        finally:
            other.kill()


def test_the_page_is_written_from_the_recorded_numbers() -> None:
    parts = render.parts()
    assert set(parts) == {"performance.inc", "performance.svg", "performance.narrow.svg"}
    results = read(newest("bench_cpu"))
    assert parts["performance.inc"].startswith(results["machine"]["processor"])
    page = (ROOT / "docs/explanation/performance.rst").read_text(encoding="utf-8")
    assert parts[render.TABLES] in page
    images = [name.replace(".narrow", "") for name in parts if name.endswith(".svg")]
    assert [name for name in images if f":: /_measured/{name}" not in page] == []


def test_the_plot_has_every_operation_and_goal() -> None:
    rows = [
        {"kind": "operation", "operation": label, "backend": backend, "size": 8, "threads": 1, "ratio": 1.37}
        for backend in ("numba", "numba-avx2", "numba-portable")
        for label in COPY_RATIO
    ]
    drawn = charts("test", partial(plot, {"rows": rows}, 8))
    for svg in drawn.values():
        assert all(label in svg for label in COPY_RATIO)
        assert svg.count(">1.37<") == len(rows)
        assert "8 x 8" in svg
    assert drawn == charts("test", partial(plot, {"rows": rows}, 8))


def test_the_page_names_what_is_below_its_goal_on_one_thread_and_on_two() -> None:
    def rows(backend: str, path: str, threads: int, ratio: float, ms: float) -> list[dict[str, Any]]:
        common = {
            "kind": "operation",
            "size": render.MAIN_SIZE,
            "backend": backend,
            "path": path,
            "threads": threads,
        }
        times = {"ratio": ratio, "min_ms": ms, "median_ms": ms, "gb_per_s": 1.0}
        return [common | times | {"operation": label} for label in ("quantize float32", "quantize H32")]

    one, two, narrow = (
        rows("numba", "avx512", 1, 1.0, 4.0),
        rows("numba", "avx512", 2, 1.0, 2.5),
        rows("numba-avx2", "avx2", 1, 0.5, 8.0),
    )
    text = render._operations({"backend": "numba", "rows": one + two + narrow})
    assert (
        "Below their goals: quantize float32 (1.00 of 1.20), quantize float32 (0.50 of 0.60, avx2).\n" in text
    )
    assert "below it: quantize float32 (1.60), quantize H32 (1.60)." in text
    assert (
        "   * - quantize float32\n     - 4.00\n     - 4.00\n     - 1.0\n     - 1.00\n     - 1.20\n     - 1.60\n"
        in text
    )
    met = [row | {"ratio": 1.2} for row in one] + [row | {"min_ms": 2.0} for row in two]
    text = render._operations({"backend": "numba", "rows": met})
    assert "\nAll goals of this table are met.\n" in text
    assert text.endswith("The goal of two threads is 1.7 times the speed of one; all operations meet it.\n")


def test_the_page_compares_the_path_avx2_with_a_product_without_bf16_instructions() -> None:
    times = {"min_ms": 6.0, "gflop_per_s": 1.0, "ratio": 0.5, "ratio_float32": 2.0}
    common = {"kind": "gemm", "size": 1024, "threads": 1} | times
    ours = common | {"operation": "scaled_gemm ordered", "backend": "numba-avx2", "path": "avx2"}
    wide = common | {"operation": "scaled_gemm ordered", "backend": "numba", "path": "avx512", "min_ms": 3.0}
    theirs = common | {"operation": "torch.mm bfloat16, AVX2", "backend": "torch", "path": "avx512"}
    text = render._gemms({"rows": [wide, ours, theirs | {"min_ms": 15.0}]})
    assert text.endswith("product: 2.5 times at 1024. The goal is 1.0 times; it is met.\n")
    text = render._gemms({"rows": [ours, theirs | {"min_ms": 5.0}]})
    assert text.endswith("product: 0.8 times at 1024. The goal is 1.0 times; it is not met.\n")
    assert "product: " not in render._gemms({"rows": [wide, ours]})


def test_the_table_of_two_paths_of_the_demo_compares_their_fastest_runs() -> None:
    here = {"processor": "P", "cores": 2, "quiet": True, "busy_share": 0.0, "date": "2026-01-02"}
    runs = [
        {"path": path, "seconds": seconds, "cpu_seconds": 2 * seconds}
        for path, seconds in (("avx512", 10.0), ("avx2", 15.0), ("avx512", 12.0), ("avx2", 14.0))
    ]
    text = bench_demo.table({"machine": here, "arms": "all", "steps": 5, "runs": runs})
    assert text.startswith(
        "`make demo` (the arm `all` and the reference, 5 steps) on P, 2 cores, quiet, 2026-01-02. "
    )
    assert text.endswith("   * - avx2, times avx512\n     - 1.40\n     - 1.40\n")


def _of_paths(*paths: str) -> dict[str, Any]:
    rows = [
        {
            "kind": "operation",
            "operation": label,
            "backend": f"numba-{path}",
            "path": path,
            "size": 8,
            "threads": 1,
        }
        | {"ratio": 0.5}
        for path in paths
        for label in COPY_RATIO
    ]
    return {"rows": rows}


def test_the_plot_marks_the_goals_of_each_path_on_its_bars() -> None:
    def marks(*paths: str) -> int:
        (axes,) = plot(_of_paths(*paths), 8).axes
        return sum(len(each.get_offsets()) for each in axes.collections)

    assert marks("avx512") == len(COPY_RATIO)
    assert marks("avx2") == len(AVX2_COPY_RATIO)
    assert marks("portable") == 0
    assert marks("avx512", "avx2", "portable") == len(COPY_RATIO) + len(AVX2_COPY_RATIO)


def test_bars_and_their_numbers_do_not_overlap() -> None:
    results = _of_paths("avx512", "avx2", "portable")
    cast = results["rows"][0] | {"operation": "cast", "backend": "torch"}
    results["rows"] += [cast, cast]  # of two processes
    figure = plot(results, 8)
    (axes,) = figure.axes
    figure.canvas.draw()
    bars = sorted((bar.get_y(), bar.get_y() + bar.get_height()) for kind in axes.containers for bar in kind)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(bars))
    assert sum(bars[-1]) / 2 == pytest.approx(len(COPY_RATIO))  # one bar lies in the middle
    height = max(text.get_window_extent().height for text in axes.texts)
    assert min(bar.get_window_extent().height for kind in axes.containers for bar in kind) >= 0.8 * height


def test_the_plot_drops_no_set_of_kernels() -> None:
    four = "avx512", "avx2", "neon", "portable"
    (axes,) = plot(_of_paths(*four), 8).axes
    assert len(axes.containers) == 4
    with pytest.raises(ValueError, match="4 colours, but 5 sets of kernels"):
        plot(_of_paths(*four, "sve"), 8)


@pytest.mark.parametrize(
    ("path", "goals"),
    [("avx512", ["1.20", "1.50"]), (None, ["1.20", "1.50"]), ("avx2", ["0.60", ""]), ("portable", ["", ""])],
)
def test_each_path_has_the_goals_that_were_set_for_it(path: str | None, goals: list[str]) -> None:
    # The goal of the product is one against BF16 instructions, which CPUs of the path avx2 do not have.
    labels = {"operation": "quantize float32", "gemm": "scaled_gemm ordered"}
    rows = [
        {"kind": kind, "operation": label, "backend": "numba", "threads": 1}
        | ({"path": path} if path else {})
        for kind, label in labels.items()
    ]
    assert [render._goal(row) for row in rows] == goals
    assert {render._goal(row | {"threads": 2}) for row in rows} == {""}


def test_quantized_slabs_lie_where_the_matrix_has_them() -> None:
    x = operations.inputs(128)["float32"]
    q = get_backend("reference").quantize(x, operations.SR, placement=Placement(operations.STREAM))
    codes, scales = operations._expected(x, operations.SR, 1, slice(64, 128))
    assert np.array_equal(q.codes[64:], codes)
    assert np.array_equal(q.scales[64:], scales)
