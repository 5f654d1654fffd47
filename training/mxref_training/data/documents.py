"""Documents from JSONL files, plain or compressed with gzip, Zstandard or xz; a damaged file is an error."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import IO, cast

from mxref_training.errors import DataError

SUFFIXES = tuple(
    stem + packing for stem in (".jsonl", ".json", ".ndjson") for packing in ("", ".gz", ".zst", ".xz")
)
_CHUNK = 1 << 20
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)

PathLike = str | os.PathLike[str]


def resolve_files(source: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    """Return the files that a path, a folder, a glob pattern or a list of these stands for.

    Args:
        source: a file; a folder, of which every JSONL file at any depth is taken in the order of the names; a
            pattern with `*`, `?` or `[`; or a list of these, whose order is kept.

    Raises:
        DataError: nothing is there, or a folder holds no JSONL file.
    """
    if not isinstance(source, str | os.PathLike):
        files = [file for part in source for file in resolve_files(part)]
        if not files:
            raise DataError("no data files given: name at least one JSONL file")
        return tuple(files)
    path = Path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
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


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress frame by frame; the library's own stream reader takes a truncated frame for a short one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # frames of `zstd --long=31` too
    frame, held = decompressor.decompressobj(), b""
    started = False
    while data := held or file.read(_CHUNK):
        try:
            yield frame.decompress(data)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        started, held = True, b""
        if frame.eof:
            held, started = frame.unused_data, False
            frame = decompressor.decompressobj()
    if started:
        raise EOFError("the last frame is cut short")


def _plain_chunks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(_CHUNK):
        yield data


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces."""
    if path.stat().st_size == 0 and path.suffix in (".gz", ".zst", ".xz"):
        raise EOFError("the file is empty")
    match path.suffix:
        case ".gz":
            with gzip.open(path, "rb") as file:
                yield from _plain_chunks(cast(IO[bytes], file))
        case ".xz":
            with lzma.open(path, "rb") as file:
                yield from _plain_chunks(file)
        case ".zst":
            with path.open("rb") as file:
                yield from _zstd_chunks(file)
        case _:
            with path.open("rb") as file:
                yield from _plain_chunks(file)


def _lines(path: Path) -> Iterator[bytes]:
    rest: list[bytes] = []
    try:
        for chunk in _chunks(path):
            head, newline, tail = chunk.rpartition(b"\n")
            if not newline:
                rest.append(tail)
                continue
            yield from b"".join([*rest, head]).split(b"\n")
            rest = [tail]
    except PermissionError as error:
        raise DataError(f"no permission to read {path}: ask its owner, or copy it") from error
    except _DAMAGE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {path} ({reason}): the file is damaged or not {path.suffix or 'plain text'}; fetch it again"
        ) from error
    yield b"".join(rest)


def _text(line: bytes, where: str) -> str:
    """Return the text of one JSONL line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON in UTF-8 ({error}): correct or remove the line") from error
    if not isinstance(record, dict) or "text" not in record:
        raise DataError(f"{where}: no field 'text': every line must be an object with a 'text' string")
    text = record["text"]
    if not isinstance(text, str):
        raise DataError(f"{where}: 'text' is of type {type(text).__name__}: it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: 'text' holds half a surrogate pair, which is no character") from error
    return text


def iter_documents(source: PathLike | Sequence[PathLike]) -> Iterator[str]:
    """Yield the `text` of every line of JSONL files, in order.

    Blank lines and documents of nothing but white space are passed over. The compression is told by the file
    name: `.gz`, `.zst` or `.xz`, anything else is plain.

    Args:
        source: a file, folder, pattern or list of them, see `resolve_files`.

    Raises:
        DataError: a file is missing, truncated or damaged, a line is not a JSON object with a string `text`
            (the message names file and line), or there is no document at all.
    """
    empty = True
    paths = resolve_files(source)
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            text = _text(line, f"{path}, line {number}")
            if text.strip():
                empty = False
                yield text
    if empty:
        raise DataError(f"no documents in {', '.join(map(str, paths))}: the corpus is empty")


def digest(text: str) -> int:
    """Return the first 8 bytes of the SHA-256 of a document, which stand for it when documents are compared."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Documents:
    """A stream of documents that can be read again, with the facts that one full reading gave.

    Attributes:
        name: where the documents come from.
        documents: number of documents.
        characters: number of characters (code points).
        utf8_bytes: number of bytes in UTF-8, for losses in bits per byte.
        sha256: over every document's UTF-8 text followed by a NUL byte.
    """

    name: str
    documents: int
    characters: int
    utf8_bytes: int
    sha256: str
    _read: Callable[[], Iterable[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return self.documents

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.documents:,} documents, {self.characters:,} characters, "
            f"SHA-256 {self.sha256[:16]}"
        )


def survey(name: str, read: Callable[[], Iterable[str]]) -> Documents:
    """Read a stream of documents once, and return it with its counts and its SHA-256."""
    count = characters = size = 0
    sha = hashlib.sha256()
    for text in read():
        data = text.encode()
        count += 1
        characters += len(text)
        size += len(data)
        sha.update(data + b"\0")
    return Documents(name, count, characters, size, sha.hexdigest(), read)
