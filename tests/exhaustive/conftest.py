"""Shorter sweeps for the tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_chunks(monkeypatch):
    """Shorten the chunks: every threshold is in a slice with its whole chunk, most of which lies far from it."""
    from exhaustive import elements, halves, scales

    monkeypatch.setattr(elements, "DIRECT_CHUNK", 1 << 10)
    monkeypatch.setattr(elements, "ROWS", {"reference": 1 << 6, "numba": 1 << 8})
    monkeypatch.setattr(scales, "CHUNK", 1 << 10)
    monkeypatch.setattr(scales, "BLOCKS", 1 << 8)
    monkeypatch.setattr(halves, "CHUNK", 1 << 10)
