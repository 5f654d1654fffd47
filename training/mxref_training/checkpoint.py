"""Checkpoints: safetensors and JSON, written whole or not at all, verified when they are read.

`checkpoints/step-N/` holds `model.safetensors`, `optimizer.safetensors`, `rng.safetensors`, `state.json` and
`manifest.json` with the size and SHA-256 of each. It is written under another name, synced and renamed; then
the file `checkpoints/latest` is replaced, which names the one to go on from. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxref_training.errors import CheckpointError

FORMAT = "mxref.checkpoint.1"
GROUPS = ("model", "optimizer", "rng")
_MANIFEST = "manifest.json"
_STATE = "state.json"
_PREFIX = "step-"
_PARTIAL = ".partial-"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Snapshot:
    """What a run needs to go on after `step` optimizer steps."""

    step: int
    tensors: Mapping[str, dict[str, Tensor]]
    """Named tensors of each of `GROUPS`; no two may share memory."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run: a folder, and how many of them stay there."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"{_PREFIX}{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (p.name.removeprefix(_PREFIX) for p in self.folder.iterdir() if p.name.startswith(_PREFIX))
        return sorted(int(name) for name in found if name.isdecimal())

    def latest(self) -> int | None:
        """Return the step to go on from; None where the run has no checkpoint yet.

        That is what `latest` names, or the newest checkpoint where that one was deleted.

        Raises:
            CheckpointError: `latest` names a checkpoint, but none is left.
        """
        pointer = self.folder / "latest"
        steps = self.steps()
        try:
            named = pointer.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as err:
            raise CheckpointError(f"cannot read {pointer}: {err}; delete it to go on from {steps}") from err
        step = named.removeprefix(_PREFIX)
        if step.isdecimal() and int(step) in steps:
            return int(step)
        if not steps:
            raise CheckpointError(
                f"{pointer} names {named}, but no checkpoint is left there: restore it, or start over with --no-resume"
            )
        return steps[-1]

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, make it the latest, and delete the ones beyond `keep`.

        Raises:
            CheckpointError: it cannot be written, for want of space for example; what was there stays.
        """
        final = self.path(snapshot.step)
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            partial.mkdir()
            _write(partial, snapshot)
            if final.exists():  # this step was reached before, and its checkpoint not taken for the latest
                self._delete(final)
            partial.rename(final)
            _sync(self.folder)
            replace_text(self.folder / "latest", final.name + "\n")
            for step in self.steps()[: -self.keep]:
                self._delete(self.path(step))
        except (OSError, SafetensorError) as err:
            shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(err, "strerror", None) or str(err)
            left = [step for step in self.steps() if step != snapshot.step]
            good = f"the last good checkpoint is {self.path(left[-1])}" if left else "there is no earlier one"
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {reason}; free some space or choose another --out "
                f"({good})"
            ) from err
        return final

    def load(self, step: int) -> Snapshot:
        """Return a checkpoint, every byte of it verified.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it and the checkpoint before.
        """
        path = self.path(step)
        try:
            _verify(path)
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
            tensors = {group: load_file(path / f"{group}.safetensors") for group in GROUPS}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as err:
            reason = f"{err.strerror}: {err.filename}" if isinstance(err, OSError) else str(err)
            raise self._damaged(step, reason) from err
        if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("step") != step:
            raise self._damaged(step, f"{_STATE} is not that of a checkpoint of step {step}")
        return Snapshot(step, tensors, state)

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        earlier = [s for s in self.steps() if s < step]
        way_out = (
            f"to go on from {self.path(earlier[-1]).name} delete that folder"
            if earlier
            else "there is no earlier one: restore it, or start over with --no-resume"
        )
        return CheckpointError(f"the checkpoint {self.path(step)} is damaged: {reason}; {way_out}")

    def _delete(self, path: Path) -> None:
        # Renamed first: a deletion that is cut short must not leave half a checkpoint.
        doomed = path.with_name(f"{_PARTIAL}old-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _clean(self) -> None:
        for left in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left)


def _write(folder: Path, snapshot: Snapshot) -> None:
    for group in GROUPS:
        save_file(snapshot.tensors[group], folder / f"{group}.safetensors", metadata={"format": "pt"})
    state = {"format": FORMAT, "step": snapshot.step, **snapshot.state}
    (folder / _STATE).write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = sorted(p for p in folder.iterdir())
    manifest = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*files, folder / _MANIFEST, folder):
        _sync(path)


def _verify(folder: Path) -> None:
    """Raise ValueError, naming the file, unless everything is as the manifest says."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        facts = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in manifest.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"{_MANIFEST} cannot be read ({err})") from err
    expected = {_STATE, *(f"{group}.safetensors" for group in GROUPS)}
    if set(facts) != expected:
        raise ValueError(f"{_MANIFEST} does not list {', '.join(sorted(expected))}")
    for name, (size, sha) in facts.items():
        path = folder / name
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found:,} bytes, not {size:,}")
        if _sha256(path) != sha:
            raise ValueError(f"{name} does not have the SHA-256 that was recorded")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Have a file's or folder's content reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a text file beside `path`, sync it, and move it there: an old file is replaced whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
