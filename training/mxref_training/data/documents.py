"""Documents: the texts of JSONL lines, counted and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mxref_training.data.files import pieces, resolve_files
from mxref_training.errors import DataError
from mxref_training.wording import counted


def iter_documents(source: str | Path) -> Iterator[str]:
    """Yield the `text` of every line of JSONL files, in order.

    Blank lines and documents of only white space are skipped.

    Args:
        source: a file, folder or pattern, see `files.resolve_files`.

    Raises:
        DataError: a file is missing, truncated or damaged, a line is not a JSON object with a string `text` (the
            message names file and line), or there is no document at all.
    """
    return (text for text, _ in iter_labelled(source))


def iter_labelled(source: str | Path) -> Iterator[tuple[str, str]]:
    """Yield what `iter_documents` yields, each text with the field `source` of its line, or an empty string."""
    empty = True
    for path in resolve_files(source):
        for number, line in enumerate(_lines(path), 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            text, label = _labelled(line, f"{path}, line {number}")
            if text.strip():
                empty = False
                yield text, label
    if empty:
        raise DataError(f"no documents in {source}: the corpus is empty")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; no more than one line and one piece is held in memory."""
    rest: list[bytes] = []
    for piece in pieces(path):
        first, *more = piece.split(b"\n")
        rest.append(first)
        for start in more:
            yield b"".join(rest)
            rest = [start]
    yield b"".join(rest)


def _labelled(line: bytes, where: str) -> tuple[str, str]:
    """Return the text of one JSONL line, and its field `source`, which is empty unless it is a string."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON in UTF-8 ({error}): correct or remove the line") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: every line must be an object with a string 'text'")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: 'text' holds half a surrogate pair, which is no character") from error
    label = record.get("source")
    return text, label if isinstance(label, str) else ""


def digest(text: str) -> int:
    """Return the first 8 bytes of a document's SHA-256; documents are compared by them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def hash_document(sha: hashlib._Hash, text: str) -> None:
    """Take the next document into the hash of a corpus: its length (8 bytes, little-endian), then its UTF-8 text.

    With a separator in place of the length, two corpora could share a hash, since a text may contain any character.
    """
    data = text.encode()
    sha.update(len(data).to_bytes(8, "little"))
    sha.update(data)


@dataclass(frozen=True)
class Documents:
    """Documents that can be read repeatedly, with counts and a hash from one full reading.

    Attributes:
        name: where the documents come from.
        documents: number of documents.
        characters: number of characters (code points).
        sha256: of the texts, as `hash_document` defines it.
    """

    name: str
    documents: int
    characters: int
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
    count = characters = 0
    sha = hashlib.sha256()
    for text in read():
        count += 1
        characters += len(text)
        hash_document(sha, text)
    return Documents(name, count, characters, sha.hexdigest(), read)
