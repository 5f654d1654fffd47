"""The files that a source names, and their bytes, decompressed in small pieces.

A compressed file may hold several gzip members (RFC 1952), Zstandard frames (RFC 8878) or xz streams (The .xz File
Format 1.1.0), one after the other. Each must be complete, and nothing may follow the last one. The libraries' own file
readers ignore what follows it, or take a frame that is cut short for its end, and documents would be lost silently.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from mxref_training.errors import DataError

PACKINGS = (".gz", ".zst", ".xz")
SUFFIXES = tuple(stem + packing for stem in (".jsonl", ".json", ".ndjson") for packing in ("", *PACKINGS))
READ = 1 << 16  # bytes that are read at once
_MAX_WINDOW = 1 << 31  # bytes; the largest that `zstd --long=31` writes


def resolve_files(source: str | Path) -> list[Path]:
    """Return the files that a path, a folder or a glob pattern names.

    Args:
        source: a file; a folder, whose JSONL files at any depth are read in the order of their names; or a pattern
            with `*`, `?` or `[`.

    Raises:
        DataError: no file is found, or a folder cannot be read or holds no JSONL file.
    """
    path = Path(source)
    try:
        if path.is_dir():
            found = sorted(_jsonl_below(path))
            problem = f"no JSONL file in the folder {path}: expected names ending in {', '.join(SUFFIXES)}"
        elif not path.exists() and has_magic(str(path)):
            found = sorted(Path(name) for name in glob(str(path), recursive=True) if Path(name).is_file())
            problem = f"no file matches {path}: check the pattern"
        else:
            found = [path] if path.is_file() else []
            problem = f"no such data file: {path}: give a JSONL file, a folder or a pattern"
    except OSError as error:
        raise DataError(
            f"cannot look for data in {error.filename} ({error.strerror}): give a path that can be read"
        ) from error
    if not found:
        raise DataError(problem)
    return found


def _jsonl_below(folder: Path) -> Iterator[Path]:
    """Yield the JSONL files at any depth; OSError for a folder that cannot be read, because its files would be lost."""

    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in names if name.endswith(SUFFIXES))


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
                while data := file.read(READ):
                    yield data
    except PermissionError as error:
        raise DataError(f"no permission to read {path}: ask its owner, or copy it") from error
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {path} ({reason}): the file is damaged or not {path.suffix or 'plain text'}; fetch it again"
        ) from error


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
