"""Training on four GPUs through NCCL: groups that split, other numbers of ranks, and a killed rank of `mxref train`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.four_gpus import STEPS
from gpu.launched import PATIENCE, end, end_killed, start
from gpu.test_gpu_two import losses, near
from gpu.two_gpus import RECIPES
from training_setup import metrics

BACKEND = "triton"
GPUS = torch.cuda.device_count()
KILLED_STEPS = 600
MXREF = [
    "--no-python", str(Path(sys.executable).with_name("mxref")), "train", "tiny", "--recipe", "mxfp4_h16", "--data",
    "builtin", "--backend", BACKEND, "--set", "run.capture=true", "--set", f"run.steps={KILLED_STEPS}", "--set",
    "run.checkpoint_every=25", "--set", "run.eval_every=100",
]  # fmt: skip

pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.xdist_group("four GPUs"),  # tests share the runs of a fixture
]
four = pytest.mark.skipif(GPUS < 4, reason="fewer than four GPUs")


def script(ranks: int, what: str, folder: Path) -> None:
    end(start(str(Path(__file__).with_name("four_gpus.py")), what, str(folder), BACKEND, ranks=ranks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of four ranks, and those of two."""
    path = tmp_path_factory.mktemp("four")
    for ranks in (4, 2):
        script(ranks, "layouts", path)
    return path


@four
@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_that_split_add_as_two_ranks_that_take_turns(folder: Path, recipe: str) -> None:
    """Each group adds two gradients, and so do the groups. One GPU adds four in turns, which is another order."""
    assert losses(folder / f"groups-{recipe}") == losses(folder / f"turns-{recipe}")


@four
def test_a_run_goes_on_with_two_gpus_and_with_four_again(folder: Path, tmp_path: Path) -> None:
    """Its first two steps are those of four ranks; then the batch is added in another order."""
    out = tmp_path / "resumed"
    for ranks in (4, 2, 4):
        script(ranks, "resumed", out)
    found, whole = losses(out), losses(folder / "whole")
    assert [line["step"] for line in found if "lr" in line] == list(range(1, STEPS + 1))
    first = [line for line in whole if line["step"] <= 2]
    assert found[: len(first)] == first
    near(found, whole)
    assert (out / "checkpoints" / f"step-{STEPS}" / "model-4-of-4.safetensors").is_file()


@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_a_killed_rank_of_the_command_is_started_again_and_resumes(tmp_path: Path) -> None:
    """Steps are CUDA graphs, and the log is that of a run without a kill, byte for byte."""
    ranks = min(GPUS, 4)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    cache = str(tmp_path / "cache")
    end(start(*MXREF, "--out", str(whole), ranks=ranks, XDG_CACHE_HOME=cache))
    process = start(*MXREF, "--out", str(out), ranks=ranks, restarts=1, XDG_CACHE_HOME=cache)
    done = end_killed(process, out, 60)
    assert done < KILLED_STEPS, "it was killed before the end"
    assert metrics(out) == metrics(whole)
