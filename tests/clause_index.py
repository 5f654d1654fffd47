"""The clauses of the specification, as the extension of the documentation reads them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
