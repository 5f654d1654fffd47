"""Adds to the header of a test run how many clauses of the specification it checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXTENSION = Path(__file__).parent.parent / "docs" / "_ext"


def load_clauses() -> ModuleType:
    """Return `docs/_ext/clauses.py`, which is no part of any package."""
    if "clauses" not in sys.modules:
        spec = importlib.util.spec_from_file_location("clauses", EXTENSION / "clauses.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["clauses"] = module
        spec.loader.exec_module(module)
    return sys.modules["clauses"]


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Return how many clauses of the specification the collected tests check."""
    checked = {clause for item in items for mark in item.iter_markers("clause") for clause in mark.args}
    clauses = load_clauses().read_chapters().clauses
    return f"specification: {len(checked & set(clauses))} of {len(clauses)} clauses are checked by this run"
