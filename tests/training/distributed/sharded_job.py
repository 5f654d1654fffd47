"""One rank of a job that saves and loads sharded checkpoints: `sharded_job.py FOLDER`.

Every placement has a folder of its own. The step before a checkpoint and the one after it take gradients that depend on
names and shapes alone, so that one process can take the same steps and compare every bit.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mxref_training.checkpoint import CheckpointStore
from mxref_training.distributed.connect import connected, started_ranks
from mxref_training.distributed.ranks import Ranks
from mxref_training.resume import resharded
from mxref_training.run_state import RunState
from mxref_training.steps import EagerSteps
from mxref_training.trainer import Interrupted
from training_setup import CONFIG, Saboteur, change, crash, run

SHAPES = {"even": (8, 6), "uneven": (7, 4), "one": (1, 6), "norm": (5,)}
PLACEMENTS = ("shard", "replicate", "columns")
ON_FOUR = ("shard", "hybrid", "strided")
CPU = torch.device("cpu")
RUN = change(
    CONFIG,
    batch=4,
    micro_batch=4,
    steps=4,
    threads=1,
    eval_every=2,
    checkpoint_every=1,
    async_checkpoint=True,
)


class Position:
    """As much of a loader as a checkpoint needs."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def drawn(name: str, shape: tuple[int, ...], what: int) -> Tensor:
    """The same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + what))


class Model(nn.Module):
    """Weights of several shapes, and the configuration that a run's state asks for."""

    def __init__(self, fill: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_embeddings=False)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(drawn(name, shape, 0) if fill else torch.zeros(shape)))


def placed(model: Model, placement: str, world: int) -> Model:
    """Spread a model over all ranks; `alone` leaves it as it is."""
    if placement == "shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    elif placement == "replicate":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif placement == "strided":  # FSDP2 splits what tensor parallelism has split along the same dimension
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
        for name, held in list(model.named_parameters()):
            halves = Shard(0) if held.shape[0] % 2 == 0 else Replicate()
            spread = distribute_tensor(held.detach(), mesh["tensor"], [halves])
            model.register_parameter(name, nn.Parameter(spread))
        fully_shard(model, mesh=mesh["shard"])
    elif placement == "hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif placement == "columns":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
        for name, held in list(model.named_parameters()):
            spread = distribute_tensor(held.detach(), mesh, [Shard(held.ndim - 1)])
            model.register_parameter(name, nn.Parameter(spread))
    return model


def state(placement: str, ranks: Ranks, fill: bool = True) -> RunState:
    """Return the state of a run before its first step; without `fill` all weights are zero."""
    model = placed(Model(fill), placement, ranks.world)
    # The fused kernel rounds the last few elements of a tensor otherwise, so its bits depend on where a tensor is cut.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return RunState(model, optimizer, Position(), CPU, ranks)  # type: ignore[arg-type]


def take_step(made: RunState, number: int) -> None:
    """Take an optimizer step whose gradients are known."""
    for name, parameter in made.model.named_parameters():
        gradient = drawn(name, SHAPES[name], number)
        if isinstance(parameter, DTensor):
            ((offset, sizes),) = ((c.offsets, c.sizes) for c in parameter.__create_chunk_list__())
            for dimension, (first, length) in enumerate(zip(offset, sizes, strict=True)):
                gradient = gradient.narrow(dimension, min(first, gradient.shape[dimension]), length)
            gradient = DTensor.from_local(
                gradient.contiguous(), parameter.device_mesh, parameter.placements,
                run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        parameter.grad = gradient
    made.optimizer.step()
    made.loader.at += 1  # type: ignore[attr-defined]


def save(made: RunState, folder: Path, step: int) -> None:
    CheckpointStore(folder, 9, made.ranks).save(made.snapshot(step, {"identity": {}}))


def resume(made: RunState, folder: Path, step: int) -> str:
    """Take a checkpoint; return the note about other ranks."""
    found = made.restore(CheckpointStore(folder, 9, made.ranks), step)
    return resharded(found, made.ranks, {})


def go_on(folder: Path, placement: str, others: Sequence[str], ranks: Ranks) -> None:
    """Take two steps with checkpoints; then resume from the first one, also under the other placements."""
    made = state(placement, ranks)
    take_step(made, 1)
    torch.manual_seed(ranks.rank)
    generator = torch.get_rng_state()
    save(made, folder / placement, 1)
    take_step(made, 2)
    save(made, folder / placement, 2)
    for other in others:
        torch.manual_seed(99)
        again = state(other, ranks, fill=False)
        note = resume(again, folder / placement, 1)
        assert not note or "losses may differ" in note
        assert torch.equal(torch.get_rng_state(), generator)
        take_step(again, 2)
        save(again, folder / f"{placement}-{other}", 2)


def change_ranks(folder: Path, ranks: Ranks) -> None:
    """Begin a run that one process ends, and end one that one process began."""
    run(folder / "two-one", "fp8", RUN, ranks=ranks, stop_after=2)
    sink = Saboteur(0, crash)
    run(folder / "one-two", "fp8", RUN, ranks=ranks, progress=sink)
    assert not ranks.first or any("resumes on 2 ranks what 1 rank wrote" in said for said in sink.notes)


def stop_both(folder: Path, ranks: Ranks) -> None:
    """Have the second rank alone receive a signal, in its third step."""
    take = EagerSteps.take

    def signalled(self: EagerSteps, batch: Any, step: int, *others: Any) -> Any:
        if ranks.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, batch, step, *others)

    EagerSteps.take = signalled  # type: ignore[method-assign]
    try:
        with pytest.raises(Interrupted, match="^SIGTERM after step 3 of 4: saved in "):
            run(folder, "fp8", RUN, ranks=ranks)
    finally:
        EagerSteps.take = take  # type: ignore[method-assign]
    run(folder, "fp8", RUN, ranks=ranks)


def main(folder: Path) -> None:
    ranks = started_ranks()
    with connected(ranks):
        if ranks.world == 4:
            for placement in ON_FOUR:
                go_on(folder, placement, ON_FOUR, ranks)
            return
        for placement in PLACEMENTS:
            go_on(folder, placement, PLACEMENTS, ranks)
        change_ranks(folder, ranks)
        stop_both(folder / "stopped", ranks)
        made = state("shard", ranks, fill=False)
        note = resume(made, folder / "alone", 1)
        assert note.startswith("resumes on 2 ranks what 1 rank wrote"), note
        take_step(made, 2)
        save(made, folder / "alone-shard", 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
