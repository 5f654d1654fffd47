"""The ranks of a sharded training, which a test starts: FSDP2 over gloo on the CPU, compared with unsharded steps."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mxref import get_backend
from mxref.recipe_files import load_recipe
from mxref_torch import advance, check_census, convert

RANKS, TOKENS = 2, 64


def built(backend: str, recipe: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64, bias=False))
    return model, convert(model, load_recipe(recipe), backend=get_backend(backend), seed=1).context


def train(model: nn.Module, context: Any, recipe: str, steps: int) -> list[float]:
    """Steps of two micro-batches each, the same tokens on every rank, so that the mean over ranks is exact."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for context.step in range(steps):
        context.global_tokens = 2 * TOKENS
        context.reset_census()
        for part in range(2):
            context.token_origin = part * TOKENS
            ids = torch.randint(
                32, (TOKENS,), generator=torch.Generator().manual_seed(2 * context.step + part)
            )
            loss = model(ids).square().mean()
            losses.append(loss.item())
            loss.backward()
        check_census(context, model, load_recipe(recipe), 2)
        optimizer.step()
        optimizer.zero_grad()
        # Before the step is closed: what was made of the weights must not outlive their change.
        with torch.no_grad():
            losses.append(model(ids).square().mean().item())
        advance(model)
    return losses


def main(rank: int, store: str, cases: list[str]) -> None:
    warnings.simplefilter("error")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreted import patched_once

        patched_once.install()
    warnings.filterwarnings(
        "ignore", "returned a view tensor", UserWarning
    )  # of an Embedding, by torch itself
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for case in cases:
        backend, recipe, steps = case.rsplit(":", 2)
        plain, context = built(backend, recipe)
        want = train(plain, context, recipe, int(steps))
        model, context = built(backend, recipe)
        for layer in (model[1], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert train(model, context, recipe, int(steps)) == want, case
        model.reshard()  # the root keeps what it gathered for a forward pass
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), (case, name)
        print(rank, case, "equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
