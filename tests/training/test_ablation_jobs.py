"""Several arms at a time: the same numbers as one after another, however a child or the ladder itself ends."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import mxref
import warm
from ablation_fakes import FakeCorpus, FakeTrainer, run_ladder, tiny
from mxref.cli import main
from mxref.tomlio import build
from mxref_training.distributed.ranks import SOLE
from mxref_training.errors import ConfigError
from mxref_training.interrupt import TOGETHER
from mxref_training.lab import worker
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.queue import Lines, Remaining
from mxref_training.lab.study import RESULTS
from mxref_training.lab.worker import PipeProgress
from training_setup import newest

pytestmark = pytest.mark.usefixtures("warm_children")

ARMS = ("fp8", "h16", "plain")
LADDER = """
title = "three arms"
train.preset = "tiny"
target.high_precision = ""
recipe = { dialect = "amd", all.format = "fp8" }
[[arm]]
name = "fp8"
label = "FP8"
[[arm]]
name = "h16"
label = "H16"
recipe.all = { format = "mxfp4", hadamard = 16 }
[[arm]]
name = "plain"
label = "no transform"
recipe.all = { format = "mxfp4" }
"""
SIZES = [
    "model.layers=1", "model.width=64", "model.heads=2", "model.ffn=64", "model.vocab=300", "model.max_seq=32",
    "run.seq_len=32", "run.batch=2", "run.micro_batch=0", "run.steps=8", "run.eval_every=2",
    "run.eval_tokens=64", "run.checkpoint_every=2", "run.threads=1", "optim.warmup=0", "data.max_documents=0",
]  # fmt: skip
# The reference, except that it does once what the environment asks, in a step after the first checkpoint of H16.
BACKEND = """
import os, signal, time
from pathlib import Path
from mxref.reference import ReferenceBackend

class Backend(ReferenceBackend):
    name = "moody"
    calls = 0

    def _quantize(self, x, plan):
        mood = os.environ.get("MOOD", "")
        self.calls += bool(plan.rotation)
        if mood and self.calls == 150:
            self.calls += 1
            if mood == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif mood == "raise":
                names = ("OMP", "NUMBA", "OPENBLAS", "MKL")
                threads = {os.environ[f"{name}_NUM_THREADS"] for name in names}
                raise RuntimeError(f"out of order on {threads} threads")
            elif mood == "hang":
                Path(os.environ["MOOD_FILE"]).touch()
                time.sleep(300)
            else:
                os.kill(os.getppid(), getattr(signal, mood))
                time.sleep(1)
        return super()._quantize(x, plan)

backend = Backend()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "three.toml").write_text(LADDER)
    (folder / "moody.py").write_text(BACKEND)
    order = np.random.default_rng(0)
    words = ["scale", "block", "element", "shared", "code", "value", "round", "stochastic", "gradient"]
    for side, count in (("train", 200), ("val", 20)):
        texts = [" ".join(order.choice(words, 60)) for _ in range(count)]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def arguments(files: Path, out: Path, *more: str) -> list[str]:
    sets = [part for size in SIZES for part in ("--set", size)]
    data = ["--set", f"data.train={files / 'train.jsonl'}", "--set", f"data.val={files / 'val.jsonl'}"]
    backend = f"{files / 'moody.py'}:backend"
    return ["ablate", str(files / "three.toml"), *data, *sets, "--backend", backend, "--out", str(out), *more]


def environment(files: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(files / "cache"), **more}


def ablate(files: Path, out: Path, *more: str, **variables: str) -> Result:
    return CliRunner().invoke(main, arguments(files, out, *more), env=environment(files, **variables))


def start(files: Path, out: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from mxref.cli import main; main()", *arguments(files, out, *more)]
    return warm.Popen(
        command,
        env=os.environ | environment(files, **variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def unbroken(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    found = ablate(files, out)
    assert found.exit_code == 0, found.output
    return out


def copy_without(unbroken: Path, out: Path, *arms: str) -> None:
    """Leave the ladder with some arms to be trained: a process takes seconds to load."""
    shutil.copytree(unbroken, out, dirs_exist_ok=True)
    for arm in arms:
        shutil.rmtree(out / "arms" / arm)


def numbers(out: Path) -> Any:
    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            clock = {"seconds", "evaluation_seconds", "tokens_per_second", "started"}
            return {key: timeless(item) for key, item in value.items() if key not in clock}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    return timeless(json.loads((out / RESULTS).read_text()))


def assert_same(out: Path, unbroken: Path) -> None:
    assert numbers(out) == numbers(unbroken)
    for arm in ARMS:
        mine, theirs = ((folder / "arms" / arm / "metrics.jsonl").read_bytes() for folder in (out, unbroken))
        assert mine == theirs


def latest(out: Path, arm: str) -> int:
    return newest(out / "arms" / arm)


def log(out: Path, arm: str) -> str:
    return (out / "arms" / arm / "log.txt").read_text()


def until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_two_at_a_time_give_the_results_of_one_after_another(
    files: Path, unbroken: Path, tmp_path: Path
) -> None:
    found = ablate(files, tmp_path, "--jobs", "2")
    assert found.exit_code == 0, found.output
    assert_same(tmp_path, unbroken)
    said = found.stderr.splitlines()
    assert [line for line in said if line.endswith(": starts")] == [
        f"[{i}/3] {arm}: starts" for i, arm in enumerate(ARMS, 1)
    ]
    for i, arm in enumerate(ARMS, 1):
        assert any(line.startswith(f"[{i}/3] {arm}: validation loss ") for line in said)
        assert re.fullmatch(r"--- [0-9T:+-]+: process \d+, threads 1\n", log(tmp_path, arm))
    assert "fp8: step 8/8 loss " in found.stderr
    hardware = [arm["runs"][0]["environment"]["hardware"] for arm in numbers(tmp_path)["arms"]]
    assert [facts["threads"] for facts in hardware] == [1, 1, 1]
    again = ablate(files, tmp_path, "--jobs", "2")
    assert again.exit_code == 0
    head, *said = again.stderr.splitlines()
    assert head.startswith(
        f"ladder {files / 'three.toml'}, backend {files / 'moody.py'}:backend (asked for by name), "
    )
    assert head.endswith(f", writing to {tmp_path}")
    assert said == [f"[{i}/3] {arm}: finished before, kept" for i, arm in enumerate(ARMS, 1)]


def test_a_run_alone_takes_the_threads_that_a_process_has(files: Path, tmp_path: Path) -> None:
    found = ablate(files, tmp_path, "--arms", "fp8", "--backend", "numba", "--set", "run.threads=0")
    assert found.exit_code == 0, found.output


def test_a_killed_child_is_reported_the_others_finish_and_it_resumes(
    files: Path, unbroken: Path, tmp_path: Path
) -> None:
    copy_without(unbroken, tmp_path, "h16", "plain")
    found = ablate(files, tmp_path, "--jobs", "2", MOOD="die")
    assert found.exit_code == 2
    path = tmp_path / "arms" / "h16" / "log.txt"
    said = found.stderr.splitlines()
    assert f"[2/3] h16: failed: killed by SIGKILL (out of memory?); see {path}" in said
    assert said[-1] == (
        "error: 1 of 2 runs without a result: h16 failed, for the reasons above and in its log.txt; "
        "the same command goes on with what is missing, and finished arms are kept"
    )
    assert [arm["name"] for arm in numbers(tmp_path)["arms"]] == ["fp8", "plain"]
    reached = latest(tmp_path, "h16")
    assert 2 <= reached < 8
    again = ablate(files, tmp_path, "--jobs", "2")
    assert again.exit_code == 0, again.output
    assert "[2/3] h16: resumes where it stopped" in again.stderr
    assert f"h16: resumed at step {reached} of 8" in again.stderr
    assert_same(tmp_path, unbroken)


def test_a_child_that_fails_is_reported_in_one_line(files: Path, unbroken: Path, tmp_path: Path) -> None:
    copy_without(unbroken, tmp_path, "h16")
    found = ablate(files, tmp_path, "--jobs", "2", MOOD="raise", OMP_NUM_THREADS="7")
    assert found.exit_code == 2
    path = tmp_path / "arms" / "h16" / "log.txt"
    (said,) = (line for line in found.stderr.splitlines() if "out of order" in line)
    assert re.match(
        r"\[2/3\] h16: failed: the run stopped after \d of 8 steps: backend 'moody' failed in quantize, "
        r"(x|w|dy) of layer model\.layers\.0\.[a-z_.]+: RuntimeError: out of order on \{'1'\} threads \(",
        said,
    ), said
    assert said.count(str(path)) == 1
    assert "Traceback" not in found.output
    assert "Traceback" in path.read_text()


def test_interrupt_stops_every_child_with_a_checkpoint(files: Path, unbroken: Path, tmp_path: Path) -> None:
    copy_without(unbroken, tmp_path, "h16", "plain")
    process = start(files, tmp_path, "--jobs", "2", MOOD="SIGINT")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    last = err.splitlines()[-1]
    assert re.fullmatch(
        r"interrupted: SIGINT: \d of 2 runs finished, [a-z0-9, ]*h16[a-z0-9, ]* stopped; "
        "the same command goes on from there",
        last,
    ), err
    assert "Traceback" not in err
    assert "h16: SIGINT: stops after this step; a second signal ends it at once" in err
    step = latest(tmp_path, "h16")
    assert 2 <= step < 8
    assert f"interrupted: SIGINT after step {step} of 8: saved" in log(tmp_path, "h16")
    assert ablate(files, tmp_path).exit_code == 0  # one after another goes on where two at a time stopped
    assert_same(tmp_path, unbroken)


@pytest.mark.long
def test_children_of_a_killed_ladder_stop_with_a_checkpoint(
    files: Path, unbroken: Path, tmp_path: Path
) -> None:
    copy_without(unbroken, tmp_path, "h16")
    process = start(files, tmp_path, "--jobs", "2", MOOD="SIGKILL")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    until(lambda: "interrupted: SIGTERM after step" in log(tmp_path, "h16"))
    assert "the process that runs the ladder is gone" in log(tmp_path, "h16")
    assert 2 <= latest(tmp_path, "h16") < 8
    until(lambda: all(free(folder) for folder in (tmp_path / "arms").iterdir()))
    assert ablate(files, tmp_path).exit_code == 0
    assert_same(tmp_path, unbroken)


@pytest.mark.long
def test_a_second_interrupt_ends_a_child_that_hangs(files: Path, unbroken: Path, tmp_path: Path) -> None:
    mark = tmp_path / "hangs"
    copy_without(unbroken, tmp_path / "out", "h16")
    process = start(files, tmp_path / "out", "--jobs", "2", MOOD="hang", MOOD_FILE=str(mark))
    try:
        until(mark.exists, process)
        child = int(log(tmp_path / "out", "h16").partition("process ")[2].partition(",")[0])
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(TOGETHER + 0.5)
        # On a machine so busy that it has not seen the first one yet, the second one is the same to it.
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            try:
                _, err = process.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.long
def test_a_run_on_two_ranks_gives_the_losses_of_one(files: Path, unbroken: Path, tmp_path: Path) -> None:
    backend = ["--backend", "reference"]  # a file of a user's is no backend that two ranks need
    found = ablate(files, tmp_path, "--gpus-per-run", "2", "--arms", "h16", *backend)
    assert found.exit_code == 0, found.output
    for arm in ("fp8", "h16"):
        one, two = (
            json.loads((folder / "arms" / arm / "result.json").read_text()) for folder in (unbroken, tmp_path)
        )
        assert two["key"]["ranks"] == 2
        layout = json.loads((tmp_path / "arms" / arm / "run.json").read_text())["identity"]["parallel"]
        assert (layout["shard"], layout["tensor"]) == (2, 1)  # by FSDP2
        for mine, theirs in zip(two["record"]["losses"], one["record"]["losses"], strict=True):
            assert mine == [theirs[0], pytest.approx(theirs[1], rel=1e-3)]
    again = ablate(files, tmp_path, "--gpus-per-run", "2", "--arms", "h16", *backend)
    assert again.exit_code == 0
    assert "[2/2] h16: finished before, kept" in again.stderr
    alone = ablate(files, tmp_path, "--arms", "h16", *backend)
    assert "[1/2] fp8: starts anew, because" in alone.stderr


def free(folder: Path) -> bool:
    with (folder / "arm.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_two_processes_never_train_in_one_directory(tmp_path: Path) -> None:
    ladder = build(Ladder, {"title": "", "train": {"preset": "tiny"}, **TWO}, "test.toml")

    def run(**options: Any) -> Any:
        options = {"trainer": FakeTrainer(), "corpus": FakeCorpus, "say": lambda line: None, **options}
        return run_ladder(ladder, tiny(), tmp_path, backend=mxref.get_backend("reference"), **options)

    def twice(label: str) -> None:
        run()

    with pytest.raises(
        ConfigError, match=rf"process {os.getpid()} on .* is training in .*arms/fp8: wait until it has"
    ):
        run(trainer=FakeTrainer(interrupt=twice))
    assert run()["unfinished"] == []


TWO = {
    "recipe": {"dialect": "amd", "all": {"format": "fp8"}},
    "target": {"high_precision": ""},
    "arm": [{"name": "fp8", "label": "FP8"}, {"name": "again", "label": "FP8 again", "seed_offset": 7}],
}


def some_run(out: Path, **key: Any) -> ArmRun:
    ladder = build(Ladder, {"title": "", "train": {"preset": "tiny"}, **TWO}, "test.toml")
    config = tiny("data.tokenizer=t.json", "run.data_seed=5", "optim.lr=1e-3")
    return ArmRun(out, ladder.arm[1], 0, config, ladder.resolve(ladder.arm[1]), key)


def test_a_run_reaches_its_process_unchanged(tmp_path: Path) -> None:
    run = some_run(tmp_path, code="abc", run={"steps": 9})
    run = replace(run, trunk=tmp_path / "trunk", first=4, stops=(8,), keep_checkpoints=False, corpus="text")
    assert ArmRun.from_table(json.loads(json.dumps(run.to_table()))) == run


def test_a_process_refuses_a_run_that_is_no_longer_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = some_run(tmp_path, code="0" * 12).to_table()
    monkeypatch.setattr("mxref_training.data.corpus.TokenCorpus.from_table", lambda tokens: FakeCorpus())
    with pytest.raises(
        ConfigError, match="the code changed while the ladder ran: give the same command again"
    ):
        worker.train_run("reference", {}, table, PipeProgress(-1), SOLE)
    assert list(tmp_path.iterdir()) == []


def test_lines_of_progress_name_the_run_and_the_time_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Lines("fp8", 0, 2, Remaining(4))
    sink.start("FP8", 0, 2, 512)
    sink.step(1, 5.0)
    sink.step(2, 4.0)
    said = capsys.readouterr().err
    assert re.fullmatch(r"fp8: step 2/2 loss 4.0000 [\d,]+ tokens/s ETA 0:00, all runs 0:00\n", said)
