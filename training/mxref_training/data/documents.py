"""Documents: the texts of JSONL lines, counted and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxref_training.data.files import PathLike, pieces, resolve_files
from mxref_training.errors import DataError
from mxref_training.wording import counted

MAX_LINE = 64 << 20  # bytes of a decompressed line; stops a decompression bomb without line ends


def iter_documents(source: PathLike | Sequence[PathLike], *, max_line: int = MAX_LINE) -> Iterator[str]:
    """Yield the `text` of every line of JSONL files, in order.

    Blank lines and documents of only white space are skipped.

    Args:
        source: a file, folder, pattern or list of them, see `files.resolve_files`.
        max_line: longest line in bytes, decompressed.

    Raises:
        DataError: a file is missing, truncated or damaged, a line is too long or not a JSON object with a string
            `text` (the message names file and line), or there is no document at all.
    """
    return (text for text, _ in iter_labelled(source, max_line=max_line))


def iter_labelled(
    source: PathLike | Sequence[PathLike], *, max_line: int = MAX_LINE
) -> Iterator[tuple[str, str]]:
    """Yield what `iter_documents` yields, each text with the field `source` of its line, or an empty string."""
    empty = True
    paths = resolve_files(source)
    for path in paths:
        for number, line in _lines(path, max_line):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            text, label = _labelled(line, f"{path}, line {number}")
            if text.strip():
                empty = False
                yield text, label
    if empty:
        raise DataError(f"no documents in {', '.join(map(str, paths))}: the corpus is empty")


def _lines(path: Path, max_line: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; no more than one line is held in memory."""
    rest: list[bytes] = []
    number, held = 1, 0
    for piece in pieces(path):
        *ends, tail = piece.split(b"\n")
        for end in ends:
            _require_short(held + len(end), max_line, path, number)
            yield number, b"".join([*rest, end])
            number, rest, held = number + 1, [], 0
        rest.append(tail)
        held += len(tail)
        _require_short(held, max_line, path, number)
    yield number, b"".join(rest)


def _require_short(length: int, limit: int, path: Path, number: int) -> None:
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
