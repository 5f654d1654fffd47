"""The files of a checkpoint: their names, the manifest with size and SHA-256 of each, and how tensors are written."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mxref_training.durable import sync
from mxref_training.run.metrics_log import file_sha256

FORMAT = "mxref.checkpoint.2"
"""One file for each of `GROUPS`, of whole tensors."""
SHARDED = "mxref.checkpoint.3"
"""One file for each of `GROUPS` and rank, of parts of tensors."""
GROUPS = ("model", "optimizer", "rng")
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"
"""A text file that names the newest checkpoint, for scripts."""
CHUNKS = "chunks"
"""Key in a safetensors file's header: JSON that has offset and whole shape of each tensor that is a part."""

Facts = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 of files, by name."""


@dataclass(frozen=True)
class Part:
    """What one rank writes of a tensor."""

    tensor: Tensor
    """The part, or the whole tensor."""
    offset: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""


def file_name(group: str, rank: int = 0, world: int = 1) -> str:
    """Return the name of the file that holds a rank's part of a group."""
    return f"{group}.safetensors" if world == 1 else f"{group}-{rank + 1}-of-{world}.safetensors"


def group_files(group: str, world: int) -> list[str]:
    """Return the names of all files of a group."""
    return [file_name(group, rank, world) for rank in range(world)]


def write_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Write parts into a safetensors file; its header says where the parts that are no whole tensor belong."""
    cut = {
        name: {"offset": part.offset, "shape": part.whole}
        for name, part in sorted(parts.items())
        if part.tensor.numel() != math.prod(part.whole)
    }
    # One key: safetensors writes several in an order that changes from call to call.
    header = {CHUNKS: json.dumps(cut)} if cut else {"format": "pt"}
    save_file({name: part.tensor.contiguous() for name, part in parts.items()}, path, metadata=header)


def named(folder: Path) -> str | None:
    """Return which checkpoint `LATEST` names in the folder of a run's checkpoints; None if there is no such file."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def file_facts(paths: Iterable[Path]) -> Facts:
    """Return the entries of a manifest for files."""
    return {path.name: (path.stat().st_size, file_sha256(path)) for path in paths}


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write the manifest of a checkpoint."""
    table = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in sorted(facts.items())}
    (folder / MANIFEST).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Facts:
    """Return the entries of the manifest; ValueError if it cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        facts = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in manifest.items()}
        if STATE not in facts:
            raise ValueError(f"it does not list {STATE}")
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"{MANIFEST} cannot be read ({err})") from err
    return facts


def verify_file(folder: Path, name: str, facts: Facts) -> None:
    """Raise ValueError, which names the file, unless the file matches the manifest."""
    size, sha = facts[name]
    path = folder / name
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{name} has {found:,} bytes, not {size:,}")
    if file_sha256(path) != sha:
        raise ValueError(f"{name} does not have the SHA-256 that was recorded")


@dataclass
class Unfinished:
    """A checkpoint under its temporary name."""

    step: int
    state: Mapping[str, Any]
    folder: Path
    files: dict[str, dict[str, Part]]
    """The parts that this rank writes, by file."""
    facts: Facts = field(default_factory=dict)
    """The files that it has written."""
    problem: Exception | None = None
    """Why it could not write them."""

    def write(self, synced: bool = True) -> None:
        """Write this rank's files; no other rank is waited for. An exception is kept in `problem`.

        Args:
            synced: flush them to the disk. The first rank does so at the end in any case, but only for its own host.
        """
        try:
            if not self.folder.is_dir():
                raise OSError(errno.ENOENT, "the folder that rank 0 made is not there: --out must be shared")
            for name, parts in self.files.items():
                write_parts(self.folder / name, parts)
                if synced:
                    sync(self.folder / name)
                self.facts |= file_facts([self.folder / name])
        except Exception as err:
            self.problem = err
