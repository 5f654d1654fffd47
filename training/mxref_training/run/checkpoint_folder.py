"""The folder of a run's checkpoints: which there are, which is the newest, and which are deleted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mxref_training.durable import clean, explained, remove, replace_text
from mxref_training.errors import CheckpointError
from mxref_training.run.checkpoint_files import LATEST, MANIFEST, named

_NAME = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run by their names: no file of one is read here."""

    folder: Path
    keep: int
    """How many checkpoints stay."""

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

    def name_newest(self, step: int) -> None:
        """Write the text file that names the newest checkpoint."""
        path = self.folder / LATEST
        with explained(CheckpointError, f"write {path}", f"{self.path(step)} is complete; free some space"):
            replace_text(path, f"{self.path(step).name}\n")

    def lost(self) -> str:
        """Return a note if `latest` names a checkpoint that is not there; else nothing. A run takes the newest one."""
        name, newest = named(self.folder), self.latest()
        if name is None or newest is None or (self.folder / name / MANIFEST).is_file():
            return ""
        return f"{self.folder / LATEST} names {name!r}, which is not there: the newest is step-{newest}"

    def thin_out(self, newest: int) -> None:
        """Delete the oldest checkpoints beyond `keep`, and all of later steps than the newest one."""
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

    def clean(self) -> None:
        """Remove the unfinished checkpoint of a killed process."""
        clean(self.folder, "step-*")
        clean(self.folder, LATEST)

    def drop(self) -> None:
        """Delete all checkpoints, and keep the folder."""
        if named(self.folder) is not None:
            remove(self.folder / LATEST)
        for step in self.steps():
            remove(self.path(step))

    def clear(self) -> None:
        """Delete all checkpoints. A folder that is a link stays, and so do files that mxref did not write."""
        self.clean()
        self.drop()
        if self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir()):
            self.folder.rmdir()
