"""Ranks wait for the first one, which may read data for hours, longer than a collective waits."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from launch import ended, start


def test_ranks_wait_longer_than_a_collective_and_stop_when_the_first_fails() -> None:
    (code, first), (other_code, other) = ended(start("waiting_ranks.py", 2))
    assert "rank 0 was there" in first
    assert "rank 1 was there" in other, other
    assert "timed out" not in (first + other).lower()
    assert (code, other_code) == (1, 1)
    assert "ZeroDivisionError: planted" in first
    assert "PeerStopped: rank 0 has failed" in other
    assert "planted" not in other
