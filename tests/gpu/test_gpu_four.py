"""Training on four GPUs through NCCL: groups that split, other numbers of ranks, and a killed rank of `mxref train`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.four_gpus import STEPS
from gpu.test_gpu_two import losses, near, ranks_of
from gpu.two_gpus import RECIPES
from places import TESTS
from training_setup import metrics

BACKEND = "triton"
PATIENCE = 240
GPUS = torch.cuda.device_count()
KILLED_STEPS = 600
MXREF = [
    "--no-python", str(Path(sys.executable).with_name("mxref")), "train", "tiny", "--recipe", "mxfp4_h16", "--data",
    "builtin", "--backend", BACKEND, "--set", "run.capture=true", "--set", f"run.steps={KILLED_STEPS}", "--set",
    "run.checkpoint_every=25", "--set", "run.eval_every=100",
]  # fmt: skip

pytestmark = pytest.mark.timeout(PATIENCE + 60)
four = pytest.mark.skipif(GPUS < 4, reason="fewer than four GPUs")


def start(ranks: int, *command: str, restarts: int = 0, cache: Path | None = None) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # A rank that waits on its GPU for one that was killed does not take the launcher's SIGTERM.
    settings = os.environ | {"OMP_NUM_THREADS": "2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    settings["PYTHONPATH"] = os.pathsep.join([str(TESTS), settings.get("PYTHONPATH", "")])
    if cache:
        settings["XDG_CACHE_HOME"] = str(cache)
    return subprocess.Popen(
        [*launcher, "--max-restarts", str(restarts), *command], env=settings, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the job and return what it printed; no process of it stays."""
    try:
        output = process.communicate(timeout=PATIENCE)[0]
    finally:
        for pid in (*ranks_of(process), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def script(ranks: int, what: str, folder: Path) -> None:
    end(start(ranks, str(Path(__file__).with_name("four_gpus.py")), what, str(folder), BACKEND))


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
    whole, out, until = tmp_path / "whole", tmp_path / "killed", time.monotonic() + PATIENCE
    end(start(ranks, *MXREF, "--out", str(whole), cache=tmp_path / "cache"))
    process = start(ranks, *MXREF, "--out", str(out), restarts=1, cache=tmp_path / "cache")
    try:
        while not (out / "metrics.jsonl").exists() or metrics(out).count(b"\n") < 60:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "no step was logged"
            time.sleep(0.005)
        done = metrics(out).count(b"\n")
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
    finally:
        output = end(process)
    assert done < KILLED_STEPS, "it was killed before the end"
    assert "-9" in output  # the launcher tells how the rank ended
    assert metrics(out) == metrics(whole)
