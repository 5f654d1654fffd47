"""Trains a single run in its directory, with divergence as a result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import DivergedError
from mxref_training.lab import result_file
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.branch_start import begin_branch
from mxref_training.lab.last_checkpoint import evaluate_last, release
from mxref_training.lab.result_file import Record, read_json
from mxref_training.log_files import read_lines

if TYPE_CHECKING:
    from mxref_training.log import TrainResult


def train_arm(
    run: ArmRun,
    trainer: Callable[..., TrainResult],
    backend: Backend,
    corpus: Any,
    progress: Any,
    ranks: Ranks = SOLE,
) -> Record:
    """Train or resume a run in its prepared directory; the first rank writes its record there, and returns it.

    `trainer` is `mxref_training.trainer.train`, or stands for it.

    Raises:
        ConfigError: another process is training in the directory.
        Interrupted: the trainer raises it. Its other errors pass too, except divergence, which is a result.
    """
    with run.alone() if ranks.first else nullcontext():
        shared: dict[str, Any] = {"backend": backend, "corpus": corpus, "label": run.arm.label}
        diverged = ""
        try:
            if run.start:
                trunk, step = run.start.trunk, run.start.step
                begin_branch(run.config, run.recipe, run.folder, trunk=trunk, step=step, **shared)
            for stop in run.stops or (None,):
                release(backend)
                result = trainer(
                    run.config,
                    run.recipe,
                    run.folder,
                    progress=progress,
                    resume=True,
                    stop_after=stop,
                    ranks=ranks,
                    **shared,
                )
        except DivergedError as err:
            diverged = str(err)
        if not ranks.first:
            return {}
        record: Record = {
            "arm": run.arm.name,
            "pair": run.seed,
            "seed": run.config.run.seed,
            "data_seed": run.config.run.data_seed,
            "diverged": bool(diverged),
            "reason": diverged,
        }
        if diverged:
            # Divergence is a result, with the curve up to that point: some arms exist to show it. A curve that rises
            # again without this error is judged when the results are assembled.
            record |= {"losses": _logged_losses(run.folder)}
        else:
            record |= {
                "losses": result.losses,
                "seconds": result.seconds,
                "tokens": result.tokens,
                "tokens_per_second": _pace(run, result),
                "skipped_steps": result.skipped_steps,
            }
            if run.extra:
                record["last"] = evaluate_last(
                    run.config, run.recipe, run.folder, run.extra, backend=backend, corpus=corpus
                )
        record["train_curve"] = result_file.train_curve(run.folder)
        record["evaluation_seconds"] = result_file.evaluation_seconds(run.folder)
        facts = read_json(run.folder / "run.json") or {}
        kept = ("started", "parameters", "flops_per_token", "versions", "platform", "hardware")
        record |= {"environment": {key: facts[key] for key in kept if key in facts}}
        return run.finish(record)


def _pace(run: ArmRun, result: TrainResult) -> float | None:
    """Return the tokens that a run itself trained on in a second; None if it took no step.

    A branch counts its tokens from step 0, but the first of them took the trunk's time.
    """
    before = run.span[0] * run.config.run.step_tokens
    return (result.tokens - before) / result.seconds if result.seconds else None


def _logged_losses(folder: Path) -> list[tuple[int, float | None]]:
    lines = read_lines(folder / "metrics.jsonl")
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
