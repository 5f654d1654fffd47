"""Checks a run's folder before the run begins or continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mxref_training.run.folder import RunFolder
from mxref_training.run.identity import changed_environment


def begun_run(
    folder: RunFolder, wanted: Mapping[str, Any], device: str, note: Callable[[str], None]
) -> tuple[bool, int]:
    """Return whether the folder holds the wanted run, and the step of its newest checkpoint, 0 if there is none.

    Args:
        folder: of the run, locked.
        wanted: the run's identity.
        device: its name.
        note: is told what the user should know.

    Raises:
        CheckpointError: the folder holds another run, or a part of this one is missing.
    """
    record = folder.record()
    if record is None:
        return False, 0
    folder.require(wanted, record["identity"])
    folder.require_checkpoints()
    if changed := changed_environment(record, device):
        note(f"not the machine that began this run, so bits may differ: {', '.join(changed)}")
    if folder.store.latest() is None:
        note(f"no checkpoint in {folder.store.folder}: starts at step 0")
    return True, folder.store.latest() or 0
