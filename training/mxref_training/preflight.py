"""The checks of a run before its data is read and before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import mxref_torch
from mxref.backend import Backend
from mxref.formats import BlockFormat, BlockShape
from mxref.recipe import OperandSpec, Recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.rounding import Rounding
from mxref_training.config import TrainConfig
from mxref_training.data.preview import require_readable
from mxref_training.device import choose_device, memory_limit
from mxref_training.distributed import sharded
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.distributed.share import check_layout
from mxref_training.errors import ConfigError
from mxref_training.forecast import require_memory
from mxref_training.model import llama, pretrained
from mxref_training.parallel import Axes
from mxref_training.wording import counted


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
    _require_whole_blocks(config, recipe, axes, linears)
    mxref_torch.convert(model, recipe, backend=backend, seed=config.run.seed, steps=config.run.steps)
    if axes.tensor > 1:
        sharded.check_layers(model, axes.tensor)
    if config.run.init_from is not None:
        pretrained.require_fitting(model, Path(config.run.init_from))
    return model


def _require_whole_blocks(config: TrainConfig, recipe: Recipe, axes: Axes, linears: Sequence[str]) -> None:
    """Raise ConfigError if a block or a Hadamard group would lie in two micro-batches or on two ranks.

    Under SR a block along the tokens has one place in the optimizer step, at which its random bits are counted. Other
    roundings have no such place: each micro-batch of each rank is then filled up with zeros. A tile needs 32 tokens
    under any rounding, because only the block axis is filled up.
    """
    run = config.run
    own = run.sequences // axes.data
    parts, last = run.micro_batches * axes.data, run.eval_tokens // run.seq_len % own
    for spec, role in _token_operands(recipe, linears, run.steps):
        unit, why = _unit(spec, role, parts)
        # An evaluation runs Fprop alone, and its last batch may be smaller.
        for sequences in (own, last) if role is GemmRole.FPROP else (own,):
            if sequences * run.seq_len % unit:
                raise ConfigError(
                    f"run.seq_len = {run.seq_len}: a forward pass of {counted(sequences, 'sequence')} on a rank has "
                    f"{sequences * run.seq_len:,} tokens, not a multiple of {unit}, but {why}: take a multiple of "
                    f"{unit // math.gcd(unit, sequences)} for run.seq_len, or "
                    f"{unit // math.gcd(unit, run.seq_len)} sequences or a multiple of them on each rank "
                    f"({'run.micro_batch' if sequences == own else 'run.eval_tokens'})"
                )


def _token_operands(
    recipe: Recipe, linears: Sequence[str], steps: int
) -> Iterator[tuple[OperandSpec, GemmRole]]:
    """Yield the block formats of X and dY that any linear layer has at any step, with the GEMM that reads them."""
    for span in recipe.spans(steps):
        for own in dict.fromkeys(span.recipe.by_layer(linears).values()):
            for role in GemmRole:
                if own.kind(role) == "block":
                    operands = zip(OPERANDS[role], own.operands(role), strict=True)
                    yield from ((spec, role) for operand, spec in operands if operand.tensor != "w")


def _unit(spec: OperandSpec, role: GemmRole, parts: int) -> tuple[int, str]:
    """Return the number of which a forward pass's tokens must be a multiple, and the reason."""
    assert isinstance(spec.format, BlockFormat)
    if role is GemmRole.WGRAD:
        if spec.rounding is Rounding.SR and parts > 1:
            groups = f" and Hadamard groups of {spec.hadamard}" if spec.hadamard else ""
            return math.lcm(spec.format.k, spec.hadamard or 1), (
                f"under stochastic rounding blocks of {spec.format.k}{groups} along the tokens must not lie in two "
                "micro-batches or on two ranks"
            )
    elif spec.block is BlockShape.TILE:
        return spec.format.k, f"{role.value} reads tiles of {spec.format.k} x {spec.format.k} elements"
    return 1, ""
