"""A pytest plugin that writes which instructions the tests of a run executed, one name a line, to $MXREF_EXECUTED.

PYTHONPATH=tests MXREF_EXECUTED=/tmp/names pytest -p gfx950.executed tests/gfx950/test_opcodes_float.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gfx950.machine import Machine
from gfx950.registers import Group

_names: set[str] = set()
_straight = Machine._straight


def _recorded(self: Machine, group: Group, start: int, stop: int) -> None:
    """Execute, and then count what was: a run ends at the first instruction that moves the program counter."""
    before = self.steps
    try:
        _straight(self, group, start, stop)
    except Exception:
        # The last one was refused, which is no test of what it does.
        stop = start + self.steps - before - 1
        raise
    else:
        stop = start + self.steps - before
    finally:
        _names.update(each.name for each in self.program.instructions[start:stop])


def pytest_configure(config: pytest.Config) -> None:
    """Record from here on."""
    Machine._straight = _recorded  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the names."""
    Path(os.environ["MXREF_EXECUTED"]).write_text("\n".join(sorted(_names)))
