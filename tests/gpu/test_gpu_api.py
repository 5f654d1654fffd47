"""The handle on a GPU: compiled, checkpointed, under autocast and sharded training take the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from mxref_torch import Handle, check_census, convert

SR = recipe_from_table({"gemm": "ordered", "all": {"rounding": "sr"}})
FP8 = recipe_from_table({"all": {"format": "fp8"}})


class Model(nn.Module):
    """Two residual layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)) for _ in range(2)
        )
        self.lm_head = nn.Linear(128, 64, bias=False)
        self.run: Any = lambda block, x: block(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.run(block, x)
        return self.lm_head(x)


def plain(model: Model) -> Any:
    return model


def checkpointed(model: Model) -> Any:
    model.run = partial(checkpoint, use_reentrant=False)
    return model


def by_block(model: Model) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return model


def whole(model: Model) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def sharded(model: Model) -> Any:
    mesh = init_device_mesh("cuda", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(recipe: Any, way: Any, autocast: bool) -> tuple[Handle, dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    model = Model().cuda()
    handle = convert(model, recipe, backend=get_backend("triton"), seed=1)
    run = way(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    for step in range(2):
        handle.context.reset_census()
        for part in range(2):
            ids = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(2 * step + part)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(run(ids).float().flatten(0, 1), ids.flatten())
            loss.backward()
        check_census(handle, run, recipe, 2)
        optimizer.step()
        optimizer.zero_grad()
    if way is sharded:
        run.reshard()
    found = {name.replace("_orig_mod.", ""): p.detach() for name, p in model.named_parameters()}
    return handle, {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()}


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("recipe", [SR, FP8], ids=["SR", "fp8"])
def test_every_way_of_training_takes_the_same_steps(recipe: Any, autocast: bool, cases: Any) -> None:
    _, want = trained(recipe, plain, autocast)
    for way in (checkpointed, by_block, whole, sharded):
        handle, got = trained(recipe, way, autocast)
        assert handle.step == 2, way.__name__
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (way.__name__, name)
    cases(4)
