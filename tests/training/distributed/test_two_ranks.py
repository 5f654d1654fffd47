"""Two ranks over gloo on a CPU take the steps of one process, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from launch import assert_all_pass


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    assert_all_pass("two_ranks.py", 2, str(tmp_path))
