"""What a run leaves in its process is released before the next one, so that no run depends on those before it."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from mxref.backend import Backend
from mxref_training.run.loop import train
from mxref_training.run.outcome import TrainResult


def train_afresh(*arguments: Any, backend: Backend, **options: Any) -> TrainResult:
    """Train as `mxref_training.run.loop.train` does, after releasing what runs before have left in this process."""
    start_fresh(backend)
    return train(*arguments, backend=backend, **options)


def start_fresh(backend: Backend) -> None:
    """Release the memory of runs before: models, CUDA graphs and compiled code; forget the range that they exceeded.

    Compiled kernels, and what compilers keep on the disk, stay.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes a second
        torch.compiler.reset()
    # A model, its hooks and its captured steps refer to each other.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # A run that ended within a step has not asked; the next one would repeat its first step for it.
    backend.range_exceeded()
