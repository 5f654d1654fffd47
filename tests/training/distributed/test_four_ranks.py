"""The parts of four ranks in every layout, by arithmetic alone: no process is started."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxref_torch import convert
from mxref_training.config import Axes
from mxref_training.distributed import sharded
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.share import Share, clip_split_gradients
from mxref_training.model.llama import Llama
from rank_threads import on_ranks
from training_setup import CONFIG

MODEL = replace(CONFIG.model, layers=1, width=64, heads=4, kv_heads=4, ffn=96, vocab=301)
RUN = replace(CONFIG.run, batch=24, micro_batch=12)
LAYOUTS = [Axes(*sizes) for sizes in itertools.product((1, 2, 4), repeat=3) if prod(sizes) == 4]


@dataclass
class Part:
    """A split tensor as one of the ranks has it, in place of a DTensor."""

    placements: Any
    device_mesh: Any
    local: Any = None

    def to_local(self) -> Any:
        return self.local


def place(axes: Axes, rank: int) -> dict[str, int]:
    """The coordinates of a rank: the last axis changes first."""
    return {
        "replicate": rank // (axes.shard * axes.tensor), "shard": rank // axes.tensor % axes.shard,
        "tensor": rank % axes.tensor,
    }  # fmt: skip


@pytest.fixture(params=LAYOUTS, ids=lambda axes: "x".join(map(str, axes)))
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[Axes, dict[str, Any]]]:
    """A layout, and the parameters of its first rank, split by FSDP2 itself over ranks that do not exist."""
    axes, cpu = request.param, torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = Llama(MODEL, device="meta")
        convert(model, "bf16", backend="reference", seed=3)
        sharded.shard(model, sharded.make_mesh(cpu, axes), cpu)
        yield axes, dict(model.named_parameters())
    finally:
        dist.destroy_process_group()


def parts(axes: Axes, parameter: Any, whole: Any) -> list[Part]:
    """The parts of a whole tensor on all ranks, where the first rank has a parameter of this layout."""
    mesh, found = parameter.device_mesh, []
    for rank in range(4):
        at = [place(axes, rank)[name] for name in mesh.mesh_dim_names]
        stub = SimpleNamespace(get_coordinate=lambda at=at: at, size=mesh.size)
        found.append(Part(parameter.placements, stub))
        found[-1].local = sharded.part_of(whole, found[-1]).clone()  # type: ignore[arg-type]
    return found


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = sharded.is_split
    monkeypatch.setattr(sharded, "is_split", lambda tensor: isinstance(tensor, Part) or of_torch(tensor))


def test_every_element_lies_on_as_many_ranks_as_are_counted(layout: tuple[Axes, dict[str, Any]]) -> None:
    """Rows of outputs and columns of inputs lie together on the ranks that compute a layer together."""
    axes, parameters = layout
    for name, parameter in parameters.items():
        whole = torch.arange(parameter.numel()).view(parameter.shape)
        held = parts(axes, parameter, whole)
        assert held[0].local.shape == parameter.to_local().shape, name
        counts = torch.bincount(torch.cat([part.local.flatten() for part in held]), minlength=whole.numel())
        assert (counts == sharded.copies(parameter, 4)).all(), name
        last = name.split(".")[-2]
        for rank, part in enumerate(held):
            if last in (*sharded.OUTPUTS, *sharded.INPUTS):
                axis = int(last in sharded.INPUTS)
                band = whole.chunk(axes.tensor, axis)[rank % axes.tensor]
                assert torch.isin(part.local, band).all(), name


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9], ids=["never", "clips", "small"])
def test_clipping_on_ranks_scales_down_what_is_too_large_and_nothing_else(
    layout: tuple[Axes, dict[str, Any]], limit: float
) -> None:
    axes, parameters = layout
    draws = torch.Generator().manual_seed(1)
    wholes = [torch.randn(p.shape, generator=draws) / 64 for p in parameters.values()]
    held = [parts(axes, p, whole) for p, whole in zip(parameters.values(), wholes, strict=True)]
    norm = torch.cat([whole.double().flatten() for whole in wholes]).norm().item()
    assert 1 < norm < 1e3

    def clip(ranks: Ranks) -> tuple[float, list[Any]]:
        own = [SimpleNamespace(grad=part[ranks.rank]) for part in held]
        model: Any = SimpleNamespace(parameters=lambda: own)
        return clip_split_gradients(model, limit, ranks), [p.grad.local for p in own]

    before = [[part.local.clone() for part in of] for of in held]
    for rank, (found, after) in enumerate(on_ranks(4, clip)):
        assert found == pytest.approx(norm, rel=1e-6)
        scale = limit / norm if limit == 0.5 else 1.0
        for was, now in zip((of[rank] for of in before), after, strict=True):
            if scale == 1:
                assert torch.equal(was, now)
            else:
                torch.testing.assert_close(now, was * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "x".join(map(str, axes)))
def test_the_shares_of_all_ranks_are_the_batch_in_its_order(axes: Axes) -> None:
    def share(ranks: Ranks) -> tuple[list[list[int]], list[float]]:
        own = Share(ranks, axes)
        rows = [list(range(RUN.batch))[own.rows(RUN, number)] for number in range(RUN.micro_batches)]
        return rows, own.in_order([float(of[0]) for of in rows])

    found = on_ranks(4, share)
    for number in range(RUN.micro_batches):
        of_parts = [found[rank][0][number] for rank in range(0, 4, axes.tensor)]
        assert [*itertools.chain(*of_parts)] == list(range(12 * number, 12 * number + 12))
    for rank, (rows, order) in enumerate(found):
        assert rows == found[rank - rank % axes.tensor][0]
        assert order == [
            12 * number + 12 // axes.data * part for number in (0, 1) for part in range(axes.data)
        ]
