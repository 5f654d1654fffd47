"""Spreads a test run over cores, and adds to its header how many clauses of the specification it checks."""

from __future__ import annotations

import csv
import gc
import os
from pathlib import Path

import pytest

from clause_index import load_clauses
from mxref.cores import cores

TESTS = Path(__file__).parent
SLOW_FILES = TESTS / "slow_files.csv"
"""The slowest test files in the order in which they begin, which docs/reference/tests.rst shows."""

gc.disable()
"""The import of the tests makes millions of objects and hardly any garbage: the search for it took 40 % of the time."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[object]) -> None:
    """Give the processes of a parallel run a share of the cores each, except where the environment has a number.

    Threads of two processes on one core wait for each other busily: a training step then takes four times as long.
    Numba's keep their number, which its tests look at, so threads sleep while they wait: a fifth less CPU time.
    """
    gc.enable()  # this process collects no tests
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, cores() // len(specs))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files, so that no process of a parallel run is left alone with one at the end."""
    with SLOW_FILES.open(encoding="utf-8", newline="") as file:
        first = {TESTS / row["file"]: place for place, row in enumerate(csv.DictReader(file))}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_collection_finish() -> None:
    """Collect garbage from now on, and spare the collector what is imported: to go through it takes 0.2 s or more.

    It would do so every few seconds, as a test makes many objects and keeps few.
    """
    _spare_what_stays()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Spare the collector what a file leaves for the rest of the process: modules, kernels, the kit's checks."""
    if nextitem is not None and nextitem.path != item.path:
        _spare_what_stays()


def _spare_what_stays() -> None:
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Return how many clauses of the specification the collected tests check."""
    checked = {clause for item in items for mark in item.iter_markers("clause") for clause in mark.args}
    clauses = load_clauses().read_chapters().clauses
    return f"specification: {len(checked & set(clauses))} of {len(clauses)} clauses are checked by this run"
