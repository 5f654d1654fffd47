"""Two ranks that `test_gpu_two` starts by `torchrun`: each layout on two GPUs beside one process on one of them.

`python two_gpus.py layouts FOLDER BACKEND` makes all runs of the comparison, and `train FOLDER BACKEND` one run whose
rank may be killed. With the backend of a CPU both ranks talk through gloo.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from mxref.discovery import get_backend
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_training.config import ParallelConfig, TrainConfig
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.ranks import Ranks
from training_setup import CONFIG, change, run

LAYOUTS = {"shard": (1, 2, 1), "replicate": (2, 1, 1), "tensor": (1, 1, 2)}
"""Ranks along `replicate`, `shard` and `tensor`: FSDP, HSDP with whole copies, tensor parallelism."""
SR_H16 = recipe_from_table(
    {"dialect": "amd", "gemm": "ordered", "all": {"rounding": "sr", "hadamard": 16, "signs": "fixed"}}
)
RECIPES: dict[str, Recipe] = {"bf16": load_recipe("bf16"), "fp8": load_recipe("fp8"), "sr_h16": SR_H16}
STEPS, KILLED_STEPS = 4, 60


def config_of(layout: str | None, **changes: int | bool) -> TrainConfig:
    """Return a short run without clipping, whose norm several ranks add in another order."""
    config = change(
        CONFIG,
        **{"batch": 4, "micro_batch": 4, "steps": STEPS, "eval_every": 2, "eval_tokens": 128} | changes,  # type: ignore[arg-type]
    )
    model = replace(CONFIG.model, layers=2, width=128, heads=4, ffn=192)
    parallel = ParallelConfig(*LAYOUTS[layout]) if layout else None
    return replace(config, model=model, parallel=parallel, optim=replace(config.optim, clip=0.0))


def layouts(ranks: Ranks, folder: Path, backend: str) -> None:
    """Train in each layout by each recipe; one process takes the parts of the batch in turns."""
    shared = {"backend": get_backend(backend), "ranks": ranks}
    for name, recipe in RECIPES.items():
        for layout in LAYOUTS:
            run(folder / f"{layout}-{name}", recipe, config_of(layout), **shared)
        if ranks.first:
            run(folder / f"alone-{name}", recipe, config_of(None, micro_batch=2), backend=shared["backend"])
        ranks.gather(None)
    run(folder / "tensor-again", SR_H16, config_of("tensor"), **shared)
    resumed(ranks, folder / "resumed", backend)
    for kind, background in (("foreground", False), ("background", True)):
        config = config_of("shard", steps=6, checkpoint_every=2, async_checkpoint=background)
        run(folder / kind, "fp8", config, **shared)
    run(folder / "undisturbed", SR_H16, killed_config(), **shared)


def resumed(ranks: Ranks, out: Path, backend: str) -> None:
    """Train two steps on two ranks, two on one, and two on two again."""
    given = {"backend": get_backend(backend)}
    two, one = config_of("shard", steps=6), config_of(None, steps=6)
    run(out, SR_H16, two, ranks=ranks, stop_after=2, **given)
    if ranks.first:
        run(out, SR_H16, one, stop_after=4, **given)
    ranks.gather(None)
    run(out, SR_H16, two, ranks=ranks, **given)


def killed_config() -> TrainConfig:
    """Return the run of which a rank is killed, long enough for that."""
    return config_of("shard", steps=KILLED_STEPS, eval_every=20, checkpoint_every=4)


def main(what: str, folder: Path, backend: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with connected(started_ranks()) as ranks:
        if what == "layouts":
            layouts(ranks, folder, backend)
        else:
            run(folder, SR_H16, killed_config(), backend=get_backend(backend), ranks=ranks)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
