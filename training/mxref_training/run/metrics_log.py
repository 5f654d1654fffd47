"""A log of JSON lines. A checkpoint records its length and SHA-256, and a resumed run cuts it to that length."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxref_training.durable import explained, sync, write_all
from mxref_training.errors import CheckpointError, start_over

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Mark:
    """The first bytes of a log, as a checkpoint records them."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    def to_table(self) -> dict[str, Any]:
        """Return the mark as JSON values."""
        return asdict(self)


class MetricsLog:
    """A file of JSON lines.

    A line reaches the operating system as soon as it is written, so a killed process loses none. `mark` flushes the
    lines to the disk.
    """

    def __init__(self, path: Path, kept: Mark | None = None) -> None:
        """Open a log, keep the part that a checkpoint recorded, and cut off the rest.

        Raises:
            CheckpointError: that part is missing or changed, or the file cannot be written.
        """
        self.path = path
        kept = kept or Mark()
        with self._explained("open"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._digest = self._verified(kept)
                self._length = kept.bytes
                if os.fstat(self._descriptor).st_size > kept.bytes:
                    os.ftruncate(self._descriptor, kept.bytes)
                os.lseek(self._descriptor, kept.bytes, os.SEEK_SET)
                sync(path.parent)
            except BaseException:
                os.close(self._descriptor)
                raise

    def _verified(self, kept: Mark) -> Any:
        """Return the running hash over the first bytes after comparing it with the mark."""
        found = os.fstat(self._descriptor).st_size
        if found < kept.bytes:
            raise CheckpointError(
                f"{self.path} has {found:,} bytes, but the checkpoint was taken at {kept.bytes:,}: "
                f"restore the file, or {start_over(self.path.parent)}"
            )
        digest, left = hashlib.sha256(), kept.bytes
        while left:
            chunk = os.read(self._descriptor, min(left, _CHUNK))
            if not chunk:
                raise OSError("the file became shorter while it was read")
            digest.update(chunk)
            left -= len(chunk)
        if digest.hexdigest() != kept.sha256:
            raise CheckpointError(
                f"{self.path} was changed after the checkpoint was taken: its first {kept.bytes:,} bytes have another "
                f"SHA-256; restore the file, or {start_over(self.path.parent)}"
            )
        return digest

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; floats are written so that reading them back gives the same bits.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk.
        """
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._explained("write"):
            write_all(self._descriptor, data)
        self._digest.update(data)
        self._length += len(data)

    def mark(self) -> Mark:
        """Flush the log to the disk, and return the length and SHA-256 of what was written so far."""
        with self._explained("write"):
            os.fsync(self._descriptor)
        return Mark(self._length, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _explained(self, verb: str) -> Any:
        return explained(
            CheckpointError,
            f"{verb} {self.path}",
            "free some space, or see to the disk; the same command goes on from the last checkpoint",
        )


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
