"""The files that a source names, and their bytes, decompressed in small pieces.

A compressed file may hold several gzip members (RFC 1952), Zstandard frames (RFC 8878) or xz streams (The .xz File
Format 1.1.0), one after the other. Each must be complete, and nothing may follow the last one. The libraries' own file
readers ignore what follows it, or take a frame that is cut short for its end, and documents would be lost silently.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from mxref_training.errors import DataError

PACKINGS = (".gz", ".zst", ".xz")
SUFFIXES = tuple(stem + packing for stem in (".jsonl", ".json", ".ndjson") for packing in ("", *PACKINGS))
READ = 1 << 11  # bytes that are read at once; a hostile Zstandard file makes 128 KiB of every 4 bytes
_MAX_WINDOW = 1 << 31  # bytes; the largest that `zstd --long=31` writes

PathLike = str | os.PathLike[str]


def resolve_files(source: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    """Return the files that a path, a folder, a glob pattern or a list of these names.

    Args:
        source: a file; a folder, whose JSONL files at any depth are read in the order of their names; a
            pattern with `*`, `?` or `[`; or a list of these, whose order is kept.

    Raises:
        DataError: no file is found, a path is empty or cannot be read, or a folder holds no JSONL file.
    """
    if not isinstance(source, str | os.PathLike):
        return tuple(file for part in source for file in resolve_files(part))
    if not os.fspath(source):  # Path("") is the working directory
        raise DataError("the data path is empty: give a JSONL file, a folder (`.` is this one) or a pattern")
    try:
        return _resolve(Path(source))
    except OSError as error:
        raise DataError(
            f"cannot look for data in {error.filename} ({error.strerror}): give a path that can be read"
        ) from error


def _resolve(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        found = sorted(p for p in _files_below(path) if p.name.endswith(SUFFIXES) and p.is_file())
        if not found:
            raise DataError(
                f"no JSONL file in the folder {path}: expected names ending in {', '.join(SUFFIXES)}"
            )
        return tuple(found)
    if not path.exists() and has_magic(str(path)):
        found = sorted(Path(name) for name in glob(str(path), recursive=True) if Path(name).is_file())
        if not found:
            raise DataError(f"no file matches {path}: check the pattern")
        return tuple(found)
    if not path.is_file():
        raise DataError(f"no such data file: {path}: give a JSONL file, a folder or a pattern")
    return (path,)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files at any depth; OSError for a folder that cannot be read, because its files would be missing."""

    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in names)


def pieces(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in small pieces, some of them empty.

    The file name gives the compression: `.gz`, `.zst` or `.xz`; any other file is plain.

    Raises:
        DataError: the file cannot be read, or the compressed file is empty, cut short or altered, or bytes follow its
            last part.
    """
    try:
        with path.open("rb") as file:
            if path.suffix in PACKINGS:
                yield from _parts(file, path.suffix)
            else:
                while data := file.read(1 << 17):
                    yield data
    except PermissionError as error:
        raise DataError(f"no permission to read {path}: ask its owner, or copy it") from error
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {path} ({reason}): the file is damaged or not {path.suffix or 'plain text'}; fetch it again"
        ) from error


def without_checksum(path: Path) -> bool:
    """Return whether the first part of a compressed file has no checksum, so that damage may go unnoticed."""
    with path.open("rb") as file:
        start = file.read(32)
    if path.suffix == ".xz":
        return start[7] & 0xF == lzma.CHECK_NONE
    import zstandard

    is_frame = path.suffix == ".zst" and start.startswith(
        zstandard.FRAME_HEADER
    )  # and nothing that is skipped
    return is_frame and not zstandard.get_frame_parameters(start).has_checksum


def _decompressor(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes the decompressor of one part, and the error that it raises."""
    if suffix == ".gz":
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    if suffix == ".xz":
        # FORMAT_AUTO would mistake a damaged header for the older format, which has no checksum.
        return (lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ)), lzma.LZMAError
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj, zstandard.ZstdError


def _parts(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Decompress members, frames or streams until the file ends; EOFError if one is altered or cut short."""
    start, damage = _decompressor(suffix)
    data = file.read(READ)
    if not data:
        raise EOFError("the file is empty")
    while data:
        part = start()
        while not part.eof:
            if not data:
                raise EOFError("the last part is cut short")
            try:
                yield part.decompress(data)
            except damage as error:
                raise EOFError(str(error)) from error
            data = b"" if part.eof else file.read(READ)
        data = part.unused_data or file.read(READ)
        if suffix == ".xz":
            data = _without_padding(file, data)


def _without_padding(file: IO[bytes], data: bytes) -> bytes:
    """Return what follows the zeros behind an xz stream; EOFError unless they are a multiple of 4."""
    zeros = 0
    while data.startswith(b"\0"):
        rest = data.lstrip(b"\0")
        zeros += len(data) - len(rest)
        data = rest or file.read(READ)
    if zeros % 4:
        raise EOFError("the padding after a stream is not a multiple of 4 bytes")
    return data
