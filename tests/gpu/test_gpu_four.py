"""Training on four GPUs through NCCL: groups that split, other numbers of ranks, and a killed rank of `mxref train`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.four_gpus import STEPS
from gpu.launched import PATIENCE, end, start
from gpu.test_gpu_captured_runs import SETTINGS
from gpu.test_gpu_two import BACKEND, losses, near
from gpu.two_gpus import RECIPES
from training_setup import metrics

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE + 60),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs"),
    pytest.mark.xdist_group("layouts of four"),  # tests share the runs of a fixture
]


def script(ranks: int, folder: Path, *stop: str) -> None:
    end(start(str(Path(__file__).with_name("four_gpus.py")), str(folder), BACKEND, *stop, ranks=ranks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of four ranks, and those of two."""
    path = tmp_path_factory.mktemp("four")
    for ranks in (4, 2):
        script(ranks, path)
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_that_split_add_as_two_ranks_that_take_turns(folder: Path, recipe: str) -> None:
    """Each group adds two gradients, and so do the groups. One GPU adds four in turns, which is another order."""
    assert losses(folder / f"groups-{recipe}") == losses(folder / f"turns-{recipe}")


def test_a_run_goes_on_with_two_gpus_and_with_four_again(folder: Path, tmp_path: Path) -> None:
    """Its first two steps are those of four ranks; then the batch is added in another order."""
    out = tmp_path / "resumed"
    for ranks, stop in ((4, 2), (2, 4), (4, STEPS)):
        script(ranks, out, str(stop))
    found, whole = losses(out), losses(folder / "whole")
    assert [line["step"] for line in found if "lr" in line] == list(range(1, STEPS + 1))
    first = [line for line in whole if line["step"] <= 2]
    assert found[: len(first)] == first
    near(found, whole)
    assert (out / "checkpoints" / f"step-{STEPS}" / "model-4-of-4.safetensors").is_file()


def test_a_rank_of_four_that_is_killed_in_a_graph_starts_again_and_resumes(tmp_path: Path) -> None:
    """The log is that of a run without a kill, byte for byte."""

    def begin(name: str, fate: str, restarts: int) -> subprocess.Popen[str]:
        command = [fate, "tiny", "--recipe", "mxfp4_h16", "--out", str(tmp_path / name)]
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        return start(
            str(Path(__file__).with_name("captured_runs.py")), *command, *settings, ranks=4, restarts=restarts,
            MXREF_BACKEND=BACKEND,
        )  # fmt: skip

    end(begin("whole", "none", 0))
    output = end(begin("killed", "SIGKILL@10", 1))
    assert "-9" in output  # the launcher tells how the rank ended
    assert re.search(r"resumed at step [369] of 16", output)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
