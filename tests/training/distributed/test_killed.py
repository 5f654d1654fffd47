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

KILLS = int(os.environ.get("MXREF_KILLS", "20"))
STEPS, EVERY = 120, 4
"""Optimizer steps of a run, and between its checkpoints."""
SMALL = (
    "run.batch=4", "run.micro_batch=2", "run.seq_len=32", "run.eval_every=10", "run.eval_tokens=128",
    f"run.steps={STEPS}", f"run.checkpoint_every={EVERY}", "run.keep=2", "model.layers=1", "model.width=64",
    "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=300", "model.max_seq=32",
)  # fmt: skip
RECIPE = 'dialect = "amd"\nall.rounding = "sr"\n'
PATIENCE = 300
MARK = "MXREF_JOB_OF_TEST"
"""The environment variable that all processes of a job share. A rank whose launcher was killed has another parent."""

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
            "tiny", "--recipe", "recipe.toml", "--data", "train.jsonl", "--set", "data.val=val.jsonl",
            "--backend", "numba", "--out", str(self.out), *settings,
        ]  # fmt: skip
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", MARK: str(self.out)}
        return subprocess.Popen(
            command, cwd=self.folder, env=quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> int:
        """Wait for the job, and kill what is left of it."""
        try:
            self.output.append(process.communicate(timeout=PATIENCE)[0])
        finally:
            self.kill_all()
        return process.returncode

    def kill_all(self) -> None:
        """Kill every process of the job, also ranks that have lost their launcher."""
        while found := self.processes():
            for pid in found:
                send(pid, signal.SIGKILL)

    def processes(self, of_ranks: bool = False) -> list[int]:
        """The processes of the job that run, or those of its ranks, in no order."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is another user's
            ours = f"{MARK}={self.out}".encode() in environment
            if ours and (not of_ranks or any(entry.startswith(b"LOCAL_RANK=") for entry in environment)):
                found.append(int(path.parent.name))
        return found

    def ranks(self) -> list[int]:
        """The processes of the ranks, in no order."""
        return self.processes(of_ranks=True)

    def saving(self) -> bool:
        """Whether a checkpoint is being written; of a job that was killed, whether one was."""
        return any((self.out / "checkpoints").glob(".step-*.tmp"))

    def steps(self) -> int:
        """The steps that the log has."""
        try:
            return sum('"lr"' in line for line in (self.out / "metrics.jsonl").read_text().splitlines())
        except OSError:
            return 0

    def metrics(self) -> bytes:
        return (self.out / "metrics.jsonl").read_bytes()


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def disturb(job: Job, process: subprocess.Popen[str], chance: random.Random, act: Callable[[], None]) -> bool:
    """Act at a random point; False if the job ended before.

    A third of the points are anywhere from the start of the job to twelve steps on, the others in the next checkpoint.
    """
    before, until = job.steps(), time.monotonic() + PATIENCE
    in_checkpoint = chance.random() < 2 / 3
    ahead = 1 if in_checkpoint else chance.choice([0, *range(1, 13)])

    def early() -> bool:
        return job.steps() < before + ahead or (in_checkpoint and not job.saving())

    while ahead and early():
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, "no step was logged, or no checkpoint was begun"
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.01 if in_checkpoint else 0.05 if ahead else 4))
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
    """SIGKILL hits one rank, both, or all with the launcher first; SIGTERM one rank, both, or the launcher alone.

    After SIGTERM the newest checkpoint has every step that was logged. Some of the kills hit a checkpoint.
    """
    chance = random.Random(f"{signalled.name} {options}")
    job = Job(folder, folder / f"{signalled.name}-{len(options)}", options)
    stops = starts = in_checkpoints = 0
    while stops < KILLS:
        starts += 1
        assert starts < 4 * KILLS, "the run does not get on"
        if job.steps() >= STEPS - 12:  # begin anew: a finished run has nothing to kill
            assert job.end(job.start()) == 0, job.output[-1]
            assert job.metrics() == undisturbed
            job.out = job.out.with_name(f"{job.out.name}+")
        process = job.start()

        def act(process: subprocess.Popen[str] = process) -> None:
            ranks = job.ranks()
            all_of_them = [process.pid, *ranks] if signalled is signal.SIGKILL else [process.pid]
            for pid in chance.choice([all_of_them, ranks[:1], ranks[1:], ranks]) or all_of_them:
                send(pid, signalled)

        stopped = disturb(job, process, chance, act)
        job.end(process)
        stops += stopped
        if signalled is signal.SIGKILL:
            in_checkpoints += stopped and job.saving()
        elif job.steps():
            assert (job.out / "checkpoints" / "latest").read_text().strip() == f"step-{job.steps()}"
    print(
        f"{signalled.name}: {stops} stops in {starts} starts, {in_checkpoints} left a checkpoint unfinished"
    )
    assert signalled is not signal.SIGKILL or in_checkpoints >= KILLS // 5
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
        os.kill(job.ranks()[-1], signal.SIGKILL)
    assert job.end(process) == 0, job.output
    assert job.metrics() == undisturbed


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(folder: Path, undisturbed: bytes) -> None:
    """The job ends with code 0 and says how to go on; nothing that was logged is computed again."""
    job = Job(folder, folder / "asked")
    process = job.start()
    while job.steps() < 7:
        assert process.poll() is None, job.output
        time.sleep(0.01)
    send(job.ranks()[-1], signal.SIGTERM)
    assert job.end(process) == 0, job.output
    assert "the same command goes on from there" in job.output[-1]
    assert f"step-{job.steps()}" == (job.out / "checkpoints" / "latest").read_text().strip()
    assert undisturbed.startswith(job.metrics())


def test_ranks_whose_launcher_was_killed_go_on_until_they_are_asked_to_stop(folder: Path) -> None:
    """Meanwhile their run refuses another command, and names the process that stops them."""
    job = Job(folder, folder / "orphans", ("run.steps=100000",))
    process = job.start()
    try:
        while job.steps() < 7:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        holder = (job.out / "run.lock").read_text()
        other = job.start()
        said, before = other.communicate(timeout=PATIENCE)[0], job.steps()
        assert other.returncode != 0
        (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert holder in error
        assert before > 7
        os.kill(int(holder.split()[1]), signal.SIGTERM)
    finally:
        job.end(process)
    assert "SIGTERM after step" in job.output[-1]
    assert (job.out / "checkpoints" / "latest").read_text().strip() == f"step-{job.steps()}"
    assert job.steps() >= before
