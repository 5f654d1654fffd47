"""Build the shim, run a command with one failing operation, and read the recorded operations."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Fault(IntEnum):
    """What becomes of the chosen operation."""

    NONE = 0
    ERROR = 1
    """It fails with EIO."""
    FULL = 2
    """It and all later ones that need room fail with ENOSPC."""
    SHORT = 3
    """A write takes half of the bytes and says so."""
    KILL = 4
    """The process is killed before it."""
    TORN = 5
    """The process is killed when half of the bytes are written."""


class Kind(IntEnum):
    """An operation on a file or folder."""

    CREATE = 1
    WRITE = 2
    SYNC = 3
    RENAME = 4
    UNLINK = 5
    RMDIR = 6
    MKDIR = 7
    TRUNCATE = 8


@dataclass(frozen=True)
class Operation:
    """One operation, with the inode that it touched."""

    kind: Kind
    changed: bool
    """Whether it did something: not where it failed, or opened a file that was there already."""
    inode: int
    offset: int
    """Where a write began, or the size that a file is cut to."""
    path: Path
    other: Path
    """The new name."""
    data: bytes


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Negative for a signal."""
    output: str


def build(folder: Path) -> Path:
    """Compile the shim."""
    library = folder / "shim.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "shim.c"), "-ldl"], check=True
    )
    return library


class Server:
    """The process that the commands are forked from; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        quiet = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON")}
        path = os.pathsep.join([str(HERE.parent), *(p for p in sys.path if p)])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "default", "-m", "faults.server"],
            env=os.environ
            | quiet
            | {"LD_PRELOAD": str(build(folder)), "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self,
        command: list[str],
        root: Path,
        fault: Fault = Fault.NONE,
        at: int = 0,
        record: Path | None = None,
        plant: str = "",
        **environment: str,
    ) -> Ended:
        """Run an `mxref` command, its operations below `root` counted from 1 and number `at` spoiled.

        `plant` names a fault of `faults.planted`, put into the product first.
        """
        output = self._folder / "output"
        request: dict[str, Any] = {
            "command": command,
            "root": str(root),
            "mode": int(fault),
            "at": at,
            "record": str(record or ""),
            "output": str(output),
            "plant": plant,
            "environment": environment,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Ended(code, output.read_text(errors="replace"))


def recorded(path: Path) -> Iterator[Operation]:
    """Yield the operations of a record."""
    head = struct.Struct("<7q")
    data = path.read_bytes()
    at = 0
    while at < len(data):
        kind, changed, inode, offset, *sizes = head.unpack_from(data, at)
        at += head.size
        parts: list[bytes] = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        yield Operation(
            Kind(kind),
            bool(changed),
            inode,
            offset,
            Path(parts[0].decode()),
            Path(parts[1].decode()),
            parts[2],
        )
