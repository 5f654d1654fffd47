"""Documents from JSONL files, plain or compressed with gzip, Zstandard or xz; a damaged file is an error."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path

from mxref_training.data.packed import PACKINGS, Damaged, pieces
from mxref_training.errors import DataError
from mxref_training.wording import counted

SUFFIXES = tuple(stem + packing for stem in (".jsonl", ".json", ".ndjson") for packing in ("", *PACKINGS))
MAX_LINE = 64 << 20  # bytes of a decompressed line; stops a decompression bomb without line ends

PathLike = str | os.PathLike[str]


def resolve_files(source: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    """Return the files that a path, a folder, a glob pattern or a list of these names.

    Args:
        source: a file; a folder, whose JSONL files at any depth are read in the order of their names; a
            pattern with `*`, `?` or `[`; or a list of these, whose order is kept.

    Raises:
        DataError: no file is found, a path is empty or cannot be read, or a folder holds no JSONL file.
    """
    try:
        return _resolve(source)
    except OSError as error:
        raise DataError(
            f"cannot look for data in {error.filename} ({error.strerror}): give a path that can be read"
        ) from error


def _resolve(source: PathLike | Sequence[PathLike]) -> tuple[Path, ...]:
    if not isinstance(source, str | os.PathLike):
        files = [file for part in source for file in _resolve(part)]
        if not files:
            raise DataError("no data files given: name at least one JSONL file")
        return tuple(files)
    if not os.fspath(source):
        raise DataError("the data path is empty: give a JSONL file, a folder (`.` is this one) or a pattern")
    path = Path(source)
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


def _lines(path: Path, max_line: int, unchecked: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, decompressed, with their numbers; no more than one line is held in memory."""
    rest: list[bytes] = []
    number = 1
    held = 0
    try:
        for piece in pieces(path, unchecked):
            *whole, tail = piece.split(b"\n")
            for end in whole:
                _check_length(held + len(end), max_line, path, number)
                yield number, b"".join([*rest, end])
                number, rest, held = number + 1, [], 0
            rest.append(tail)
            held += len(tail)
            _check_length(held, max_line, path, number)
    except PermissionError as error:
        raise DataError(f"no permission to read {path}: ask its owner, or copy it") from error
    except (Damaged, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {path} ({reason}): the file is damaged or not {path.suffix or 'plain text'}; fetch it again"
        ) from error
    yield number, b"".join(rest)


def _check_length(length: int, limit: int, path: Path, number: int) -> None:
    if length > limit:
        raise DataError(
            f"{path}, line {number}: longer than {limit:,} bytes, decompressed: split the document, or raise "
            "data.max_line_mib if there is memory for it"
        )


def _labelled(line: bytes, where: str) -> tuple[str, str]:
    """Return the text of one JSONL line, and its field `source`, which is empty unless it is a string."""
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
    label = record.get("source")
    return text, label if isinstance(label, str) else ""


def iter_documents(
    source: PathLike | Sequence[PathLike],
    *,
    max_line: int = MAX_LINE,
    unchecked: Callable[[Path], None] = lambda path: None,
) -> Iterator[str]:
    """Yield the `text` of every line of JSONL files, in order.

    Blank lines and documents of only white space are skipped. The file name gives the compression: `.gz`, `.zst` or
    `.xz`; any other file is plain text.

    Args:
        source: a file, folder, pattern or list of them, see `resolve_files`.
        max_line: longest line in bytes, decompressed.
        unchecked: called with each compressed file whose content has no checksum, or not for every part.

    Raises:
        DataError: a file is missing, truncated or damaged, a line is too long or not a JSON object with a string
            `text` (the message names file and line), there is too little memory, or there is no document at all.
    """
    return (text for text, _ in iter_labelled(source, max_line=max_line, unchecked=unchecked))


def iter_labelled(
    source: PathLike | Sequence[PathLike],
    *,
    max_line: int = MAX_LINE,
    unchecked: Callable[[Path], None] = lambda path: None,
) -> Iterator[tuple[str, str]]:
    """Yield what `iter_documents` yields, each text with the field `source` of its line, or an empty string."""
    empty = True
    paths = resolve_files(source)
    for path in paths:
        number = 0
        try:
            for number, line in _lines(path, max_line, partial(unchecked, path)):
                text, label = _document(line, path, number)
                if text.strip():
                    empty = False
                    yield text, label
        except MemoryError as error:
            raise DataError(
                f"{path}: not enough memory near line {max(1, number)}: raise the memory limit, or lower "
                "data.max_line_mib to refuse long lines"
            ) from error
    if empty:
        raise DataError(f"no documents in {', '.join(map(str, paths))}: the corpus is empty")


def _document(line: bytes, path: Path, number: int) -> tuple[str, str]:
    """Return the text of a line and its source; nothing for a blank one."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    return _labelled(line, f"{path}, line {number}") if line.strip() else ("", "")


def digest(text: str) -> int:
    """Return the first 8 bytes of a document's SHA-256; documents are compared by them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class TextHash:
    """SHA-256 over the documents: for each its length (8 bytes, little-endian), then its UTF-8 text.

    With a separator in place of the length, two corpora could share a hash, since a text may contain any character.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, text: str) -> int:
        """Take in the next document, and return its size in bytes."""
        data = text.encode()
        self._sha.update(len(data).to_bytes(8, "little"))
        self._sha.update(data)
        return len(data)

    def hexdigest(self) -> str:
        """Return the hash of the documents so far."""
        return self._sha.hexdigest()


@dataclass(frozen=True)
class Documents:
    """Documents that can be read repeatedly, with counts and a hash from one full reading.

    Attributes:
        name: where the documents come from.
        documents: number of documents.
        characters: number of characters (code points).
        utf8_bytes: number of bytes in UTF-8, for losses in bits per byte.
        sha256: of the texts, as in `TextHash`.
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
            f"{self.name}: {counted(self.documents, 'document')}, {counted(self.characters, 'character')}, "
            f"SHA-256 {self.sha256[:16]}"
        )


def survey(name: str, read: Callable[[], Iterable[str]]) -> Documents:
    """Read a stream of documents once, and return it with its counts and its SHA-256."""
    count = characters = size = 0
    sha = TextHash()
    for text in read():
        count += 1
        characters += len(text)
        size += sha.add(text)
    return Documents(name, count, characters, size, sha.hexdigest(), read)
