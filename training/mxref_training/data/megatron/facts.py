"""What one full reading of a token file finds: its hash, the range of its ids, and a key for each sequence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.cache import cache_key, cached
from mxref_training.data.megatron.index import IndexedFile
from mxref_training.data.progress import progress
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMAT = "facts-1"
_PIECE = 1 << 22  # tokens that are read at once
_QUIET_BELOW = 1 << 28  # tokens; fewer take only seconds and get no progress bar


@dataclass(frozen=True)
class Facts:
    """The facts about a file after one full reading.

    Attributes:
        sha256: of the token ids as they are stored.
        lengths_sha256: of the lengths of the sequences, which decide the order too.
        largest: the largest token id.
    """

    sha256: str
    lengths_sha256: str
    largest: int


def read_facts(file: IndexedFile) -> Facts:
    """Return the facts of a file, from the cache if the file is the one that was read.

    A file is taken for the same while path, size, times of change and inode are the same, so that hundreds of gigabytes
    are read in full only once.

    Raises:
        DataError: an id is negative, or the cache cannot be used.
    """
    path = Path(str(file.ids.filename))  # type: ignore[attr-defined]
    status = path.stat()
    # Not the device: a network file system has another number on each host, and after each boot.
    mark = f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}"
    lengths = hashlib.sha256(np.ascontiguousarray(file.lengths).data).hexdigest()

    def build(folder: Path) -> None:
        (folder / "facts.json").write_text(json.dumps(_read(file)) + "\n", encoding="utf-8")

    folder = cached("megatron-facts", cache_key(_FORMAT, str(path.resolve()), mark, lengths), build)
    try:
        found = json.loads((folder / "facts.json").read_bytes())
        return Facts(str(found["sha256"]), lengths, int(found["largest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cached facts in {folder} are damaged ({error}): delete this folder") from error


def _read(file: IndexedFile) -> dict[str, Any]:
    sha, largest = hashlib.sha256(), 0
    pieces: Any = range(0, len(file.ids), _PIECE)
    if len(file.ids) >= _QUIET_BELOW:
        pieces = progress(pieces, f"reading {file.prefix.name}.bin", len(pieces))
    for first in pieces:
        piece = file.ids[first : first + _PIECE]
        sha.update(np.ascontiguousarray(piece).data)
        if (lowest := int(piece.min())) < 0:
            place = first + int(piece.argmin())
            raise DataError(f"{file.prefix}.bin: token {place:,} is {lowest}: ids must not be negative")
        largest = max(largest, int(piece.max()))
    return {"sha256": sha.hexdigest(), "largest": largest}


def _keys(file: IndexedFile) -> NDArray[np.uint64]:
    """Return a key for each sequence that is not empty, from its length and four of its tokens."""
    lengths = file.lengths.astype(np.int64)
    first = file.starts[:-1][lengths > 0]
    lengths = lengths[lengths > 0]
    key = lengths.astype(np.uint64)
    for quarter in range(4):
        token = file.ids[first + (lengths - 1) * quarter // 3].astype(np.uint64)
        key = (key ^ token) * np.uint64(
            0x9E3779B97F4A7C15
        )  # wraps; an odd factor keeps keys of one length apart
        key ^= key >> np.uint64(29)
    return key


def cached_common(train: IndexedFile, train_facts: Facts, val: IndexedFile, val_facts: Facts) -> list[int]:
    """Return `common_sequences`, from the cache if the files are known."""
    pair = [part for facts in (train_facts, val_facts) for part in (facts.sha256, facts.lengths_sha256)]

    def build(folder: Path) -> None:
        (folder / "common.json").write_text(f"{common_sequences(train, val)}\n", encoding="utf-8")

    folder = cached("megatron-common", cache_key(_FORMAT, *pair), build)
    try:
        return [int(number) for number in json.loads((folder / "common.json").read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"the cached comparison in {folder} is damaged ({error}): delete this folder"
        ) from error


def common_sequences(train: IndexedFile, val: IndexedFile) -> list[int]:
    """Return the sequences of the validation file that are in the training file too; of equal ones, the first.

    Keys choose the candidates, which are then compared token by token.
    """
    candidates = np.flatnonzero(np.isin(_keys(train), _keys(val)))
    if not len(candidates):
        return []
    known = {_digest(val, int(number)): int(number) for number in np.flatnonzero(val.lengths)[::-1]}
    numbers = np.flatnonzero(train.lengths)[candidates]
    found = {known.get(_digest(train, int(number))) for number in numbers}
    return sorted(number for number in found if number is not None)


def _digest(file: IndexedFile, number: int) -> bytes:
    ids = file.ids[file.starts[number] : file.starts[number + 1]].astype("<i8")
    return hashlib.sha256(ids.tobytes()).digest()
