"""Skips tests on machines without a GPU, spreads processes over GPUs, and writes the summary that the pages show."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, MutableMapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
EARLY = (
    "test_gpu_four.py", "test_gpu_two.py", "test_gpu_captured_runs.py", "test_gpu_captured_ranks.py",
    "test_gpu_compiled.py", "test_gpu_recompute.py", "test_gpu_training.py",
)  # fmt: skip
"""Files with the longest tests: these begin, so that no process is left alone with one at the end."""
LATE = ("test_gpu_conformance.py",)
"""Files of many tests of all lengths: these fill the gaps."""
_record: dict[str, Any] = {"tests": [], "cases": {}}


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def has_gpu() -> bool:
    if not has_torch():
        return False
    import torch

    return bool(torch.cuda.is_available())


def spread(environment: MutableMapping[str, str]) -> None:
    """Give each process of pytest-xdist another one of several GPUs as its first; it sees all of them."""
    number = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number and has_torch():
        import torch

        given = environment.get("CUDA_VISIBLE_DEVICES")
        seen = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
        if len(seen) > 1:
            first = int(number) % len(seen)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first:] + seen[:first])


def turn_of(item: pytest.Item) -> int:
    """Return a number by which tests on GPUs are sorted; others stay before them, in their order."""
    name = item.path.name
    if HERE not in item.path.parents:
        return -1
    return EARLY.index(name) if name in EARLY else len(EARLY) + (name in LATE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn_of)
    missing = None if has_gpu() else pytest.mark.skip(reason="no GPU that torch sees, or no triton")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(missing)


def pytest_configure(config: pytest.Config) -> None:
    # The path alone gives the packages, but not the names of backends, for which most tests ask.
    if has_gpu() and "triton" not in entry_points(group="mxref.backends").names:
        pytest.exit(
            "the backends are not installed here: pip install --no-deps . in the Python of the GPU tests", 2
        )
    _record["start"] = time.monotonic()
    spread(os.environ)
    # pytest-xdist has this marker; where it is not installed, nobody asks for groups.
    config.addinivalue_line("markers", "xdist_group(name): tests that one process runs")


@pytest.fixture
def cases(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Tell the summary how many cases a test compared; properties reach it from other processes too."""
    return lambda number: record_property("cases", int(number))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        name = re.sub(r"@[a-z -]+$", "", report.nodeid.rpartition("/")[2])  # pytest-xdist adds the group
        _record["tests"].append(
            {"test": name, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        )
        count = sum(number for key, number in report.user_properties if key == "cases")
        if count:
            test = name.partition("[")[0]
            _record["cases"][test] = _record["cases"].get(test, 0) + count


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker of pytest-xdist reports to the process that started it.
    if not _record["tests"] or not has_gpu() or hasattr(session.config, "workerinput"):
        return
    import torch
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.split() if not torch.version.hip else []  # fmt: skip
    outcomes = [t["outcome"] for t in _record["tests"]]
    summary = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "counts": {o: outcomes.count(o) for o in ("passed", "failed", "skipped")},
        "seconds": round(time.monotonic() - _record["start"], 1),
        "cases": _record["cases"],
        "tests": _record["tests"],
    }
    out = Path(os.environ.get("OUT") or "runs/gpu")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tests.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
