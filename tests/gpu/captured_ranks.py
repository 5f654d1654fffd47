"""Ranks that a test starts, one for each GPU, whose steps and evaluations are CUDA graphs, held to the same without."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mxref import get_backend
from mxref.gemm import gemm_profile
from mxref.recipe_files import recipe_from_table
from mxref_torch import CapturedStep
from mxref_torch.captured.runner import StepRunner
from mxref_training.config import TrainConfig, find_recipe
from mxref_training.distributed.ranks import Ranks, connected, started_ranks
from mxref_training.parallel import ParallelConfig
from mxref_training.run import stepping
from mxref_training.run.captured_evaluation import CapturedEvaluation
from mxref_training.run.evaluate import evaluate
from training_setup import CONFIG, change, metrics, newest, run

MODEL = replace(CONFIG.model, layers=3, width=512, heads=8, kv_heads=8, ffn=512)
OPTIM = replace(CONFIG.optim, clip=0.25)
SIZES = change(
    replace(CONFIG, model=MODEL, optim=OPTIM), steps=9, batch=8, micro_batch=4, eval_every=2, eval_tokens=160,
    checkpoint_every=4, capture=True,
)  # fmt: skip
LAYOUTS = {"split": ParallelConfig(), "replicas": ParallelConfig(0, shard=1)}
"""The evaluation has five windows in batches of a rank's sequences: the ranks have not the same number of them."""
PHASES = recipe_from_table({"all": {"hadamard": 16}, "schedule": [{"until": 4, "recipe": "fp8"}]})
RECIPES = {"bf16": "bf16", "phases": PHASES}


def without_graphs() -> None:
    """Have all steps and evaluations run one operation at a time."""

    def uncaptured(*arguments: Any, **options: Any) -> CapturedStep:
        return CapturedStep(*arguments, **options, capture=False)

    def one_by_one(self: Any) -> Any:
        found = evaluate(
            self._model,
            self._context,
            self._tokens,
            loss_sum=self._loss_sum,
            share=self._share,
            **self._sizes,
        )
        self._free()
        return found

    stepping.CapturedStep = uncaptured  # type: ignore[assignment, misc]
    CapturedEvaluation.__call__ = one_by_one  # type: ignore[method-assign]


def counted(owner: Any, made: list[Any]) -> None:
    """Note each graph that the owner captures."""
    right = owner._captured

    def counting(self: Any) -> Any:
        graph = right(self)
        made.append(graph)
        return graph

    owner._captured = counting


def saved(out: Path) -> dict[str, bytes]:
    step = out / "checkpoints" / f"step-{newest(out)}"
    return {path.name: path.read_bytes() for path in sorted(step.glob("*.safetensors"))}


def all_runs(ranks: Ranks, folder: Path) -> None:
    for name, recipe in RECIPES.items():
        treatment = replace(
            find_recipe(recipe) if isinstance(recipe, str) else recipe, gemm=gemm_profile("bounded")
        )
        for layout, parallel in LAYOUTS.items():
            config: TrainConfig = replace(SIZES, parallel=parallel)
            run(folder / f"{name}-{layout}", treatment, config, backend=get_backend("triton"), ranks=ranks)


def main(folder: Path) -> None:
    steps: list[Any] = []
    evaluations: list[Any] = []
    counted(StepRunner, steps)
    counted(CapturedEvaluation, evaluations)
    torch.set_float32_matmul_precision("highest")
    with connected(started_ranks()) as ranks:
        all_runs(ranks, folder / "graphs")
        captures = len(steps), len(evaluations)
        steps.clear()
        evaluations.clear()
        without_graphs()
        all_runs(ranks, folder / "plain")
        assert not steps
        assert not evaluations
        runs = sorted(path.name for path in (folder / "plain").iterdir())
        phases = sum(name.startswith("phases") for name in runs)  # a graph of each
        assert captures == (len(runs) + phases, len(runs) + phases), captures
        for name in runs:
            graphs, plain = folder / "graphs" / name, folder / "plain" / name
            assert metrics(graphs) == metrics(plain), name
            assert saved(graphs) == saved(plain), name
        if ranks.first:
            print(f"{len(runs)} runs equal", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
