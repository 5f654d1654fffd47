"""Which part of each batch a rank computes, and how losses of all parts are added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mxref_training.config import Compile, RunConfig, TrainConfig
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from mxref_training.parallel import LAYOUT, Axes, ParallelConfig

ONE = Axes(1, 1, 1)


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch. Ranks of one tensor-parallel group have the same part."""

    ranks: Ranks = SOLE
    axes: Axes = ONE

    @property
    def index(self) -> int:
        """Number of the part, from 0."""
        return self.ranks.rank // self.axes.tensor

    @property
    def parts(self) -> int:
        """How many parts a batch has."""
        return self.axes.data

    def sequences(self, run: RunConfig) -> int:
        """Return a rank's sequences of each micro-batch."""
        return run.sequences // self.parts

    def rows(self, run: RunConfig, number: int) -> slice:
        """Return which sequences of a step's batch this rank has in a micro-batch.

        Args:
            run: gives the sizes.
            number: of the micro-batch, from 0.
        """
        own = self.sequences(run)
        first = number * run.sequences + self.index * own
        return slice(first, first + own)

    def in_order(self, values: Sequence[float]) -> list[float]:
        """Return the values of all parts: all first ones in the order of parts, then all second ones, and so on.

        This is their order in one process that takes the parts one after the other. Every rank gets them all.
        """
        rows = self.ranks.gather_numbers(values)[:: self.axes.tensor]
        return [row[i] for i in range(len(values)) for row in rows]


ALONE = Share()
"""The share of one process: all of the batch."""


def check_layout(config: TrainConfig, ranks: int) -> Axes:
    """Return the axes of a run of so many ranks.

    Raises:
        ConfigError: the axes do not make that number, a micro-batch does not split into equal parts, or several ranks
            are to do what one process alone does.
    """
    run, axes = config.run, (config.parallel or ParallelConfig()).axes(ranks)
    if ranks == 1:
        return axes
    if run.sequences % axes.data:
        key = "run.micro_batch" if run.micro_batch else "run.batch"
        raise ConfigError(
            f"{key} = {run.sequences} sequences do not split over {axes.data} ranks (parallel.replicate = "
            f"{axes.replicate} * parallel.shard = {axes.shard}): take a multiple of {axes.data}, or fewer ranks"
        )
    for key, size in (
        ("heads", config.model.heads),
        ("kv_heads", config.model.kv_heads),
        ("ffn", config.model.ffn),
    ):
        if size % axes.tensor:
            raise ConfigError(
                f"model.{key} = {size} does not split over parallel.tensor = {axes.tensor} ranks: take a divisor of "
                f"{math.gcd(config.model.kv_heads, config.model.ffn)}"
            )
    if run.capture and axes.tensor > 1:
        raise ConfigError(
            f"run.capture = true with parallel.tensor = {axes.tensor}: ranks that compute a layer together take no "
            "CUDA graph; set run.capture = false, or parallel.tensor = 1"
        )
    if config.parallel and config.parallel.keep_gathered and axes.shard == 1:
        raise ConfigError(
            "parallel.keep_gathered = true with parallel.shard = 1: no rank gathers weights; set "
            "parallel.keep_gathered = false, or parallel.shard = 2 or more"
        )
    for key, wanted in (
        ("run.compile = 'model'", run.compile is Compile.MODEL),
        ("run.shadow", bool(run.shadow)),
        ("run.telemetry_every", bool(run.telemetry_every)),
    ):
        if wanted:
            raise ConfigError(
                f"{key} works in one process only, and there are {ranks} ranks: switch it off"
                + (", or take run.compile = 'block'" if "compile" in key else "")
            )
    return axes


def layout_identity(config: TrainConfig, ranks: int) -> dict[str, Any]:
    """Return what the layout of ranks adds to the identity of a run: one process has none.

    Another layout adds in another order, so a resumed run has the bits of one that never stopped only under the same.
    """
    axes = check_layout(config, ranks)
    return {LAYOUT: axes._asdict()} if ranks > 1 else {}


def added(values: Iterable[float]) -> float:
    """Return the sum from left to right. Python's `sum` adds in another way from version 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
