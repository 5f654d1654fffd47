"""What two ranks do in steps that never wait, as in `run.capture`: on a CPU without the graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref_torch import CapturedStep, StepOutcome, convert
from mxref_training.config import Axes, ParallelConfig, TrainConfig
from mxref_training.distributed import sharded
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.sharded import is_split
from mxref_training.distributed.share import Share, team_of
from mxref_training.model.llama import Llama
from mxref_training.shards import opened, whole
from ranged import Ranged
from training_setup import CONFIG, change, lines, metrics, run


def captured(ranks: Ranks, config: TrainConfig, recipe: Recipe, folder: Path) -> None:
    """Steps that never wait have the numbers of others: split or whole, clipped, in micro-batches.

    So have steps whose layers are gathered once for both passes.

    A run whose ranks each hold the whole model repeats itself after a stop, and goes on from the checkpoint of one
    whose ranks split it.
    """
    optim = replace(config.optim, lr=2.0**-8, warmup=0, clip=0.125)  # a rate that float32 has
    config = replace(change(config, micro_batch=2, eval_every=4), optim=optim)
    run(folder / "split", recipe, config, ranks=ranks)
    run(folder / "captured", recipe, change(config, capture=True), ranks=ranks)
    assert metrics(folder / "captured") == metrics(folder / "split")
    assert saved(folder / "captured", 4) == saved(folder / "split", 4)
    assert all(line["grad_norm"] > optim.clip for line in lines(folder / "split") if "grad_norm" in line)
    once = replace(change(config, capture=True), parallel=ParallelConfig(keep_gathered=True))
    run(folder / "kept", recipe, once, ranks=ranks)
    assert metrics(folder / "kept") == metrics(folder / "split")
    whole = replace(config, parallel=ParallelConfig(replicate=2, shard=1))
    run(folder / "whole", recipe, whole, ranks=ranks)
    run(folder / "whole-captured", recipe, change(whole, capture=True), ranks=ranks)
    assert metrics(folder / "whole-captured") == metrics(folder / "whole")
    assert saved(folder / "whole-captured", 4) == saved(folder / "whole", 4)
    run(folder / "parts", recipe, whole, ranks=ranks, stop_after=2)
    run(folder / "parts", recipe, whole, ranks=ranks)
    assert metrics(folder / "parts") == metrics(folder / "whole")
    assert saved(folder / "parts", 4) == saved(folder / "whole", 4)
    run(folder / "moved", recipe, config, ranks=ranks, stop_after=2)
    run(folder / "moved", recipe, whole, ranks=ranks)
    assert lines(folder / "moved")[:2] == lines(folder / "split")[:2]
    assert saved(folder / "moved", 4).keys() == saved(folder / "split", 4).keys()


def gathered_once() -> None:
    """A layer that is to be kept is whole between the passes, and split behind the backward pass."""
    cpu, ids = torch.device("cpu"), torch.zeros(1, 32, dtype=torch.int64)
    for keep in (False, True):
        model = Llama(CONFIG.model, compute_dtype=torch.float32, device="meta")
        sharded.shard(model, sharded.make_mesh(cpu, Axes(1, 2, 1)), cpu, keep_gathered=keep)
        model.reset_parameters(5)
        logits = model(ids)
        assert all(is_split(p) is not keep for p in model.model.layers.parameters())
        logits.sum().backward()
        assert all(map(is_split, model.parameters()))


def saved(out: Path, step: int) -> dict[str, Any]:
    """Return the tensors of a checkpoint, put together."""
    files = sorted((out / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    with opened(files) as held:
        return {name: whole(boxes).numpy().tobytes() for name, boxes in sorted(held.items())}


def outcomes(ranks: Ranks, exceeds: int = -1, spoiled: int = -1) -> tuple[list[StepOutcome], Tensor]:
    """Return what five steps of whole replicas came to, and the weights after them.

    Args:
        ranks: of which each has half of the batch.
        exceeds: the step in which an operand leaves the range on the last rank alone.
        spoiled: the step in which a gradient is not finite on the last rank alone, and the loss is.
    """
    torch.manual_seed(0)
    last = ranks.rank == 1
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    backend = Ranged(exceeds if last else -1)
    recipe = recipe_from_table(
        {"gemm": "ordered", "keep_bf16": [], "all": {"hadamard": 16, "signs": "per_step"}}
    )
    context = backend.context = convert(model, recipe, backend=backend, seed=3).context
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-8, fused=True)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if last and context.step == spoiled:
            y.register_hook(lambda gradient: gradient * torch.inf)
        return y.square().mean()

    share = Share(ranks, Axes(2, 1, 1))
    take = CapturedStep(
        model, context, loss_of, optimizer, tokens=128, clip=0.125, capture=False, team=team_of(share, model)
    )  # fmt: skip
    batches = torch.randn(5, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    found = [take(batch[ranks.rank]) for batch in batches][1:]
    return [*(outcome for outcome in found if outcome), *filter(None, [take.finish()])], model[
        0
    ].weight.detach()


def one_rank_alone(ranks: Ranks) -> None:
    """What happens to one rank, all ranks act upon: they repeat a step together, or leave its update out together."""
    plain, weights = outcomes(ranks)
    assert ranks.gather(plain) == [plain, plain]
    widened, again = outcomes(ranks, exceeds=2)
    assert [outcome.widened for outcome in widened] == [False, False, True, False, False]
    assert torch.equal(again, weights)
    skipped, _ = outcomes(ranks, spoiled=2)
    assert [outcome.updated for outcome in skipped] == [True, True, False, True, True]
    assert skipped[2].nonfinite == "1.weight"
    assert skipped[3].loss != plain[3].loss
    assert ranks.gather(repr(skipped)) == [repr(skipped)] * 2  # NaN is not equal to itself
