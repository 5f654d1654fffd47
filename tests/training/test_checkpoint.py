"""Checkpoints: whole or absent, verified, and never a way to run code."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxref_training import shards
from mxref_training.checkpoint import GROUPS, CheckpointStore, Snapshot
from mxref_training.errors import CheckpointError

FILES = [*(f"{group}.safetensors" for group in GROUPS), "state.json"]


def snapshot(step: int, size: int = 64) -> Snapshot:
    tensors: dict[str, dict[str, torch.Tensor]] = {
        "model": {"w": torch.full((size,), float(step)), "scale": torch.tensor(0.1)},
        "optimizer": {
            "exp_avg/w": torch.arange(size, dtype=torch.float32),
            "step/w": torch.tensor(float(step)),
        },
        "rng": {"torch": torch.arange(16, dtype=torch.uint8)},
    }
    return Snapshot(step, tensors, {"loader": {"position": step}, "rate": 0.1})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_round_trip(store: CheckpointStore) -> None:
    assert store.latest() is None
    saved = snapshot(5)
    assert store.save(saved) == store.path(5)
    assert store.latest() == 5
    loaded = store.load(5)
    assert loaded.step == 5
    for group in GROUPS:
        assert list(loaded.tensors[group]) == sorted(saved.tensors[group])
        for name, tensor in saved.tensors[group].items():
            found = loaded.tensors[group][name]
            assert found.dtype is tensor.dtype
            assert torch.equal(found, tensor)
    assert loaded.state["loader"] == {"position": 5}
    assert loaded.state["rate"] == 0.1


def test_only_safetensors_and_json(store: CheckpointStore) -> None:
    path = store.save(snapshot(5))
    assert sorted(p.name for p in path.iterdir()) == sorted([*FILES, "manifest.json"])
    for name in ("state.json", "manifest.json"):
        json.loads((path / name).read_text())
    for group in GROUPS:
        header = (path / f"{group}.safetensors").read_bytes()
        json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])


def test_old_checkpoints_go(store: CheckpointStore) -> None:
    for step in (1, 2, 10, 30):
        store.save(snapshot(step))
        assert store.latest() == step
    assert store.steps() == [10, 30]
    assert sorted(p.name for p in store.folder.iterdir()) == ["latest", "step-10", "step-30"]


def test_old_checkpoints_that_could_not_go_are_deleted_later(store: CheckpointStore) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxref_training.checkpoint.remove", lambda path: path / "stays")
        for step in (1, 2, 3):
            store.save(snapshot(step))
    assert store.steps() == [1, 2, 3]
    flip(store.path(3) / "model.safetensors")
    with pytest.raises(CheckpointError, match="step-3 is damaged"):
        store.settle(3)
    assert store.steps() == [1, 2, 3]
    flip(store.path(3) / "model.safetensors")
    store.settle(3)
    assert store.steps() == [2, 3]


def test_a_run_goes_on_where_a_reader_holds_an_old_checkpoint_on_nfs(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree

    def held(path: Path, **options: Any) -> None:
        if (path / "model.safetensors").exists():
            for other in set(path.iterdir()) - {path / "model.safetensors"}:
                other.unlink()
            (path / "model.safetensors").rename(path / ".nfs0001")
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", held)
        for step in (1, 2, 3, 4):
            store.save(snapshot(step))
    assert store.steps() == [3, 4]
    assert {path.name for path in store.folder.glob(".*")} == {f".step-{n}.deleted.tmp" for n in (1, 2)}
    assert shutil.rmtree is real
    store.save(snapshot(5))
    assert not list(store.folder.glob(".*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [flip, cut, extend, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_checkpoint_before_is_offered(
    store: CheckpointStore, name: str, damage: Callable[[Path], Any]
) -> None:
    store.save(snapshot(3))
    store.save(snapshot(7))
    damage(store.path(7) / name)
    before = listing(store.folder)
    with pytest.raises(
        CheckpointError, match=f"step-7 is damaged: .*{name}.*to go on from step-3 delete"
    ) as caught:
        store.load(7)
    assert "\n" not in str(caught.value)
    assert listing(store.folder) == before
    assert store.latest() == 7, "nothing falls back by itself"
    assert store.load(3).step == 3


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"state.json": 3}'])
def test_a_damaged_manifest_is_named(store: CheckpointStore, text: str | None) -> None:
    store.save(snapshot(3))
    store.save(snapshot(7))
    manifest = store.path(7) / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(CheckpointError, match=r"step-7 is damaged: .*manifest.json.*from step-3 delete"):
        store.load(7)


def test_following_the_advice_goes_on_from_the_one_before(store: CheckpointStore) -> None:
    store.save(snapshot(3))
    store.save(snapshot(7))
    for path in store.path(7).iterdir():
        path.unlink()
    store.path(7).rmdir()
    assert store.latest() == 3
    for path in store.path(3).iterdir():
        path.unlink()
    store.path(3).rmdir()
    assert store.latest() is None


def test_the_only_checkpoint_damaged_says_so(store: CheckpointStore) -> None:
    store.save(snapshot(3))
    cut(store.path(3) / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors does not have the size .*no earlier one.*--no-resume"
    ):
        store.load(3)


def test_a_write_that_the_system_cuts_short(store: CheckpointStore) -> None:
    """The kernel itself refuses to let the model's file grow beyond 64 KiB."""
    store.save(snapshot(3))
    before = listing(store.folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write the checkpoint .*step-7.*last good .*step-3"
        ):
            store.save(snapshot(7, size=1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(store.folder) == before
    assert store.load(3).step == 3


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_at_any_point_leaves_the_last_good_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.save(snapshot(3))
    before = listing(store.folder)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "rename") if call == "rename" else (os, call)), full)
        with pytest.raises(
            CheckpointError, match=r"step-7: No space left on device; free some space.*step-3"
        ):
            store.save(snapshot(7))
    assert store.latest() == 3
    assert store.load(3).step == 3
    assert listing(store.folder) == before
    assert sorted(p.name for p in store.folder.iterdir()) == ["latest", "step-3"]
    store.save(snapshot(7))
    assert store.latest() == 7


def test_killed_while_writing_leaves_nothing_to_mistake_for_a_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(snapshot(3))
    real = save_file

    def killed(tensors: dict[str, torch.Tensor], path: Path, **kwargs: Any) -> None:
        real(tensors, path, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(snapshot(7))
    assert (store.folder / ".step-7.tmp").is_dir()
    assert store.steps() == [3]
    store.save(snapshot(9))
    assert sorted(p.name for p in store.folder.iterdir()) == ["latest", "step-3", "step-9"]


def test_a_text_file_names_the_newest_for_scripts(store: CheckpointStore) -> None:
    latest = store.folder / "latest"
    for step in (3, 7):
        store.save(snapshot(step))
        assert latest.read_text() == f"step-{step}\n"
    latest.write_text("step-3\n")
    assert store.latest() == 7, "a process was killed between two names"
    store.settle(7)
    assert latest.read_text() == "step-7\n"
    store.drop()
    assert list(store.folder.iterdir()) == []
