"""Parameters of a test of which `make test` needs a few, and `make test-studies` takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], *few: Any) -> list[Any]:
    """Return the values as parameters of a test; each that is not among the few is a study."""
    found = list(values)
    assert all(value in found for value in few), f"{few} of {found}"
    return [value if value in few else pytest.param(value, marks=pytest.mark.study) for value in found]
