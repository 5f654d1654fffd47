"""Rules for a run's files: locks, edits, other versions, links, and error messages whose advice works."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, run_ladder, table, tiny
from mxref.reference import ReferenceBackend
from mxref.tomlio import build
from mxref_training import durable
from mxref_training.durable import locked
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.lab.ladder import Ladder
from mxref_training.log_files import LogFile
from mxref_training.run_folder import RunFolder
from mxref_training.sources import backend_identity
from training_setup import Saboteur, change, crash, files, metrics, newest, run, weights


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    holder = rf"process {os.getpid()} on .* is training in {tmp_path}: wait until it has ended"

    def second() -> None:
        with pytest.raises(ConfigError, match=holder):
            run(tmp_path)
        with pytest.raises(ConfigError, match=holder):
            run(tmp_path, resume=False)

    run(tmp_path, progress=Saboteur(2, second))
    assert "run.lock" not in files(tmp_path)
    assert run(tmp_path).tokens == 6 * 128


def test_a_lock_that_a_dead_process_left_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 1 on elsewhere")
    assert run(tmp_path).tokens == 6 * 128


def test_keep_one_never_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    real = durable.remove

    def watched(path: Path) -> None:
        found.append(len(list(path.parent.glob("step-*"))))
        real(path)

    monkeypatch.setattr("mxref_training.checkpoint.remove", watched)
    run(tmp_path, config=change(checkpoint_every=1, keep=1))
    assert found == [2] * 5
    assert newest(tmp_path) == 6


def test_what_dead_processes_left_goes_at_the_next_start(tmp_path: Path) -> None:
    run(tmp_path, stop_after=3)
    (tmp_path / ".run.json.tmp").write_text("half")
    (tmp_path / "checkpoints" / ".step-4.tmp").mkdir()
    (tmp_path / "checkpoints" / ".step-2.deleted.tmp").mkdir()
    run(tmp_path)
    assert not [name for name in tmp_path.rglob("*") if name.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["config.toml", "recipe.toml"])
def test_copies_for_readers_are_made_again(tmp_path: Path, name: str) -> None:
    run(tmp_path, stop_after=3)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    run(tmp_path)
    assert (tmp_path / name).read_bytes() != b""
    assert (tmp_path / name).read_bytes() == before


# --- edits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [3, None], ids=["unfinished", "finished"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_log_that_lost_lines_is_noticed_and_the_advice_works(
    tmp_path: Path, name: str, stop_after: int | None
) -> None:
    run(tmp_path, stop_after=stop_after)
    path = tmp_path / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"{name} has .* bytes, but .*restore the file"):
        run(tmp_path)
    path.write_bytes(data + b'{"step": 7, "lo')
    assert run(tmp_path).tokens == 6 * 128
    assert path.read_bytes().startswith(data)
    path.unlink()
    assert run(tmp_path, resume=False).tokens == 6 * 128


BACKEND = """
from mxref.reference import ReferenceBackend
from {helper} import FACTOR

class Backend(ReferenceBackend):
    name = "mine"

backend = Backend()
"""


@pytest.mark.parametrize("edited", ["backend", "sibling"])
def test_another_backend_of_the_same_name_is_noticed(
    tmp_path: Path, edited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, helper = f"own_{edited}", f"helper_of_{edited}"
    (tmp_path / f"{name}.py").write_text(BACKEND.format(helper=helper))
    (tmp_path / f"{helper}.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = mxref.get_backend(f"{name}:backend")
    run(tmp_path / "out", backend=backend, stop_after=3)
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    before = backend_identity(backend)
    path = tmp_path / f"{name if edited == 'backend' else helper}.py"
    path.write_text(path.read_text() + "# another rounding\n")
    assert backend_identity(backend) != before
    with pytest.raises(CheckpointError, match=r"holds another run: backend.code is [0-9a-f]+ there and"):
        run(tmp_path / "out", backend=backend)
    assert run(tmp_path / "out", backend=backend, resume=False).tokens == 6 * 128


def test_a_backend_of_this_project_is_its_sources() -> None:
    class Derived(ReferenceBackend):
        name = "reference"

    assert backend_identity(Derived())["code"] != backend_identity(ReferenceBackend())["code"]


LADDER = table(
    arm=[
        {"name": "fp8", "label": "FP8"},
        {"name": "h16", "label": "H16", "recipe": {"all": {"hadamard": 16, "format": "mxfp4"}}},
    ]
)


def ladder(out: Path, trainer: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    built = build(Ladder, LADDER, "test.toml")
    backend = mxref.get_backend("reference")
    found = run_ladder(
        built, tiny(), out, backend=backend, trainer=trainer, corpus=FakeCorpus, say=said.append
    )
    return found, said


def test_an_edited_result_is_noticed(tmp_path: Path) -> None:
    expected, _ = ladder(tmp_path, FakeTrainer())
    path = tmp_path / "arms" / "h16" / "result.json"
    table = json.loads(path.read_text())
    table["record"]["losses"][-1][1] = 0.5
    path.write_text(json.dumps(table))
    trainer = FakeTrainer()
    found, said = ladder(tmp_path, trainer)
    assert trainer.calls == [("H16", 0)]
    assert (
        "[2/2] h16: result.json or metrics.jsonl was changed later: the result is read again from the run"
        in said
    )
    assert found == expected


def test_a_result_of_another_fingerprint_does_not_count(tmp_path: Path) -> None:
    ladder(tmp_path, FakeTrainer())
    arms = tmp_path / "arms"
    shutil.copy(arms / "fp8" / "result.json", arms / "h16" / "result.json")
    trainer = FakeTrainer()
    ladder(tmp_path, trainer)
    assert trainer.calls == [("H16", 0)]


# --- other versions, damage and links ------------------------------------------------------------------


def damage(out: Path, how: str) -> None:
    path = out / "run.json"
    text = path.read_text()
    path.write_text(
        {"truncated": text[: len(text) // 2], "newer": text.replace("mxref.run.2", "mxref.run.9")}[how]
    )


@pytest.mark.parametrize("how", ["truncated", "newer"])
def test_the_advice_for_a_record_that_cannot_be_read_works(tmp_path: Path, how: str) -> None:
    run(tmp_path, stop_after=3)
    damage(tmp_path, how)
    said = (
        "is damaged"
        if how == "truncated"
        else "written by another version of mxref: its format is mxref.run.9"
    )
    with pytest.raises(
        CheckpointError, match=rf"run.json .*{said}.*start over: mxref train with --no-resume"
    ):
        run(tmp_path)
    assert run(tmp_path, resume=False).tokens == 6 * 128
    damage(tmp_path, how)
    shutil.rmtree(tmp_path)
    assert run(tmp_path).tokens == 6 * 128


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("text", ["", '{"mine": 1}'])
def test_a_record_that_is_nobodys_is_left_to_the_user(tmp_path: Path, text: str, resume: bool) -> None:
    run(tmp_path, stop_after=3)
    (tmp_path / "run.json").write_text(text)
    before = files(tmp_path)
    said = r"start over: .* or delete" if resume else "no record of a run: choose another --out, or delete"
    with pytest.raises(CheckpointError, match=f"run.json is .*{said} {tmp_path}"):
        run(tmp_path, resume=resume)
    assert files(tmp_path) == before
    shutil.rmtree(tmp_path)
    assert run(tmp_path).tokens == 6 * 128


def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    run(tmp_path, stop_after=3)
    step = tmp_path / "checkpoints" / "step-3"
    state = (step / "state.json").read_text().replace("mxref.checkpoint.4", "mxref.checkpoint.9")
    (step / "state.json").write_text(state)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["state.json"]["sha256"] = hashlib.sha256(state.encode()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest | {"extra.bin": {"bytes": 0, "sha256": ""}}))
    with pytest.raises(
        CheckpointError, match="another version of mxref: its format is mxref.checkpoint.9"
    ) as caught:
        run(tmp_path)
    assert "damaged" not in str(caught.value)
    assert run(tmp_path, resume=False).tokens == 6 * 128


@pytest.mark.parametrize("what", ["checkpoints", "step-2"])
def test_checkpoints_may_be_links(tmp_path: Path, what: str) -> None:
    config = change(checkpoint_every=2, keep=1)
    whole, out, away = tmp_path / "whole", tmp_path / "out", tmp_path / "away"
    run(whole, config=config)
    run(out, config=config, stop_after=2)
    path = out / "checkpoints" / ("" if what == "checkpoints" else what)
    shutil.move(path, away)
    path.symlink_to(away)
    run(out, config=config)
    assert weights(out) == weights(whole)
    assert metrics(out) == metrics(whole)
    run(out, config=config, resume=False)
    assert weights(out) == weights(whole)
    assert away.is_dir()


@pytest.mark.parametrize("how", ["moved away", "a link that leads nowhere"])
def test_a_run_whose_checkpoints_are_elsewhere_does_not_start_over(tmp_path: Path, how: str) -> None:
    out, elsewhere, longer = tmp_path / "run", tmp_path / "elsewhere", change(steps=6, checkpoint_every=2)
    run(out, config=longer, stop_after=4)
    (out / "checkpoints").rename(elsewhere)
    if how != "moved away":
        (out / "checkpoints").symlink_to(tmp_path / "unmounted")
    before = files(out)
    with pytest.raises(
        CheckpointError, match=r"is missing, or is a link without a target: put the checkpoints back"
    ):
        run(out, config=longer)
    assert files(out) == before
    (out / "checkpoints").unlink(missing_ok=True)
    elsewhere.rename(out / "checkpoints")
    run(out, config=longer)
    run(tmp_path / "whole", config=longer)
    assert (metrics(out), weights(out)) == (metrics(tmp_path / "whole"), weights(tmp_path / "whole"))


def test_a_run_killed_before_it_had_its_record_begins(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert run(tmp_path).tokens == 6 * 128


def test_a_deletion_cut_short_is_finished_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("mxref_training.run_folder.remove", lambda path: crash())
        with pytest.raises(RuntimeError):
            RunFolder(tmp_path, 2).clear()
    assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "metrics.jsonl").exists()
    assert run(tmp_path).tokens == 6 * 128
    assert not list(tmp_path.glob(".*"))


def test_a_log_that_cannot_be_deleted_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("mxref_training.log_files.remove", refuse)
    with pytest.raises(CheckpointError, match=r"cannot delete .*telemetry.jsonl: Input/output error; free"):
        run(tmp_path)
    assert not (tmp_path / "log.txt").exists()


def test_a_lock_file_that_cannot_be_removed_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, locked(tmp_path / "run.lock"):
        patch.setattr(Path, "unlink", refuse)
    with locked(tmp_path / "run.lock", RuntimeError):
        pass
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_folder_that_was_moved_leaves_that_of_the_next_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with ExitStack() as held:
        with locked(folder / "arm.lock"):
            folder.rename(tmp_path / "aside")
            folder.mkdir()
            held.enter_context(locked(folder / "arm.lock"))
        with (
            pytest.raises(RuntimeError, match=f"process {os.getpid()}"),
            locked(folder / "arm.lock", RuntimeError),
        ):
            pass


# --- writing -------------------------------------------------------------------------------------------


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    log = LogFile(tmp_path / "log.jsonl")
    log.write({"step": 1, "loss": 0.5})
    length = log.length()
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1, "loss": 0.5}\n'
    assert length == 25


def test_a_full_disk_in_the_metrics_is_one_line_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b'"step": 4' in bytes(data):
            real(descriptor, data[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*metrics.jsonl: No space left on device; free some space"
        ):
            run(tmp_path / "parts", config=change(checkpoint_every=2))
    run(tmp_path / "parts", config=change(checkpoint_every=2))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_a_replaced_file_is_whole_though_another_process_died_with_it(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    durable.temporary(path).write_text("much longer than what comes")
    durable.replace_text(path, "new")
    assert files(tmp_path) == {"name.json": b"new"}


def test_a_longer_run_describes_itself(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, config=replace(change(steps=8)))
    assert "steps = 8" in (tmp_path / "config.toml").read_text()
