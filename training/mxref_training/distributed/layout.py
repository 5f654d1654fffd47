"""Whether so many ranks can share a run as its configuration says."""

from __future__ import annotations

import math

from mxref_training.config import Compile, TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.parallel import Axes


def check_layout(config: TrainConfig, ranks: int) -> Axes:
    """Return the axes of a run of so many ranks.

    Raises:
        ConfigError: the axes do not make that number, a micro-batch does not split into equal parts, or several ranks
            are to do what one process alone does.
    """
    run, axes = config.run, config.axes(ranks)
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
