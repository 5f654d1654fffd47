"""Ranks that a test starts: data parallelism over gloo on the CPU, held to the same micro-batches in one process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from api_setup import PLAIN, REFERENCE, SR, Model, batch, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mxref_torch import Handle, LayerError, check_census, convert

STEPS = 2


def converted(recipe: Any = SR) -> tuple[Model, Handle]:
    model = Model()
    return model, convert(model, recipe, backend=REFERENCE, seed=3)


def alone() -> list[torch.Tensor]:
    """Train in one process: what each rank has is a micro-batch at the place of that rank."""
    model, handle = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.context.global_tokens = 1 << 30
    for step in range(STEPS):
        for rank in range(2):
            handle.context.token_origin = rank << 29
            (loss_of(model, batch(2 * step + rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.advance()
    return [parameter.detach() for parameter in model.parameters()]


def train(model: Any, handle: Handle, rank: int, recipe: Any = SR) -> None:
    """Train on a rank's share."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    for step in range(STEPS):
        handle.context.reset_census()
        loss_of(model, batch(2 * step + rank)).backward()
        check_census(handle, model, recipe)
        optimizer.step()
        optimizer.zero_grad()
    assert handle.step == STEPS


def ddp(rank: int, mesh: Any) -> None:
    model, handle = converted()
    train(nn.parallel.DistributedDataParallel(model), handle, rank)
    for got, want in zip(model.parameters(), alone(), strict=True):
        assert torch.equal(got, want)


def shard(model: Model, mesh: Any, **given: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)


def fsdp(rank: int, mesh: Any) -> None:
    model, handle = converted()
    shard(model, mesh)
    train(model, handle, rank)
    model.reshard()
    for got, want in zip(model.parameters(), alone(), strict=True):
        assert torch.equal(got.full_tensor(), want)
    with pytest.raises(LayerError, match="blocks.0.up: its weight is sharded"):
        handle.unconvert()


def policy(rank: int, mesh: Any) -> None:
    """Under a mixed-precision policy the layers read weights in bfloat16, and master weights stay float32."""
    model, handle = converted(PLAIN)
    want, _ = converted(PLAIN)
    with torch.no_grad():
        for parameter in want.parameters():
            parameter.copy_(parameter.bfloat16())
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda block, given, y: seen.append((*given, y)))
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with torch.no_grad():
        model(batch(0))
        ((x, y),) = seen
        assert x.dtype is y.dtype is torch.bfloat16
        assert torch.equal(y, want.blocks[0](x))
    train(model, handle, rank, PLAIN)
    model.reshard()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def main(rank: int, store: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "returned a view tensor", UserWarning
    )  # of an Embedding, by torch itself
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for case in (ddp, fsdp, policy):
        case(rank, mesh)
        print(rank, case.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
