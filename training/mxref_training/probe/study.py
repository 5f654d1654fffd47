"""A probe from its checkpoints to its results: one batch for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxref.backend import Backend
from mxref_training.device import choose_device, device_name, known_errors
from mxref_training.identity import environment
from mxref_training.probe.arms import NamedRecipe
from mxref_training.probe.batch import Shape, corpus_of, make_batch
from mxref_training.probe.measure import Said, measure
from mxref_training.probe.moments import Moment
from mxref_training.probe.results import Results, assemble
from mxref_training.wording import counted


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
    return assemble(found, arms, batch, backend=backend, data=data, draws=draws, environment=facts)
