"""What all tests of training share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import warm


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run in this process wait until its files are on the disk: some hundred waits per second of training.

    That the product waits, and for what, is decided by tests/faults, whose runs are processes of their own.
    """
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Give a run that nothing interrupted, by recipe and configuration: its folder, which is only read, and result."""
    from training_setup import run

    @cache
    def trained(recipe: Any, config: Any) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, run(folder, recipe, config)

    return trained


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of a ladder that runs in this process begin with PyTorch imported.

    Those of a ladder in a process of its own, which a test interrupts or kills, start as a user's do.
    """
    starts = SimpleNamespace(Popen=warm.Popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("mxref_training.lab.queue.subprocess", starts)
