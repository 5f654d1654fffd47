"""Writes a Hugging Face folder: all of it, or nothing."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from mxref_training.data.progress import progress
from mxref_training.durable import clean, locked, make_folder, publish, temporary
from mxref_training.errors import HuggingFaceError
from mxref_training.huggingface.weights import INDEX, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of the folder that are made together, when their file is written."""

    sizes: Mapping[str, int]
    """Bytes of each tensor, by name."""
    make: Callable[[], dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes.values())


def require_free(out: Path) -> None:
    """Raise HuggingFaceError unless a folder can be put at `out`: nothing is there, or an empty folder."""
    way_out = "choose another folder, or delete this one"
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise HuggingFaceError(f"{out} exists and is no folder: {way_out}")
    if not out.is_dir():
        return
    if any(out.iterdir()):
        raise HuggingFaceError(f"{out} exists and is not empty: {way_out}")
    if os.path.samefile(out, os.curdir):
        raise HuggingFaceError(f"{out} is the current folder, which would be replaced: name another one")


def write_folder(
    out: Path, parts: Sequence[TensorGroup], files: Mapping[str, str], max_shard: int
) -> list[str]:
    """Write tensors and texts into a new folder, which gets its name when everything is on the disk.

    Args:
        out: the folder; nothing is there, or an empty folder.
        parts: the tensors, in the order of the files.
        files: texts by the names of their files.
        max_shard: bytes of tensors in a file; a part that is larger has a file of its own.

    Returns:
        The names of the files of tensors.

    Raises:
        HuggingFaceError: `out` is not free, another process writes it, or it cannot be written; what was there stays.
    """
    require_free(out)
    shards = _shards(parts, max_shard)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        files = {**files, INDEX: _index(shards, names)}
    with _alone(out) as partial:
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        _write_shards(partial, shards, names, f"writing {out}")
        for name in names:  # safetensors makes files that nobody else may read, whatever the umask
            shutil.copymode(partial / next(iter(files)), partial / name)
        publish(partial, out)
    return names


def _shards(parts: Sequence[TensorGroup], max_shard: int) -> list[list[TensorGroup]]:
    shards: list[list[TensorGroup]] = [[]]
    filled = 0
    for part in parts:
        if shards[-1] and filled + part.bytes > max_shard:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += part.bytes
    return shards


def _index(shards: Sequence[Sequence[TensorGroup]], names: Sequence[str]) -> str:
    found = {
        tensor: name
        for name, shard in zip(names, shards, strict=True)
        for part in shard
        for tensor in part.sizes
    }
    total = sum(part.bytes for shard in shards for part in shard)
    return dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(found.items()))})


def _write_shards(
    folder: Path, shards: Sequence[Sequence[TensorGroup]], names: Sequence[str], title: str
) -> None:
    from safetensors.torch import save_file

    work = [(i, part) for i, shard in enumerate(shards) for part in shard]
    tensors: dict[str, Tensor] = {}
    for i, part in progress(work, title):
        tensors |= part.make()
        if part is shards[i][-1]:
            save_file(tensors, folder / names[i], metadata={"format": "pt"})
            tensors = {}


@contextmanager
def _alone(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, which disappears unless the block renames it."""

    def busy(holder: str) -> HuggingFaceError:
        return HuggingFaceError(
            f"{holder} is writing {out}: wait until it has ended, or choose another folder"
        )

    out = Path(os.path.abspath(out))
    partial = temporary(out)
    try:
        make_folder(out.parent)
        with locked(out.with_name(f".{out.name}.lock"), busy):
            clean(out.parent, glob.escape(out.name))
            partial.mkdir()
            try:
                yield partial
            except BaseException:
                with suppress(OSError):
                    shutil.rmtree(partial)
                raise
    except (OSError, SafetensorError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise HuggingFaceError(
            f"cannot write {out}: {reason}; free some space, or choose another folder"
        ) from err


def dump(table: Mapping[str, Any]) -> str:
    """Return a table as the text of a JSON file."""
    return json.dumps(table, indent=2) + "\n"
