"""Tensor parallelism and HSDP over gloo on a CPU, held to one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from launch import assert_all_pass


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "axes", [(1, 1, 2), (1, 2, 2), (2, 2, 1)], ids=["tensor", "shard x tensor", "replicate x shard"]
)
def test_layouts_of_ranks_are_one_process(axes: tuple[int, int, int], tmp_path: Path) -> None:
    replicate, shard, tensor = axes
    assert_all_pass("layouts.py", replicate * shard * tensor, str(tmp_path), *map(str, axes))
