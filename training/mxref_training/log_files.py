"""The files of a run's logs.

Each log is a file of JSON lines. A line reaches the operating system as soon as it is written, so a killed process
loses none. A checkpoint records the length of each log, and a resumed run cuts the logs to these lengths. Clock times
are in `timing.jsonl` only, so the other logs of a resumed run are those of a run that never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mxref_training.durable import explained, remove, sync, write_all
from mxref_training.errors import CheckpointError, start_over

ALWAYS = ("metrics", "timing")
"""Logs of every run; `telemetry` and `spikes` exist as soon as they have a line."""
_OTHERS = ("telemetry", "spikes")


class LogFile:
    """A file of JSON lines, cut to the length that a checkpoint recorded."""

    def __init__(self, path: Path, kept: int = 0) -> None:
        """Open a log and cut it to its first `kept` bytes.

        Raises:
            CheckpointError: it is shorter than that, or cannot be written.
        """
        self.path = path
        with _explained("open", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                if (found := os.fstat(self._descriptor).st_size) < kept:
                    raise CheckpointError(
                        f"{path} has {found:,} bytes, but the checkpoint was taken at {kept:,}: restore the file, or "
                        f"{start_over(path.parent)}"
                    )
                os.ftruncate(self._descriptor, kept)
                sync(path.parent)
            except BaseException:
                os.close(self._descriptor)
                raise

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; floats are written so that reading them back gives the same bits.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk.
        """
        with _explained("write", self.path):
            write_all(self._descriptor, (json.dumps(line, allow_nan=False) + "\n").encode())

    def length(self) -> int:
        """Flush the log to the disk, and return its length in bytes."""
        with _explained("write", self.path):
            os.fsync(self._descriptor)
            return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _explained(verb: str, path: Path) -> AbstractContextManager[None]:
    way_out = "free some space, or see to the disk; the same command goes on from the last checkpoint"
    return explained(CheckpointError, f"{verb} {path}", way_out)


def open_logs(folder: Path, lengths: Mapping[str, int]) -> dict[str, LogFile]:
    """Return the open logs of a run by name, cut to the lengths of a checkpoint; delete logs that it does not know.

    Args:
        folder: of the run.
        lengths: bytes by name, `logs` of the checkpoint's state.

    Raises:
        CheckpointError: as of `LogFile`, or a log cannot be deleted.
    """
    for name in _OTHERS:
        if name not in lengths:
            with _explained("delete", folder / f"{name}.jsonl"):
                remove(folder / f"{name}.jsonl")
    return {
        name: LogFile(folder / f"{name}.jsonl", lengths.get(name, 0))
        for name in dict.fromkeys((*ALWAYS, *lengths))
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, without an incomplete last line.

    Raises:
        CheckpointError: a line is not JSON.
    """
    if path.exists():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError as err:
                    raise CheckpointError(
                        f"{path}, line {number} is not JSON ({err}): restore the file, or {start_over(path.parent)}"
                    ) from err
