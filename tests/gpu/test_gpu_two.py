"""Training on two GPUs through NCCL: layouts, resumption on other numbers of ranks, a killed rank, background saves."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from safetensors.torch import load_file

from gpu.launched import PATIENCE, end, ranks_of, send, start
from gpu.two_gpus import KILLED_STEPS, RECIPES
from training_setup import lines, metrics

BACKEND = "triton"

pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.xdist_group("layouts of two"),  # tests share the runs of a fixture
]


def begin(*arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    return start(str(Path(__file__).with_name("two_gpus.py")), *arguments, BACKEND, restarts=restarts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all layouts."""
    path = tmp_path_factory.mktemp("two")
    end(begin("layouts", str(path)))
    return path


def losses(folder: Path) -> list[dict[str, Any]]:
    """The log without the norms of gradients, which several ranks add in another way."""
    return [{key: value for key, value in line.items() if key != "grad_norm"} for line in lines(folder)]


def near(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Compare logs whose sums were added in another order, which later steps magnify."""
    for here, there in zip(mine, other, strict=True):
        assert here.keys() == there.keys()
        for key in here:
            assert here[key] == pytest.approx(there[key], rel=1e-3 if here["step"] == 1 else 0.05), key


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["shard", "replicate"])
def test_losses_are_those_of_one_gpu(folder: Path, layout: str, recipe: str) -> None:
    """Two gradients are added in one order only, so FSDP and HSDP have the bits of one process."""
    assert losses(folder / f"{layout}-{recipe}") == losses(folder / f"alone-{recipe}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_parallelism_is_near_one_gpu(folder: Path, recipe: str) -> None:
    """Sums over ranks are added in another order, and what the ranks add was rounded before."""
    near(losses(folder / f"tensor-{recipe}"), losses(folder / f"alone-{recipe}"))


def test_tensor_parallelism_repeats_its_bits(folder: Path) -> None:
    assert metrics(folder / "tensor-again") == metrics(folder / "tensor-sr_h16")


def test_a_run_goes_on_with_one_gpu_and_with_two_again(folder: Path) -> None:
    """Its first two steps are those of two ranks; then the batch is added in another order."""
    found, whole = losses(folder / "resumed"), losses(folder / "shard-sr_h16")
    assert [line["step"] for line in found if "lr" in line] == [1, 2, 3, 4, 5, 6]
    first = [line for line in whole if line["step"] <= 2]
    assert found[: len(first)] == first
    near(found[: len(whole)], whole)
    assert (folder / "resumed" / "checkpoints" / "step-6" / "model-2-of-2.safetensors").is_file()


def test_saving_in_the_background_changes_no_bit(folder: Path) -> None:
    assert metrics(folder / "background") == metrics(folder / "foreground")
    saved = [
        sorted((folder / kind / "checkpoints").rglob("*.safetensors"))
        for kind in ("background", "foreground")
    ]
    assert [path.name for path in saved[0]] == [path.name for path in saved[1]]
    assert len(saved[0]) == 2 * 2 * 3  # checkpoints, ranks, groups
    for mine, other in zip(*saved, strict=True):
        tensors, others = load_file(mine), load_file(other)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.equal(
                tensor.reshape(-1).view(torch.uint8), others[name].reshape(-1).view(torch.uint8)
            ), name


def test_a_killed_rank_is_started_again_and_resumes(folder: Path, tmp_path: Path) -> None:
    out, until = tmp_path / "run", time.monotonic() + PATIENCE
    process = begin("train", str(out), restarts=1)
    try:
        while not (out / "metrics.jsonl").exists() or metrics(out).count(b"\n") < 10:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "no step was logged"
            time.sleep(0.005)
        done = metrics(out).count(b"\n")
        send(ranks_of(process)[-1])
    finally:
        output = end(process)
    assert done < KILLED_STEPS, "it was killed before the end"
    assert "-9" in output  # the launcher tells how the rank ended
    assert metrics(out) == metrics(folder / "undisturbed")
