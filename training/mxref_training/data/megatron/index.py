"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where every sequence begins.

The index, all numbers little-endian: 9 bytes of magic; version 1 (uint64); a code of the tokens' dtype (uint8); the
number S of sequences and the number D of document boundaries (uint64 each); the S lengths in tokens (int32); the S
places in the token file in bytes (int64); the D boundaries, which are numbers of sequences (int64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats

_AGAIN = "fetch or make both files again"


@dataclass(frozen=True)
class IndexedFile:
    """A pair of token file and index, mapped into memory and checked.

    Attributes:
        prefix: path of both files without `.bin` and `.idx`.
        ids: the tokens of all sequences, one after the other, `[N]`, read-only.
        lengths: tokens of every sequence, `[S]` int32; Megatron shuffles and packs these.
        starts: first token of every sequence, `[S + 1]` int64; the last entry is N.
        documents: number of documents; each is one or more sequences.
    """

    prefix: Path
    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    documents: int


def prefix_of(source: str | Path) -> Path | None:
    """Return the prefix of a pair of files that a path names: the prefix, or either file; None if it names none."""
    path = Path(source)
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.name:
        return None
    found = [beside(path, suffix).is_file() for suffix in (".bin", ".idx")]
    # Megatron keeps its own cache in a folder with the name of the prefix.
    return path if all(found) or (any(found) and not path.exists()) else None


def open_indexed(prefix: Path) -> IndexedFile:
    """Return a pair of files, mapped into memory.

    Raises:
        DataError: a file is missing or has another size than its header or the index says, or the index is none of
            version 1, has no integers or no tokens, or its lengths, places and boundaries do not fit together.
    """
    path, tokens_path = beside(prefix, ".idx"), beside(prefix, ".bin")
    try:
        found, tokens_found = path.stat().st_size, tokens_path.stat().st_size
        if found < HEADER.size:
            raise DataError(f"{path} is cut short: it has {found} of at least {HEADER.size} bytes: {_AGAIN}")
        index = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename} ({error.strerror}): a prefix names both {prefix.name}.bin and "
            f"{prefix.name}.idx"
        ) from error
    magic, version, code, sequences, boundaries = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{path} is no index of Megatron of version {VERSION}: it begins with {magic!r}, {version}"
        )
    if code not in DTYPES:
        raise DataError(f"{path}: the tokens have dtype code {code}, which is none of integers: {_AGAIN}")
    dtype = np.dtype(DTYPES[code])
    why = f"its header counts {sequences:,} sequences and {boundaries:,} document boundaries"
    _require_size(path, found, HEADER.size + (4 + 8) * sequences + 8 * boundaries, why)
    place = HEADER.size
    lengths = np.frombuffer(index, "<i4", sequences, place)
    places = np.frombuffer(index, "<i8", sequences, place + 4 * sequences)
    ends = np.frombuffer(index, "<i8", boundaries, place + (4 + 8) * sequences)
    starts = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    bounds = [*ends[:1], *ends[-1:]]
    fits = bounds == [0, sequences] and (np.diff(ends) >= 0).all()
    if not fits or (lengths < 0).any() or (places != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{path}: its lengths, places and document boundaries do not fit together: {_AGAIN}")
    if not starts[-1]:
        raise DataError(f"{path}: the index lists no tokens: give data with tokens")
    why = f"{path.name} lists {starts[-1]:,} tokens of {dtype.itemsize} bytes"
    _require_size(tokens_path, tokens_found, int(starts[-1]) * dtype.itemsize, why)
    return IndexedFile(prefix, np.memmap(tokens_path, dtype, "r"), lengths, starts, boundaries - 1)


def beside(prefix: Path, suffix: str) -> Path:
    """Return the file of a prefix with `.bin` or `.idx`."""
    return prefix.with_name(prefix.name + suffix)


def _require_size(path: Path, found: int, expected: int, why: str) -> None:
    if found != expected:
        state = "is cut short" if found < expected else "is too long"
        raise DataError(f"{path} {state}: expected {expected:,} bytes, found {found:,} ({why}): {_AGAIN}")
