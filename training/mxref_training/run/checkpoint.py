"""Checkpoints of safetensors and JSON files, written atomically and verified when they are read.

`checkpoints/step-N/` holds `model.safetensors`, `optimizer.safetensors`, `rng.safetensors`, `state.json` and
`manifest.json` with the size and SHA-256 of each. It is written under a temporary name and renamed. A run resumes from
its newest checkpoint. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxref_training.durable import clean, make_folder, publish, remove, temporary
from mxref_training.errors import CheckpointError, start_over
from mxref_training.run.metrics_log import file_sha256

FORMAT = "mxref.checkpoint.2"
GROUPS = ("model", "optimizer", "rng")
_MANIFEST = "manifest.json"
_STATE = "state.json"
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to resume after `step` optimizer steps."""

    step: int
    tensors: Mapping[str, dict[str, Tensor]]
    """Named tensors of each of `GROUPS`; no two may share memory."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run: their folder, and how many are kept."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for p in self.folder.iterdir() if (found := _NAME.fullmatch(p.name)))

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, from which a run resumes; None if there is none."""
        return max(self.steps(), default=None)

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint. Then delete the oldest ones beyond `keep`, and all of later steps.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk; existing checkpoints stay.
        """
        final = self.path(snapshot.step)
        partial = temporary(final)
        if final.exists() or final.is_symlink():
            raise CheckpointError(
                f"{final} exists already, and this run did not resume from it: delete this folder"
            )
        try:
            make_folder(self.folder)
            self.clean()
            partial.mkdir()
            _write(partial, snapshot)
            publish(partial, final)
        except (OSError, SafetensorError) as err:
            shutil.rmtree(partial, ignore_errors=True)
            reason = getattr(err, "strerror", None) or str(err)
            left = [step for step in self.steps() if step < snapshot.step]
            good = f"the last good checkpoint is {self.path(left[-1])}" if left else "there is no earlier one"
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {reason}; free some space or choose another --out "
                f"({good})"
            ) from err
        self._thin_out(snapshot.step)
        return final

    def settle(self, step: int) -> None:
        """Verify the newest checkpoint, that of `step`, then delete the oldest beyond `keep` that a killed process
        left.

        Raises:
            CheckpointError: `load` raises it, or an old checkpoint cannot be deleted.
        """
        if len(self.steps()) > self.keep:
            self.load(step)
            self._thin_out(step)

    def _thin_out(self, newest: int) -> None:
        steps = self.steps()
        known = [step for step in steps if step <= newest]
        for step in [*known[: -self.keep], *steps[len(known) :]]:
            try:
                remove(self.path(step))
            except OSError as err:
                raise CheckpointError(
                    f"cannot delete {self.path(step)}, which {self.path(newest)} replaces: "
                    f"{err.strerror or err}; delete this folder"
                ) from err

    def load(self, step: int, groups: Sequence[str] = GROUPS) -> Snapshot:
        """Return a checkpoint after verifying every byte of it, or of the groups that are asked for.

        Raises:
            CheckpointError: another version of mxref wrote it, or a file is missing or damaged; the message names the
                file and the previous checkpoint.
        """
        state, path = self.state(step), self.path(step)
        try:
            manifest = _manifest(path)
            for group in groups:
                _verify(path, f"{group}.safetensors", manifest)
            tensors = {group: load_file(path / f"{group}.safetensors") for group in groups}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as err:
            raise self._damaged(step, err) from err
        return Snapshot(step, tensors, state)

    def state(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds except tensors, verified as in `load`."""
        path = self.path(step)
        try:
            manifest = _manifest(path)
            _verify(path, _STATE, manifest)
            state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
            version = str(state["format"])
            if version == FORMAT:
                if state["step"] != step:
                    raise ValueError(f"{_STATE} is not the state of step {step}")
                if set(manifest) != {_STATE, *(f"{group}.safetensors" for group in GROUPS)}:
                    raise ValueError(f"{_MANIFEST} does not list the files of a checkpoint")
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise self._damaged(step, err) from err
        if version != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} was written by another version of mxref: its format is {version}, and this "
                f"version reads {FORMAT}; go on with that version, choose another --out, or {self._start_over()}"
            )
        return state

    def clean(self) -> None:
        """Remove the unfinished checkpoint of a killed process."""
        clean(self.folder, "step-*")

    def clear(self) -> None:
        """Delete all checkpoints. A folder that is a link stays, and so do files that mxref did not write."""
        self.clean()
        for step in self.steps():
            remove(self.path(step))
        if self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _start_over(self) -> str:
        return start_over(self.folder.parent)

    def _damaged(self, step: int, err: Exception) -> CheckpointError:
        reason = f"{err.strerror}: {err.filename}" if isinstance(err, OSError) else str(err)
        earlier = [s for s in self.steps() if s < step]
        way_out = (
            f"to go on from {self.path(earlier[-1]).name} delete {self.path(step)}"
            if earlier
            else f"there is no earlier one: restore it, or {self._start_over()}"
        )
        return CheckpointError(f"the checkpoint {self.path(step)} is damaged: {reason}; {way_out}")


def _write(folder: Path, snapshot: Snapshot) -> None:
    for group in GROUPS:
        save_file(snapshot.tensors[group], folder / f"{group}.safetensors", metadata={"format": "pt"})
    state = {"format": FORMAT, "step": snapshot.step, **snapshot.state}
    (folder / _STATE).write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    manifest = {
        p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(folder.iterdir())
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file; ValueError if the manifest cannot be read."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        facts = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in manifest.items()}
        if _STATE not in facts:
            raise ValueError(f"it does not list {_STATE}")
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"{_MANIFEST} cannot be read ({err})") from err
    return facts


def _verify(folder: Path, name: str, manifest: Mapping[str, tuple[int, str]]) -> None:
    """Raise ValueError, which names the file, unless the file matches the manifest."""
    size, sha = manifest[name]
    path = folder / name
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{name} has {found:,} bytes, not {size:,}")
    if file_sha256(path) != sha:
        raise ValueError(f"{name} does not have the SHA-256 that was recorded")
