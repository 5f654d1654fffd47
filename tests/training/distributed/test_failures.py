"""Faults of a run on two ranks under `torchrun`: one message, an exit code that is not 0, and nothing is lost."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launch import errors, torchrun

from exported import invoke
from training_setup import files, lines, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
SMALL = (
    "run.batch=4", "run.micro_batch=2", "run.seq_len=32", "run.eval_every=4", "run.eval_tokens=128",
    "run.checkpoint_every=2", "run.keep=3", "model.layers=1", "model.width=64", "model.heads=2",
    "model.kv_heads=2", "model.ffn=64", "model.vocab=280", "model.max_seq=32",
)  # fmt: skip
SCRIPT = str(Path(__file__).with_name("faulty_rank.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and with a run that nothing disturbed."""
    path, chance = tmp_path_factory.mktemp("failures"), random.Random(1)
    for side, count in (("train", 80), ("val", 12)):
        texts = [f"{side} {i} " + " ".join(chance.choices(["block", "scale"], k=40)) for i in range(count)]
        (path / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = command(path, path / "whole")
    assert done.returncode == 0, done.stderr
    return path


def arguments(folder: Path, out: Path, *options: str) -> list[str]:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return [
        "train", "tiny", "--recipe", "bf16", "--backend", "reference", "--data", str(folder / "train.jsonl"),
        "--set", f"data.val={folder / 'val.jsonl'}", "--out", str(out), "--set",
        f"run.steps={STEPS}", *settings, *options,
    ]  # fmt: skip


def command(folder: Path, out: Path, *options: str, fault: str = "none") -> subprocess.CompletedProcess[str]:
    return torchrun(SCRIPT, fault, *arguments(folder, out, *options), folder=folder)


def root_cause(done: subprocess.CompletedProcess[str]) -> str:
    """What `torchrun` says of the rank that failed first."""
    return done.stderr.partition("Root Cause")[2]


def test_a_killed_rank_brings_the_job_down_and_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = command(folder, out, fault="killed")
    assert done.returncode != 0
    assert "rank      : 1 " in root_cause(done)
    assert "Signal 9 (SIGKILL)" in root_cause(done)
    for error in errors(done):  # `torchrun` may end the other rank before it can say anything
        assert "the run stopped after 4 of 6 steps: RuntimeError: " in error
        assert error.endswith("; the same command goes on from step 4")
    assert command(folder, out).returncode == 0
    assert metrics(out) == metrics(folder / "whole")


def test_hosts_that_do_not_share_the_folder_are_told_before_the_first_step(
    folder: Path, tmp_path: Path
) -> None:
    """A new run, and one that goes on: its checkpoint is not called damaged."""
    new, begun = tmp_path / "new", tmp_path / "begun"
    shutil.copytree(folder / "whole", begun)
    for out in (new, begun):
        done = command(folder, out, fault="unshared")
        assert done.returncode != 0
        (error,) = errors(done)
        assert "--out must be a folder that all hosts share, under the same path: run.json is " in error
        assert " on rank 0 and '' on rank 1: " in error
    assert not (new / "metrics.jsonl").exists()
    assert metrics(begun) == metrics(folder / "whole")


def test_a_rank_with_another_folder_is_told_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    done = command(folder, tmp_path / "run", fault="elsewhere")
    assert done.returncode != 0
    (error,) = errors(done)
    assert f"the command: --out is '{tmp_path / 'run'}' on rank 0 and " in error
    assert not list(tmp_path.glob("run*/*.json*"))


def test_a_host_with_other_software_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path
) -> None:
    done = command(folder, tmp_path / "run", fault="older")
    assert done.returncode != 0
    (error,) = errors(done)
    assert "the software: " in error
    assert "on rank 1: start every rank with the same command, files and environment" in error
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("options", [(), ("--set", "run.async_checkpoint=true")], ids=["", "async"])
def test_a_full_disk_of_one_rank_keeps_the_checkpoint_before(
    folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    done = command(folder, out, *options, fault="disk_full")
    assert done.returncode != 0
    (error,) = errors(done)
    assert error.startswith("error: rank 1: cannot write the checkpoint ")
    assert "step-4: No space left on device; free some space or choose another --out" in error
    assert error.endswith("the last good checkpoint is " + str(out / "checkpoints" / "step-2") + ")")
    assert "Traceback" not in done.stderr.partition("error: ")[0]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["latest", "step-2"]
    assert command(folder, out, *options).returncode == 0
    assert metrics(out) == metrics(folder / "whole")


def flip(folder: Path) -> None:
    path = folder / "model-2-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "optimizer-2-of-2.safetensors").unlink()


def keep(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("harm", "options", "said"),
    [
        (flip, (), "step-6 is damaged: model-2-of-2.safetensors does not have the size and SHA-256 that"),
        (lose, (), "step-6 is damaged: No such file or directory: "),
        (keep, ("--recipe", "fp8"), "holds another run: recipe.fprop.x.format is bf16 there and fp8 here"),
    ],
    ids=["flipped byte", "missing shard", "other recipe"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_once_and_stays(
    folder: Path, tmp_path: Path, harm: Callable[[Path], None], options: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(folder / "whole", out)
    harm(out / "checkpoints" / "step-6")
    before = files(out)
    done = command(folder, out, "--set", "run.steps=8", *options)
    assert done.returncode != 0
    (error,) = errors(done)
    assert said in error
    assert files(out) == before
    if not options:
        assert f"delete {out / 'checkpoints' / 'step-6'}" in error
        shutil.rmtree(out / "checkpoints" / "step-6")
        assert command(folder, out).returncode == 0
        assert metrics(out) == metrics(folder / "whole")


def test_truncated_data_is_refused_by_line(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes((folder / "train.jsonl").read_bytes()[:-30])
    done = command(folder, tmp_path / "run", "--data", str(cut))
    assert done.returncode != 0
    (error,) = errors(done)
    assert f"{cut}, line 80: not valid JSON" in error
    assert not (tmp_path / "run").exists()


def test_one_process_goes_on_with_the_run_of_two_ranks(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(folder / "whole", out)
    shutil.rmtree(out / "checkpoints" / "step-6")
    result = invoke(*arguments(folder, out))
    assert result.exit_code == 0, result.output
    assert "resumes on 1 rank what 2 ranks wrote: losses may differ in the last bits" in result.stderr
    for found, wanted in zip(lines(out), lines(folder / "whole"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)
