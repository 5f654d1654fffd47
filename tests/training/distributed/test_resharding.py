"""Two processes save DTensors, and one or two go on with any placement: the same bits, also of the step after."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import assert_all_pass
from sharded_job import ON_FOUR, PLACEMENTS, RUN, SHAPES, resume, save, state, take_step
from torch import Tensor

from mxref_training.checkpoint import CheckpointStore
from mxref_training.distributed.ranks import SOLE
from mxref_training.errors import CheckpointError
from training_setup import Saboteur, change, crash, lines, metrics, run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the job, and those of one process that took the same steps."""
    folder = tmp_path_factory.mktemp("job")
    alone = state("alone", SOLE)
    for step in (1, 2):
        take_step(alone, step)
        save(alone, folder / "alone", step)
    run(folder / "one-two", "fp8", RUN, stop_after=2)
    assert_all_pass("sharded_job.py", 2, str(folder))
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


@pytest.mark.long
def test_four_ranks_with_hybrid_and_tensor_parallel_placements(job: Path, tmp_path: Path) -> None:
    assert_all_pass("sharded_job.py", 4, str(tmp_path))
    for before in ON_FOUR:
        assert_same(everything(tmp_path / before, 1), everything(job / "alone", 1))
        for after in ON_FOUR:
            assert_same(everything(tmp_path / f"{before}-{after}", 2), everything(job / "alone", 2))


# --- whole runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one process began and ended."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder, "fp8", RUN)
    return folder


def assert_close(out: Path, alone: Path) -> None:
    """Sums over ranks have another order, and FP8 turns a last bit into a little more; nothing else differs."""
    assert len(lines(out)) == len(lines(alone)) == 6
    for found, wanted in zip(lines(out), lines(alone), strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=0.01), key


def test_one_process_ends_what_two_began(job: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(job / "two-one", out)
    begun = metrics(out)
    sink = Saboteur(0, crash)
    run(out, "fp8", RUN, progress=sink)
    assert sink.notes == [
        "resumes on 1 rank what 2 ranks wrote: losses may differ in the last bits, because sums have another order",
        "resumed at step 2 of 4",
    ]
    assert metrics(out).startswith(begun)
    assert_close(out, alone)
    assert (out / "checkpoints" / "step-4" / "model.safetensors").exists()


def test_two_ranks_end_what_one_began(job: Path, alone: Path) -> None:
    assert metrics(job / "one-two").startswith(b"".join(metrics(alone).splitlines(keepends=True)[:3]))
    assert_close(job / "one-two", alone)
    assert (job / "one-two" / "checkpoints" / "step-4" / "model-2-of-2.safetensors").exists()


def test_a_signal_to_one_rank_stops_both_and_changes_nothing(job: Path, alone: Path) -> None:
    assert_close(job / "stopped", alone)
    assert CheckpointStore(job / "stopped" / "checkpoints", 2).state(3)["ranks"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "bf16"}, "holds another run: recipe"),
        ({"config": change(RUN, seed=4)}, "run.seed is 3 there and 4 here"),
    ],
)
def test_another_recipe_or_seed_is_refused_whoever_wrote(
    job: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(job / "two-one", out)
    with pytest.raises(CheckpointError, match=said):
        run(out, **{"recipe": "fp8", "config": RUN, **options})


def test_a_shard_of_a_run_that_is_missing_is_named(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(job / "two-one", out)
    (out / "checkpoints" / "step-2" / "optimizer-2-of-2.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="step-2 is damaged: .*optimizer-2-of-2.safetensors.*step-1 delete"
    ):
        run(out, "fp8", RUN)
