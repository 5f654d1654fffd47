"""The checks of a run before its data is read and before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.config import Axes, TrainConfig
from mxref_training.data.corpus import require_readable
from mxref_training.device import choose_device, memory_limit
from mxref_training.distributed import sharded
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.forecast import require_memory
from mxref_training.layout import check_layout, require_whole_blocks
from mxref_training.model import llama, pretrained


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
    converted_shape(config, recipe, backend, axes)
    require_memory(config, recipe, available, runs, axes)
    return device


def planned(config: TrainConfig, recipe: Recipe, backend: Backend, ranks: int) -> tuple[llama.Llama, Axes]:
    """Return the converted model of a dry run without memory, and the axes of its ranks, none of which needs to exist.

    Raises:
        ConfigError: the ranks cannot share the run, or as of `converted_shape`.
        LayerError: stochastic rounding does not work, or as of `converted_shape`.
        HuggingFaceError: as of `converted_shape`.
        DataError: as of `require_readable`.
        UnsupportedError: the backend does not declare what the recipe asks for.
    """
    axes = check_layout(config, ranks)
    model = converted_shape(config, recipe, backend, axes)
    require_readable(config.data, config.model.vocab)
    mxref_torch.check_stochastic_rounding(backend, recipe)
    return model, axes


def converted_shape(config: TrainConfig, recipe: Recipe, backend: Backend, axes: Axes) -> llama.Llama:
    """Return the converted model of a run without memory, after checking that blocks fit into it and into the batch.

    Args:
        config: the run.
        recipe: treatment of the linear layers.
        backend: computes the block formats.
        axes: the ranks of the run.

    Raises:
        ConfigError: the recipe does not fit the model's widths, or a block would lie in two micro-batches or on two
            ranks.
        LayerError: a rank would not get whole blocks and whole Hadamard groups of a layer.
        HuggingFaceError: `run.init_from` names a folder that does not hold the weights of this model.
    """
    model = llama.Llama(config.model, device="meta")
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    require_whole_blocks(config, recipe, axes, linears)
    mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed, steps=config.run.steps)
    if axes.tensor > 1:
        sharded.check_layers(model, axes.tensor)
    if config.run.init_from is not None:
        pretrained.require_fitting(model, Path(config.run.init_from))
    return model
