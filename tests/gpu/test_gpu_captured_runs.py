"""`mxref train` on two ranks whose steps are CUDA graphs: evaluations, checkpoints, SIGTERM, a killed rank and phases.

All runs are started at once, because each of them spends most of its time in imports and connections.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu.launched import PATIENCE, end, kill, start
from training_setup import lines, metrics

STEPS = 16
SETTINGS = (
    "run.capture=true", f"run.steps={STEPS}", "run.eval_every=4", "run.eval_tokens=640", "run.checkpoint_every=3",
    "run.keep=9", "run.batch=8", "run.micro_batch=4", "optim.clip=0.5",
)  # fmt: skip
"""The evaluation has ten windows in batches of two: the ranks have not the same number of them."""
PHASES = """
dialect = "amd"
gemm = "bounded"
all.hadamard = 16

[[schedule]]
name = "warm-up"
until = 7
recipe = "fp8"
"""

pytestmark = [
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.xdist_group("captured runs"),  # tests share the runs of a fixture
]


def begin(
    out: Path, *settings: str, fate: str = "none", recipe: str = "mxfp4_h16", restarts: int = 0
) -> subprocess.Popen[str]:
    arguments = [x for setting in (*SETTINGS, *settings) for x in ("--set", setting)]
    command = [fate, "tiny", "--recipe", recipe, *arguments, "--out", str(out)]
    script = str(Path(__file__).with_name("captured_runs.py"))
    return start(script, *command, restarts=restarts, MXREF_BACKEND="triton")


def captures(output: str) -> list[int]:
    """How many graphs each rank captured that came to its end."""
    return [int(found) for found in re.findall(r"rank \d captured (\d+);", output)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, subprocess.Popen[str]]]]:
    """The folder of all runs, and the jobs that make them, each of which one test waits for."""
    root = tmp_path_factory.mktemp("runs")
    recipe = root / "phases.toml"
    recipe.write_text(PHASES, encoding="utf-8")
    started = {
        "whole": begin(root / "whole"),
        "background": begin(root / "background", "run.async_checkpoint=true"),
        "stopped": begin(root / "stopped", fate="SIGTERM@6"),
        "killed": begin(root / "killed", "run.async_checkpoint=true", fate="SIGKILL@10", restarts=1),
        "phases": begin(root / "phases", recipe=str(recipe)),
        "plain phases": begin(root / "plain phases", fate="plain", recipe=str(recipe)),
    }
    yield root, started
    for process in started.values():
        kill(process)
        if process.stdout and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="module")
def whole(jobs) -> Path:
    """A run that nothing disturbs, as one graph on each rank."""
    root, started = jobs
    output = end(started["whole"])
    assert captures(output) == [1, 1], output
    return root / "whole"


def parts(folder: Path) -> dict[str, bytes]:
    """What all checkpoints of a run hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "checkpoints").rglob("*.safetensors"))
    }


def test_the_run_evaluates_and_saves_between_graphs(whole, cases):
    found = lines(whole)
    assert [line["step"] for line in found if "lr" in line] == [*range(1, STEPS + 1)]
    assert [line["step"] for line in found if "val_loss" in line] == [4, 8, 12, 16]
    losses = [line["loss"] for line in found if "lr" in line]
    assert len(set(losses)) == STEPS
    assert losses[-1] < losses[0]
    assert {path.split("/")[1] for path in parts(whole)} == {f"step-{n}" for n in (3, 6, 9, 12, 15, 16)}
    cases(STEPS)


def test_saving_in_the_background_changes_no_bit(whole, jobs, cases):
    root, started = jobs
    output = end(started["background"])
    assert captures(output) == [1, 1], output
    assert metrics(root / "background") == metrics(whole)
    assert parts(root / "background") == parts(whole)
    cases(STEPS)


def test_sigterm_in_a_graph_stops_all_ranks_which_resume(whole, jobs, cases):
    root, started = jobs
    output = end(started["stopped"])
    assert "interrupted: SIGTERM after step 7 of 16: saved" in output
    assert captures(output) == [1, 1], output
    assert [line["step"] for line in lines(root / "stopped") if "lr" in line] == [*range(1, 8)]
    output = end(begin(root / "stopped"))
    assert "resumed at step 7 of 16" in output
    assert captures(output) == [1, 1], output
    assert metrics(root / "stopped") == metrics(whole)
    assert parts(root / "stopped").items() >= parts(whole).items()
    cases(STEPS)


def test_a_rank_that_is_killed_in_a_graph_starts_again_and_resumes(whole, jobs, cases):
    root, started = jobs
    output = end(started["killed"])
    assert "-9" in output  # the launcher tells how the rank ended
    assert re.search(r"resumed at step [369] of 16", output)
    assert captures(output)[-2:] == [1, 1], output
    assert metrics(root / "killed") == metrics(whole)
    last = {name: value for name, value in parts(whole).items() if "step-16" in name}
    assert last
    assert parts(root / "killed").items() >= last.items()
    cases(STEPS)


def test_each_phase_is_a_graph_with_the_bits_of_steps_without(jobs, cases):
    root, started = jobs
    outputs = [started[name].communicate(timeout=PATIENCE)[0] for name in ("phases", "plain phases")]
    assert [started[name].returncode for name in ("phases", "plain phases")] == [0, 0], outputs
    assert [captures(output) for output in outputs] == [[2, 2], [0, 0]], outputs
    assert metrics(root / "phases") == metrics(root / "plain phases")
    assert parts(root / "phases") == parts(root / "plain phases")
    cases(STEPS)
