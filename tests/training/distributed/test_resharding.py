"""Two processes save DTensors, and one or two go on with any placement: the same bits, also of the step after."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import warm
from mxref_training.distributed.ranks import SOLE
from mxref_training.run.checkpoint import CheckpointStore
from sharded_job import PLACEMENTS, SHAPES, resume, save, state, take_step

WORLD = 2


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def started(folder: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job, with the environment that `torchrun` gives them."""
    tests = Path(__file__).parents[2]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"} | {
        "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "PYTHONPATH": str(tests)
    }  # fmt: skip
    return [
        warm.Popen(
            [sys.executable, "-m", "sharded_job", str(folder)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the job, and those of one process that took the same steps."""
    folder = tmp_path_factory.mktemp("job")
    alone = state("alone", SOLE)
    for step in (1, 2):
        take_step(alone, step)
        save(alone, folder / "alone", step)
    processes = started(folder)
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(texts)
    return folder


def everything(folder: Path, step: int) -> dict[str, Tensor]:
    """All weights and moments of a checkpoint, whole."""
    found = CheckpointStore(folder, 9).load(step)
    assert found.state["loader"] == {"at": step}
    return found.tensors["model"] | found.tensors["optimizer"]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert len(found) == 4 * len(SHAPES)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_two_ranks_wrote_is_what_one_writes(job: Path, placement: str) -> None:
    for step in (1, 2):
        assert_same(everything(job / placement, step), everything(job / "alone", step))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_process_goes_on(job: Path, placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = torch.get_rng_state()  # the job seeds each rank with its number
    torch.manual_seed(99)
    made = state("alone", SOLE, fill=False)
    said = resume(made, job / placement, 1)
    assert said.startswith("resumes on 1 rank what 2 ranks wrote: losses may differ in the last bits")
    assert torch.equal(torch.get_rng_state(), first)
    take_step(made, 2)
    save(made, tmp_path, 2)
    assert_same(everything(tmp_path, 2), everything(job / "alone", 2))


@pytest.mark.parametrize(
    ("before", "after"), [*((a, b) for a in PLACEMENTS for b in PLACEMENTS), ("alone", "shard")]
)
def test_two_ranks_go_on_under_another_placement(job: Path, before: str, after: str) -> None:
    assert_same(everything(job / f"{before}-{after}", 2), everything(job / "alone", 2))


def test_each_rank_wrote_half(job: Path) -> None:
    whole = sum(tensor.nbytes for tensor in everything(job / "alone", 1).values())
    for placement in PLACEMENTS:
        sizes = [
            sum(p.stat().st_size for p in (job / placement / "step-1").glob(f"[mo]*-{rank}-of-2.safetensors"))
            for rank in (1, 2)
        ]
        assert abs(sizes[0] - sizes[1]) < whole, placement
        assert sum(sizes) < whole + 8 * 1024, placement  # and four headers
