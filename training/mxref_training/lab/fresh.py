"""Releases what a run leaves in its process, so that no run depends on earlier ones."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from mxref.backend import Backend
from mxref_training.log import TrainResult
from mxref_training.trainer import train


def train_afresh(*arguments: Any, backend: Backend, **options: Any) -> TrainResult:
    """Train as `mxref_training.trainer.train` does, after releasing what earlier runs have left in this process."""
    start_fresh(backend)
    return train(*arguments, backend=backend, **options)


def start_fresh(backend: Backend) -> None:
    """Release the memory of earlier runs: models, CUDA graphs and compiled code; clear the flag of exceeded range.

    Compiled kernels, and what compilers keep on the disk, stay.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes a second
        torch.compiler.reset()
    # A model, its hooks and its captured steps refer to each other.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # A run that ended within a step has not read the flag, and the next run would repeat its first step.
    backend.range_exceeded()
