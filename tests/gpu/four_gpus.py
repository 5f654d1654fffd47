"""Ranks that `test_gpu_four` starts by `torchrun`: `four_gpus.py FOLDER BACKEND [STOP]`.

Without STOP they make the runs of a comparison that need their number; with it they go on with one run until that step.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu.two_gpus import RECIPES, SR_H16, config_of
from mxref.discovery import get_backend
from mxref_training.config import ParallelConfig, TrainConfig
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.ranks import Ranks
from training_setup import run

STEPS = 6
SPLIT, GROUPS = ParallelConfig(), ParallelConfig(replicate=2)


def four_config(parallel: ParallelConfig, **changes: int | bool) -> TrainConfig:
    """Return a short run whose micro-batch has a sequence for each of four ranks."""
    return replace(config_of(None, **{"steps": STEPS, **changes}), parallel=parallel)


def main(folder: Path, backend: str, stop: str = "") -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with connected(started_ranks()) as ranks:
        shared: dict[str, Any] = {"backend": get_backend(backend), "ranks": ranks}
        if stop:
            run(folder, SR_H16, four_config(SPLIT), stop_after=int(stop), **shared)
        else:
            layouts(ranks, folder, shared)


def layouts(ranks: Ranks, folder: Path, shared: dict[str, Any]) -> None:
    """Train in groups that split on four ranks; on two, take the sequences of each group in turns."""
    for name, recipe in RECIPES.items():
        if ranks.world == 4:
            run(folder / f"groups-{name}", recipe, four_config(GROUPS), **shared)
        else:
            run(folder / f"turns-{name}", recipe, four_config(SPLIT, micro_batch=2), **shared)
    if ranks.world == 4:
        run(folder / "whole", SR_H16, four_config(SPLIT), **shared)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
