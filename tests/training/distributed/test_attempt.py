"""Ranks that are started again meet each other, and not what the ranks before them have left in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from mxref_training.distributed import connect as module


def test_an_attempt_reads_nothing_of_the_one_before() -> None:
    """The second rank comes first, and finds the name of an attempt before, whose ranks all came or did not."""
    shared = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        for attempt in range(4):
            second = pool.submit(module._of_this_attempt, shared, 1, 2)
            time.sleep(0.05)
            assert not second.done()
            first = pool.submit(module._of_this_attempt, shared, 0, 2).result(60)
            first.set("said", f"in attempt {attempt}")
            assert second.result(60).get("said").decode() == f"in attempt {attempt}"
            if attempt % 2:
                shared.set(module._ATTEMPT, "ended")


def test_a_rank_that_does_not_come_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTING", timedelta(milliseconds=50))
    for rank, problem in ((0, "timeout"), (1, "rank 0 did not come")):
        with pytest.raises(RuntimeError, match=f"(?i){problem}"):
            module._of_this_attempt(dist.HashStore(), rank, 3)
