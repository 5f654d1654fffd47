"""The checks of a run before its data is read and before anything is allocated."""

from __future__ import annotations

import torch

import mxref_torch
from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.recipe import Recipe
from mxref_torch import operators
from mxref_training.config import TrainConfig
from mxref_training.device import choose_device, device_name, memory_limit
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.share import check_layout
from mxref_training.run.memory import require_memory
from mxref_training.run.shape import converted_shape

_rounds_well: set[tuple[str, Capabilities, Recipe]] = set()
"""Backends, by their key, and treatments whose stochastic rounding has passed its check in this process."""


def check_rounding(backend: Backend, recipe: Recipe) -> None:
    """Check the stochastic rounding of each treatment, as `mxref_torch.check_stochastic_rounding` does.

    A treatment that has passed with this backend is not tried again: a ladder trains many runs in one process, and the
    check takes as long as several small steps.

    Raises:
        LayerError, UnsupportedError: as of `mxref_torch.check_stochastic_rounding`.
    """
    for treatment in recipe.treatments():
        tried = operators.register_backend(backend), backend.capabilities, treatment
        if tried not in _rounds_well:
            mxref_torch.check_stochastic_rounding(backend, treatment)
            _rounds_well.add(tried)


def preflight(
    config: TrainConfig, recipe: Recipe, backend: Backend, runs: int = 1, ranks: Ranks = SOLE
) -> torch.device:
    """Return a run's device after checking that it exists and that the run fits there.

    Commands call this before they read data. `runs` runs share the device at the same time.

    Raises:
        ConfigError: no such device, the backend does not compute on it, too little memory, ranks that cannot
            share the run as the configuration says, or as of `converted_shape`.
        LayerError, HuggingFaceError: as of `converted_shape`.
    """
    device = choose_device(config.run.device, backend, ranks)
    axes = check_layout(config, ranks.world)
    available = memory_limit(device)
    if device.type == "cpu":
        available //= ranks.local_world
    require_memory(config, recipe, available, runs, axes)
    converted_shape(config, recipe, backend, axes)
    return device


def on_device(config: TrainConfig, backend: Backend) -> str:
    """Return the name of the device on which a run computes; ConfigError if there is none."""
    return device_name(choose_device(config.run.device, backend))
