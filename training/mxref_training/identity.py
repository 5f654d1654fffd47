"""What a run is: everything that determines its numbers, and the record that its folder keeps of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.tomlio import to_table
from mxref_training.config import LAYOUT, Compile, Schedule, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.environment import differences, environment
from mxref_training.huggingface.weights import Weights
from mxref_training.model.llama import flops_per_token, parameter_count
from mxref_training.sources import backend_identity


def identity(
    config: TrainConfig, recipe: Recipe, backend: Backend, corpus: TokenCorpus, ranks: int = 1
) -> dict[str, Any]:
    """Return everything that determines a run's numbers, as plain tables. A resumed run must match it.

    Several ranks add their axes, the key `LAYOUT`, which a resumed run may change: sums then have another order.
    """
    run = config.run
    kept: dict[str, Any] = {
        "seed": run.seed,
        "data_seed": run.order_seed,
        "batch": run.batch,
        "micro_batch": run.sequences,
        "seq_len": run.seq_len,
        "eval_every": run.eval_every,
        "eval_tokens": run.eval_tokens,
        "log_every": run.log_every,
    }
    if run.compile is not Compile.NONE:
        kept["compile"] = run.compile
    for name in ("capture", "deterministic"):
        if getattr(run, name):
            kept[name] = True
    if run.init_from is not None:
        kept["init_from"] = Weights.open(Path(run.init_from)).sha256()  # the weights, wherever they lie
    if config.optim.schedule is not Schedule.CONSTANT and not config.optim.decay_steps:
        kept["steps"] = run.steps  # the decay ends there
    table = {
        "model": to_table(config.model),
        "optim": to_table(config.optim),
        "run": kept,
        "recipe": to_table(recipe),
        "data": corpus.hashes,
        "backend": backend_identity(backend),
    }
    spans = recipe.spans(run.steps)
    if len(spans) > 1:  # the steps where the phases begin, which a recipe in shares of the run does not fix
        table["phases"] = [[span.name, span.first] for span in spans]
    if ranks > 1:
        table[LAYOUT] = config.axes(ranks)._asdict()
    plain: dict[str, Any] = json.loads(json.dumps(table))
    return plain


def unlike_entries(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two identities differ, except the axes of ranks, each with both values."""
    own, other = ({key: it for key, it in side.items() if key != LAYOUT} for side in (mine, theirs))
    return differences(own, other)


def run_facts(
    config: TrainConfig,
    backend: Backend,
    corpus: TokenCorpus,
    *,
    digest: str,
    label: str,
    wanted: Mapping[str, Any],
    device: str,
) -> dict[str, Any]:
    """Return the record of a run that begins now.

    Args:
        config: the run.
        backend: computes the block formats.
        corpus: tokens.
        digest: of the recipe.
        label: its name in progress reports.
        wanted: what `identity` returned.
        device: name of where it computes.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": label,
        "identity": wanted,
        "backend": backend.name,
        "parameters": parameter_count(config.model),
        "flops_per_token": flops_per_token(config.model, config.run.seq_len),
        "recipe_digest": digest,
        "data": {
            **corpus.hashes,
            "train_tokens": len(corpus.train),
            "val_tokens": len(corpus.val),
            "report": corpus.report,
        },
        **environment(device),
    }
