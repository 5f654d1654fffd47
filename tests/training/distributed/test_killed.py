"""A run of two ranks that is killed again and again, at random points, ends with the log of one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

KILLS = 20
STEPS, EVERY = 120, 4
"""Optimizer steps of a run, and between its checkpoints."""
SMALL = (
    "run.batch=4", "run.micro_batch=2", "run.seq_len=32", "run.eval_every=10", "run.eval_tokens=128",
    f"run.steps={STEPS}", f"run.checkpoint_every={EVERY}", "run.keep=2", "model.layers=1", "model.width=64",
    "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=300", "model.max_seq=32",
)  # fmt: skip
RECIPE = 'dialect = "amd"\nall.rounding = "sr"\n'
PATIENCE = 300

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@dataclass
class Job:
    """A run of two ranks under `torchrun`, and how often it was started."""

    folder: Path
    out: Path
    options: tuple[str, ...] = ()
    restarts: int = 0
    output: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        settings = [word for setting in (*SMALL, *self.options) for word in ("--set", setting)]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", str(self.restarts), "--no-python", str(Path(sys.executable).with_name("mxref")), "train",
            "tiny", "--recipe", "recipe.toml", "--data", "train.jsonl", "--val", "val.jsonl",
            "--backend", "numba", "--out", str(self.out), *settings,
        ]  # fmt: skip
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=self.folder, env=quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> int:
        """Wait for the job, and kill what is left of it."""
        try:
            self.output.append(process.communicate(timeout=PATIENCE)[0])
        finally:
            kill_session(process.pid)
        return process.returncode

    def steps(self) -> int:
        """The steps that the log has."""
        try:
            return sum('"lr"' in line for line in (self.out / "metrics.jsonl").read_text().splitlines())
        except OSError:
            return 0

    def metrics(self) -> bytes:
        return (self.out / "metrics.jsonl").read_bytes()


def ranks_of(job: int) -> list[int]:
    """The processes that `torchrun` has started for its ranks, in no order."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, after = int(status.parent.name), status.read_text().rpartition(")")[2].split()
            environment = status.with_name("environ").read_bytes()
        except OSError:
            continue  # it has ended
        if int(after[1]) == job and b"LOCAL_RANK=" in environment:
            found.append(pid)
    return found


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_session(leader: int) -> None:
    """Kill every process of a job. A rank has a session of its own under some versions of `torchrun`."""
    for pid in (*ranks_of(leader), leader):
        send(pid, signal.SIGKILL)


def disturb(job: Job, process: subprocess.Popen[str], chance: random.Random, act: Callable[[], None]) -> bool:
    """Act at a random point: while the job starts, or up to twelve steps on; False if it ended before."""
    before, until = job.steps(), time.monotonic() + PATIENCE
    ahead = chance.choice([0, *range(1, 13)])
    while ahead and job.steps() < before + ahead:
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, "no step was logged"
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.05 if ahead else 4))
    if process.poll() is not None:
        return False
    act()
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed")
    words, chance = ["block", "scale", "element", "round", "sign", "code", "value", "bits"], random.Random(1)
    for name, documents in (("train", 300), ("val", 40)):
        lines = [
            json.dumps({"text": f"{name} {i}: " + " ".join(chance.choices(words, k=60))})
            for i in range(documents)
        ]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (path / "recipe.toml").write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> bytes:
    job = Job(folder, folder / "whole")
    assert job.end(job.start()) == 0, job.output
    assert job.steps() == STEPS
    return job.metrics()


@pytest.mark.parametrize("options", [(), ("run.async_checkpoint=true",)], ids=["", "async"])
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_stopped_at_random_points(
    folder: Path, undisturbed: bytes, signalled: signal.Signals, options: tuple[str, ...]
) -> None:
    """SIGKILL hits one rank, both, or the launcher; SIGTERM hits the launcher or one rank, and loses nothing."""
    chance = random.Random(f"{signalled.name} {options}")
    job = Job(folder, folder / f"{signalled.name}-{len(options)}", options)
    stops = starts = 0
    while stops < KILLS:
        starts += 1
        assert starts < 4 * KILLS, "the run does not get on"
        if job.steps() >= STEPS - 12:  # begin anew: a finished run has nothing to kill
            assert job.end(job.start()) == 0, job.output[-1]
            assert job.metrics() == undisturbed
            job.out = job.out.with_name(f"{job.out.name}+")
        process = job.start()

        def act(process: subprocess.Popen[str] = process) -> None:
            ranks = ranks_of(process.pid)
            whom = chance.choice([[process.pid], ranks[:1], ranks[1:], ranks])
            for pid in whom or [process.pid]:
                send(pid, signalled)
            if process.pid in whom and signalled is signal.SIGKILL:
                kill_session(process.pid)

        stops += disturb(job, process, chance, act)
        job.end(process)
    assert job.end(job.start()) == 0, job.output[-1]
    assert job.metrics() == undisturbed


def test_a_killed_rank_is_started_again_by_the_launcher(folder: Path, undisturbed: bytes) -> None:
    """`torchrun --max-restarts` ends the other rank, starts both anew, and the run goes on from its checkpoint."""
    job = Job(folder, folder / "restarted", restarts=3)
    process = job.start()
    for after in (10, 40):
        until = time.monotonic() + PATIENCE
        while job.steps() < after:
            assert process.poll() is None, job.output
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    assert job.end(process) == 0, job.output
    assert job.metrics() == undisturbed


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(folder: Path, undisturbed: bytes) -> None:
    """The job ends with code 0 and says how to go on; nothing that was logged is computed again."""
    job = Job(folder, folder / "asked")
    process = job.start()
    while job.steps() < 7:
        assert process.poll() is None, job.output
        time.sleep(0.01)
    send(ranks_of(process.pid)[-1], signal.SIGTERM)
    assert job.end(process) == 0, job.output
    assert "the same command goes on from there" in job.output[-1]
    assert f"step-{job.steps()}" == (job.out / "checkpoints" / "latest").read_text().strip()
    assert undisturbed.startswith(job.metrics())
