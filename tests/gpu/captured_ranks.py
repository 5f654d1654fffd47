"""Train on ranks that a test starts, one for each GPU: `captured_ranks.py FOLDER RECIPE graph|plain FORM`.

FORM is `split`, `kept` for split weights that stay gathered between the passes, or `whole` for ranks that each hold the
whole model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mxref import get_backend
from mxref.gemm import gemm_profile
from mxref.recipe_files import load_recipe
from mxref_torch import CapturedStep
from mxref_torch.captured.operations import StepRunner
from mxref_training import steps
from mxref_training.config import ParallelConfig
from mxref_training.distributed.connect import connected, started_ranks
from training_setup import CONFIG, change, run

MODEL = replace(CONFIG.model, layers=3, width=512, heads=8, kv_heads=8, ffn=512)
SIZES = change(
    replace(CONFIG, model=MODEL, optim=replace(CONFIG.optim, clip=0.25)), steps=7, batch=8, micro_batch=4,
    eval_every=2, eval_tokens=160, checkpoint_every=4, capture=True,
)  # fmt: skip
"""The evaluation has five windows in batches of a rank's sequences: the ranks have not the same number of them."""
FORMS = {
    "split": ParallelConfig(),
    "kept": ParallelConfig(keep_gathered=True),
    "whole": ParallelConfig(replicate=2, shard=1),
}


def uncaptured(*arguments: Any, **options: Any) -> CapturedStep:
    """Make the same steps without a graph."""
    return CapturedStep(*arguments, **options, capture=False)


def main(folder: Path, name: str, way: str, form: str) -> None:
    captures = 0
    right = StepRunner._captured

    def counting(self: Any) -> Any:
        nonlocal captures
        captures += 1
        return right(self)

    StepRunner._captured = counting  # type: ignore[method-assign]
    if way == "plain":
        steps.CapturedStep = uncaptured  # type: ignore[assignment, misc]
    recipe = replace(load_recipe(name), gemm=gemm_profile("bounded"))
    with connected(started_ranks()) as ranks:
        run(folder, recipe, replace(SIZES, parallel=FORMS[form]), backend=get_backend("triton"), ranks=ranks)
    assert captures == (way == "graph")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
