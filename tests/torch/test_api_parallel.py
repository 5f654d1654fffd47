"""Data parallelism on the CPU, plain and sharded: a followed handle gives every rank random bits of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from ranks import assert_ranks_print


def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    assert_ranks_print(["ddp", "fsdp", "policy"], "api_ranks.py", tmp_path)
