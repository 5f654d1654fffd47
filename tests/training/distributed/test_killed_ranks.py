"""Two ranks under `torchrun` are killed, or asked to stop, twenty times at random: every line of the log stays."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from training_setup import metrics, newest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

TIMES = 20
STEPS = 160
SETTINGS = [
    "model.layers=1", "model.width=64", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=280",
    "model.max_seq=32", "run.seq_len=32", "run.batch=4", "run.micro_batch=0", "run.eval_every=10",
    "run.eval_tokens=64", "run.checkpoint_every=3", "run.async_checkpoint=true", "run.threads=1", "optim.warmup=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for side, count in (("train", 150), ("val", 8)):
        texts = [
            " ".join(draw.choices(["block", "scale", "round", "code", "value"], k=60)) for _ in range(count)
        ]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def start(corpus: Path, out: Path) -> subprocess.Popen[str]:
    """Start the run, or go on with it."""
    sets = [part for setting in (*SETTINGS, f"run.steps={STEPS}") for part in ("--set", setting)]
    data = [
        "--data",
        str(corpus / "train.jsonl"),
        "--val",
        str(corpus / "val.jsonl"),
        "--backend",
        "reference",
    ]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
        str(Path(sys.executable).with_name("mxref")), "train", "tiny", *sets, *data, "--recipe", "tetrajet_style",
        "--out", str(out),
    ]  # fmt: skip
    quiet = {"XDG_CACHE_HOME": str(corpus / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def workers(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes of both ranks, in the order in which they were started."""
    text = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    found = [int(pid) for pid in text.split()]
    return [pid for pid in found if b"mxref" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def steps_taken(out: Path) -> int:
    path = out / "timing.jsonl"
    return path.read_bytes().count(b'"tokens_per_second"') if path.exists() else 0


def wait_for(process: subprocess.Popen[str], out: Path, steps: int) -> None:
    deadline = time.monotonic() + 300
    while steps_taken(out) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    process = start(corpus, out)
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    return out


@pytest.fixture
def disturbed(corpus: Path, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def finish(corpus: Path, out: Path, whole: Path) -> None:
    """Let the run come to its end, and compare every line and every byte."""
    process = start(corpus, out)
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    assert metrics(out) == metrics(whole)
    for path in sorted((whole / "checkpoints" / f"step-{newest(whole)}").glob("*.safetensors")):
        assert (out / "checkpoints" / path.parent.name / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_that_is_stopped_again_and_again(
    corpus: Path, tmp_path: Path, whole: Path, disturbed: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    draw, out = random.Random(int(number)), tmp_path / "run"
    stopped = []
    for _ in range(TIMES):
        process = start(corpus, out)
        disturbed.append(process)
        reached = newest(out) if (out / "checkpoints" / "latest").exists() else 0
        wait_for(process, out, reached + draw.randint(1, STEPS // TIMES))
        time.sleep(draw.random() * 0.2)
        pids = workers(process)
        assert len(pids) == 2
        victims = pids if number == signal.SIGKILL and draw.random() < 0.3 else [draw.choice(pids)]
        for pid in victims:
            os.kill(pid, number)
        text = process.communicate(timeout=120)[0]
        if number == signal.SIGTERM:
            assert process.returncode == 0, text
            assert (
                f"interrupted: SIGTERM after step {newest(out)} of {STEPS}: saved in {out}; the same command"
                in text
            )
        else:
            assert process.returncode != 0
        stopped.append(steps_taken(out))
    assert stopped[-1] < STEPS, "it was never disturbed at its end"
    finish(corpus, out, whole)
