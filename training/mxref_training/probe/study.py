"""A probe from its checkpoints to its results: one batch for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxref
from mxref.backend import Backend
from mxref.tomlio import to_table
from mxref_training.device import choose_device
from mxref_training.environment import device_name, environment
from mxref_training.failures import known_errors
from mxref_training.probe.arms import NamedRecipe
from mxref_training.probe.batch import Batch, Shape, corpus_of, make_batch
from mxref_training.probe.measure import ProbeRows, Said, measure
from mxref_training.probe.moments import Moment
from mxref_training.probe.results import FORMAT, TABLES, Results, Row
from mxref_training.treatment import describe
from mxref_training.wording import counted

DIGITS = 6
"""Significant digits of the numbers in the results."""


def run_probe(
    moments: Sequence[Moment],
    arms: Sequence[NamedRecipe],
    *,
    backend: Backend,
    shape: Shape,
    layers: str = "*",
    draws: int = 0,
    overrides: Mapping[str, Any],
    said: Said,
) -> Results:
    """Probe every checkpoint on the same batch, and return the results.

    Args:
        moments: the checkpoints, of one model and tokenizer.
        arms: the recipes.
        backend: computes the block formats.
        shape: the batch that is asked for.
        layers: glob over the names of linear layers.
        draws: draws of the random bits; 0 measures no variance.
        overrides: laid over the configuration of each run: where data, tokenizer and device are now.
        said: takes lines about the progress.

    Raises:
        ConfigError, CheckpointError, DataError: as in `measure`, `make_batch` and `corpus_of`.
    """
    config = moments[0].config([overrides])
    device = choose_device(config.run.device, backend)
    corpus, data = corpus_of(moments[0], config)
    if shape.side in data["other"]:
        said(f"the {shape.side.value} tokens are not those of the run: the batch is of another text")
    batch = make_batch(corpus, config, shape)
    said(f"{counted(len(arms), 'recipe')}, backend {backend.name}, {batch.name}")
    with known_errors("lower --batch or --length"):
        found = [
            (
                moment,
                measure(
                    moment, moment.config([overrides]), arms, batch,
                    backend=backend, layers=layers, draws=draws, said=said,
                ),
            )
            for moment in moments
        ]  # fmt: skip
    facts = environment(device_name(device))
    return _assembled(found, arms, batch, backend=backend, data=data, draws=draws, environment=facts)


def _assembled(
    moments: Sequence[tuple[Moment, ProbeRows]],
    arms: Sequence[NamedRecipe],
    batch: Batch,
    *,
    backend: Backend,
    data: Mapping[str, Any],
    draws: int,
    environment: Mapping[str, Any],
) -> Results:
    """Return everything that a probe found, as plain values.

    Args:
        moments: the checkpoints in their order, each with its rows.
        arms: the recipes.
        batch: the tokens.
        backend: that computed the block formats.
        data: hashes of the tokens, and whether they are those of the runs.
        draws: draws of the random bits; 0 is none.
        environment: versions and hardware, as `mxref_training.identity` gives them.
    """
    return {
        "format": FORMAT,
        "mxref": mxref.__version__,
        "backend": {"name": backend.name, "details": backend.details()},
        **environment,
        "data": dict(data),
        "batch": batch.facts(),
        "draws": draws,
        "recipes": [
            {
                "name": arm.name,
                "label": arm.label,
                "digest": arm.recipe.digest,
                "gemm": arm.recipe.gemm.value,
                "treatment": describe(arm.recipe),
                "table": to_table(arm.recipe),
            }
            for arm in arms
        ],
        "moments": [
            moment.facts() | {"loss": found.loss} | ({"phases": found.phases} if found.phases else {})
            for moment, found in moments
        ],
    } | {
        name: _table(
            [{"moment": moment.name} | row for moment, found in moments for row in getattr(found, name)]
        )
        for name in TABLES
    }


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as the columns that any of them has, and their values."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {"columns": columns, "rows": [[_short(row.get(key)) for key in columns] for row in rows]}


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
