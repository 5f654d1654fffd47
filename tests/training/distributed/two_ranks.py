"""Two ranks that a test starts, which train with split weights, held to one process with the same batches."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_pairs import captured, gathered_once, one_rank_alone
from operands import assembled, kept
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.tomlio import to_table
from mxref_torch import LayerError, convert
from mxref_training.config import Axes, ParallelConfig, TrainConfig
from mxref_training.distributed import sharded
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.failing import one_error
from mxref_training.distributed.ranks import Ranks
from mxref_training.errors import ConfigError, PeerStopped
from mxref_training.huggingface.config_json import config_json
from mxref_training.layout import check_layout
from mxref_training.model.llama import Llama
from mxref_training.model.pretrained import load_pretrained
from training_setup import CONFIG, SR, change, lines, metrics, run

UNCLIPPED = replace(CONFIG, optim=replace(CONFIG.optim, clip=0.0))
WHOLE = change(UNCLIPPED, batch=4, micro_batch=4, steps=4, eval_every=2, eval_tokens=160, checkpoint_every=2)
"""Five validation windows: the ranks have not the same number of them."""
HALVES = change(WHOLE, micro_batch=2)
"""In one process: the parts of two ranks one after the other."""

_MIXED = {
    "dialect": "amd",
    "all": {"rounding": "sr"},
    "layers": [{"match": ["*.down_proj"], "recipe": "fp8"}],
}
MIXED = recipe_from_table(_MIXED)
KEYS = recipe_from_table(
    {
        "fprop": {"rounding": "sr"},
        "dgrad": {"format": "bf16", "source": "fprop"},
        "wgrad": {"source": "fprop", "rounding": "sr", "out": "bf16", "gain": 1.25},
    }
)
PHASES = recipe_from_table({**_MIXED, "schedule": [{"until": 1, "recipe": "fp8"}]})


def same_numbers(ranks: Ranks) -> None:
    """What ranks tell each other arrives everywhere, in the order of ranks."""
    assert ranks.gather(("rank", ranks.rank)) == [("rank", 0), ("rank", 1)]
    assert ranks.broadcast(ranks.rank + 5) == 5
    assert ranks.gather_numbers([ranks.rank, 0.1]) == [[0.0, 0.1], [1.0, 0.1]]
    assert [ranks.any(ranks.rank == number) for number in (0, 1, 2)] == [True, True, False]
    ranks.agree("the run", {"seed": 3})
    with pytest.raises(ConfigError, match="the run: seed is 0 on rank 0 and 1 on rank 1"):
        ranks.agree("the run", {"seed": ranks.rank})


def initial_weights(ranks: Ranks) -> None:
    """A model that is split before it has weights begins with those of one process."""
    for tied in (False, True):
        config = replace(WHOLE.model, layers=2, tie_embeddings=tied)
        model = Llama(config, device="meta")
        cpu = torch.device("cpu")
        sharded.shard(model, sharded.make_mesh(cpu, Axes(1, 2, 1)), cpu)
        model.reset_parameters(5)
        whole = dict(Llama(config, seed=5).named_parameters())
        found = dict(model.named_parameters())
        assert found.keys() == whole.keys()
        for name, parameter in found.items():
            assert parameter.to_local().numel() < whole[name].numel()
            assert torch.equal(parameter.full_tensor(), whole[name]), name


def weights_of_a_folder(ranks: Ranks, folder: Path) -> None:
    """A split model takes its parts of the weights of a Hugging Face folder."""
    config = replace(WHOLE.model, layers=2)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in Llama(config, seed=9).state_dict().items()}
    if ranks.first:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(to_table(config), "bfloat16", None)))
        save_file(weights, folder / "model.safetensors")
    ranks.gather(None)
    model = Llama(config, device="meta")
    cpu = torch.device("cpu")
    sharded.shard(model, sharded.make_mesh(cpu, Axes(1, 2, 1)), cpu)
    load_pretrained(model, folder)
    for name, parameter in model.named_parameters():
        assert parameter.to_local().numel() < weights[name].numel()
        assert torch.equal(parameter.full_tensor(), weights[name].float()), name


def foreign_split(ranks: Ranks) -> None:
    """A converted layer that something else has split is refused, and does not reach an operator."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    convert(model, SR, backend="reference", seed=3)
    mesh = sharded.make_mesh(torch.device("cpu"), Axes(1, 1, 2))["tensor"]
    model[0].weight = torch.nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(LayerError, match="is a DTensor, .*split.split_layer before fully_shard"):
        model(torch.ones(32, 64))


def without_norm(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "grad_norm"} for line in lines(out)]


def same_steps(ranks: Ranks, folder: Path, recipe: Recipe | str, config: TrainConfig = WHOLE) -> None:
    """All losses, of training and validation, are those of one process that takes the parts in turns."""
    name = recipe if isinstance(recipe, str) else recipe.digest
    both, alone = folder / f"{name}-2", folder / f"{name}-1"
    run(both, recipe, config, ranks=ranks)
    if ranks.first:
        run(alone, recipe, replace(change(config, micro_batch=config.run.sequences // 2), parallel=None))
        assert without_norm(both) == without_norm(alone)
        for mine, other in zip(lines(both), lines(alone), strict=True):
            norms = [line.get("grad_norm", 1.0) for line in (mine, other)]
            assert abs(norms[0] / norms[1] - 1) < 1e-5
        assert (
            json.loads((both / "run.json").read_text())["identity"]["parallel"]
            == check_layout(config, 2)._asdict()
        )
    ranks.gather(None)


def resumed(ranks: Ranks, folder: Path) -> None:
    """A run that stopped goes on to the bit, also in a phase in which other layers have FP8's scales."""
    whole, parts = folder / "whole", folder / "parts"
    config = replace(WHOLE, model=replace(WHOLE.model, tie_embeddings=True), optim=CONFIG.optim)
    run(whole, PHASES, config, ranks=ranks)
    run(parts, PHASES, config, ranks=ranks, stop_after=2)
    run(parts, PHASES, config, ranks=ranks)
    assert metrics(parts) == metrics(whole)


def one_reader(ranks: Ranks, folder: Path) -> None:
    """Only the first rank reads the logs at the end of a run: on another host they may appear late."""
    with pytest.MonkeyPatch.context() as patch:
        if not ranks.first:
            patch.setattr("mxref_training.trainer.read_result", lambda *given: 1 / 0)
        config = replace(WHOLE, model=replace(WHOLE.model, tie_embeddings=True), optim=CONFIG.optim)
        found = ranks.gather(run(folder / "whole", PHASES, config, ranks=ranks))
    assert found[0] == found[1]
    assert found[0].losses


def same_operands(ranks: Ranks, folder: Path) -> None:
    """In the first step all operands, put together, are those of one process that takes the whole batch at once."""
    config = change(WHOLE, steps=2, eval_every=2)
    with kept(config.run.seed) as mine:
        run(folder / "operands-2", SR, config, ranks=ranks, stop_after=1)
    of_ranks = ranks.gather(mine.parts)
    if ranks.first:
        with kept(config.run.seed) as alone:
            run(folder / "operands-1", SR, config, stop_after=1)
        assert len(alone.parts) == 7 * 6  # layers and operands
        for where, parts in alone.parts.items():
            together = [part for parts in of_ranks for part in parts[where]]
            for got, want in zip(assembled(together, where[2]), assembled(parts, where[2]), strict=True):
                assert got.shape == want.shape, where
                assert (got == want).all(), where
    ranks.gather(None)


def failure_of_one(ranks: Ranks) -> None:
    """A rank that cannot go on stops both, and one of them says why."""

    def fails_on_one() -> None:
        with one_error(ranks):
            if not ranks.first:
                raise ConfigError("out of luck")
            ranks.gather(None)

    expected = (PeerStopped, "^rank 1 has failed$") if ranks.first else (ConfigError, "^out of luck$")
    with pytest.raises(expected[0], match=expected[1]):
        fails_on_one()


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with connected(started_ranks()) as ranks:
        same_numbers(ranks)
        initial_weights(ranks)
        foreign_split(ranks)
        weights_of_a_folder(ranks, folder / "hf")
        same_steps(ranks, folder, SR)
        same_steps(ranks, folder, KEYS)
        resumed(ranks, folder)
        one_reader(ranks, folder)
        gathered_once()
        captured(ranks, replace(WHOLE, optim=CONFIG.optim), MIXED, folder / "captured")
        one_rank_alone(ranks)
        same_operands(ranks, folder)
        same_steps(ranks, folder, load_recipe("fp8"))
        whole = replace(change(WHOLE, capture=True), parallel=ParallelConfig(2, 1))
        same_steps(ranks, folder / "replicas", PHASES, whole)
        failure_of_one(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
