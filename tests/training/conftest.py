"""What all tests of training share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run in this process wait until its files are on the disk: some hundred waits per second of training.

    That the product waits, and for what, is decided by tests/faults, whose runs are processes of their own.
    """
    monkeypatch.setattr(os, "fsync", os.fstat)
