"""Ranks that are started again meet each other, and not what the ranks before them have left in the store."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from mxref_training.distributed import connect as module


def test_an_attempt_reads_nothing_of_the_one_before() -> None:
    """The second rank comes first, finds the name of the attempt before, and waits for the first rank all the same."""
    shared = dist.HashStore()
    names: list[bytes] = []

    def joined(pool: ThreadPoolExecutor, rank: int) -> Future[dist.Store]:
        return pool.submit(module._of_this_attempt, shared, rank, 2)

    with ThreadPoolExecutor(2) as pool:
        for attempt in range(3):
            answer = f"mxref/{names[-1].decode()}/1" if names else ""
            before = shared.get(answer) if names else b""
            second = joined(pool, 1)
            while names and shared.get(answer) == before:
                assert not second.done()
                time.sleep(0.001)
            first, second_store = joined(pool, 0).result(60), second.result(60)
            names.append(shared.get("mxref/attempt"))
            first.set("said", f"in attempt {attempt}")
            assert second_store.get("said").decode() == f"in attempt {attempt}"
    assert len(set(names)) == 3


def test_a_rank_that_does_not_come_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTING", timedelta(milliseconds=50))
    for rank, problem in ((0, "timeout"), (1, "rank 0 did not come")):
        with pytest.raises(RuntimeError, match=f"(?i){problem}"):
            module._of_this_attempt(dist.HashStore(), rank, 3)
