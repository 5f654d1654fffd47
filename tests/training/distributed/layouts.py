"""Ranks that a test starts in some layout: tensor parallelism and HSDP, held to one process with the same batches."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from operands import assembled, kept

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_torch import convert
from mxref_training.config import ParallelConfig, Recompute, TrainConfig
from mxref_training.distributed import sharded
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.ranks import Ranks
from mxref_training.layout import check_layout
from mxref_training.model.llama import Llama
from training_setup import CONFIG, SR, change, lines, metrics, run

MODEL = replace(CONFIG.model, layers=2, width=128, heads=4, ffn=192)
SR_H16 = recipe_from_table({"dialect": "amd", "all": {"rounding": "sr", "hadamard": 16, "signs": "fixed"}})


def config_of(parallel: ParallelConfig) -> TrainConfig:
    config = change(
        CONFIG, batch=4, micro_batch=4, steps=4, eval_every=2, eval_tokens=128, checkpoint_every=2
    )
    return replace(config, model=MODEL, parallel=parallel, optim=replace(config.optim, clip=0.0))


def initial_weights(ranks: Ranks, config: TrainConfig) -> None:
    """Each rank begins with its part of one process's weights, and the parts have whole copies only where stated."""
    axes = check_layout(config, ranks.world)
    model = Llama(config.model, device="meta")
    convert(model, SR, backend="reference", seed=3)
    cpu = torch.device("cpu")
    sharded.shard(model, sharded.make_mesh(cpu, axes), cpu)
    model.reset_parameters(5)
    whole = dict(Llama(config.model, seed=5).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    everywhere = sum(ranks.gather(held))
    linear = sum(p.numel() for name, p in whole.items() if "self_attn" in name or "mlp" in name)
    total = sum(p.numel() for p in whole.values())
    assert everywhere == axes.replicate * (linear + axes.tensor * (total - linear))


def same_operands(ranks: Ranks, config: TrainConfig, folder: Path, recipe: Recipe) -> None:
    """In the first step all operands of the first layer's forward pass, and all weights, are those of one process.

    What follows a sum over ranks may differ: it is added in another order.
    """
    with kept(config.run.seed) as mine:
        run(folder / f"{recipe.digest}-operands-n", recipe, config, ranks=ranks, stop_after=1)
    of_ranks = ranks.gather(mine.parts)
    if ranks.first:
        alone_config = replace(config, parallel=None)
        with kept(config.run.seed) as alone:
            run(folder / f"{recipe.digest}-operands-1", recipe, alone_config, stop_after=1)
        assert len(alone.parts) == config.model.layers * 7 * 6
        exact = 0
        for where, parts in alone.parts.items():
            together = [part for parts in of_ranks for part in parts[where]]
            layer, operand, axis = where
            pairs = list(zip(assembled(together, axis), assembled(parts, axis), strict=True))
            assert all(got.shape == want.shape for got, want in pairs), where
            equal = all((got == want).all() for got, want in pairs)
            exact += equal
            is_weight, before_any_sum = operand in (1, 3), layer < 3 and operand in (0, 5)
            assert equal or (has_sums(config) and not is_weight and not before_any_sum), where
        print(f"{recipe.digest}: {exact} of {len(alone.parts)} operands equal", flush=True)
    ranks.gather(None)


def has_sums(config: TrainConfig) -> bool:
    """Return whether a forward pass adds over ranks."""
    return config.parallel is not None and config.parallel.tensor > 1


def near_steps(ranks: Ranks, config: TrainConfig, folder: Path, name: str) -> None:
    """Losses are those of one process that takes the parts in turns, up to sums in another order, which later steps
    magnify. A resumed run repeats them to the bit, and so does one that computes layers again.
    """
    both, parts = folder / f"{name}-n", folder / f"{name}-parts"
    run(both, name, config, ranks=ranks)
    if ranks.first:
        in_turns = config.run.sequences // check_layout(config, ranks.world).data
        run(folder / f"{name}-1", name, replace(change(config, micro_batch=in_turns), parallel=None))
        pairs = list(zip(lines(both), lines(folder / f"{name}-1"), strict=True))
        for mine, other in pairs:
            near(mine, other, "val_loss", 0.05)
            near(mine, other, "loss", 1e-3 if mine["step"] == 1 else 0.05)
            near(mine, other, "grad_norm", 1e-2 if mine["step"] == 1 else 0.2)
    ranks.gather(None)
    run(parts, name, config, ranks=ranks, stop_after=2)
    run(parts, name, config, ranks=ranks)
    assert metrics(parts) == metrics(both)
    again = folder / f"{name}-again"
    run(again, name, change(config, recompute=Recompute.FULL), ranks=ranks)
    assert metrics(again) == metrics(both)


def near(mine: dict[str, Any], other: dict[str, Any], key: str, most: float) -> None:
    assert (key in mine) == (key in other)
    if key in mine:
        assert abs(mine[key] / other[key] - 1) < most, (mine, other)


def main(folder: Path, replicate: int, shard: int, tensor: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    config = config_of(ParallelConfig(replicate, shard, tensor))
    with connected(started_ranks()) as ranks:
        initial_weights(ranks, config)
        for recipe in (SR, SR_H16):
            same_operands(ranks, config, folder, recipe)
        for name in ("bf16", "fp8", "mxfp4_h16"):
            assert load_recipe(name)
            near_steps(ranks, config, folder, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
