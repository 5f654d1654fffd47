"""A tokenised corpus: one flat array on disk, mapped into memory, every document followed by its end token."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.cache import Facts, cached
from mxref_training.data.documents import Documents, hash_document
from mxref_training.data.progress import progress
from mxref_training.data.tokenizer import TokenIds
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_training.data.tokenizer import Tokenizer

_BATCH = 256  # documents that are encoded together
_BATCH_CHARACTERS = 1 << 22  # characters that fill a batch, so that long documents do not fill the memory


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids.

    Attributes:
        ids: token ids, `[N]`, uint16 if every id fits and uint32 otherwise, read-only.
        sha256: of the ids as little-endian bytes.
    """

    ids: NDArray[np.unsignedinteger[Any]]
    sha256: str

    def __len__(self) -> int:
        return len(self.ids)

    def to_table(self) -> dict[str, str]:
        """Return the file of the tokens as JSON values, for another process."""
        assert isinstance(self.ids, np.memmap)
        return {"path": str(self.ids.filename), "dtype": self.ids.dtype.str, "sha256": self.sha256}

    @classmethod
    def from_table(cls, table: Mapping[str, str]) -> Tokens:
        """Return the tokens that `to_table` described; their file is not hashed again. DataError if it is gone."""
        try:
            return cls(map_tokens(Path(table["path"]), table["dtype"]), table["sha256"])
        except FileNotFoundError as error:  # the user deleted the cache meanwhile
            raise DataError(f"{table['path']} is gone: give the same command again") from error


def tokenize(documents: Documents, tokenizer: Tokenizer | TokenIds) -> Tokens:
    """Return the tokens of documents, each followed by the end token, from the cache if it has them.

    Args:
        documents: one side of a corpus.
        tokenizer: the tokenizer.

    Returns:
        The token array, mapped from disk; the cache has verified its SHA-256.

    Raises:
        DataError: the text changes while it is read, the cached array is damaged, or there is no tokenizer.
    """
    import tokenizers

    if isinstance(tokenizer, TokenIds):
        raise DataError(
            f"{documents.name} is text, but the run's data came as token ids: set data.tokenizer to the tokenizer that "
            "made them"
        )
    dtype = token_dtype(tokenizer.vocab_size).str
    inputs = {
        "documents": documents.sha256,
        "tokenizer": tokenizer.sha256,
        "end": tokenizer.eot,
        "dtype": dtype,
        "tokenizers": tokenizers.__version__,
    }
    folder, facts = cached("tokens", inputs, lambda new: _write(new, documents, tokenizer, dtype))
    return Tokens(map_tokens(folder / "tokens.bin", dtype), facts["sha256"])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest of uint16 and uint32, little-endian, that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def map_tokens(path: Path, dtype: str) -> NDArray[Any]:
    """Return a file of token ids, mapped into memory read-only."""
    return np.memmap(path, np.dtype(dtype), "r")


def _write(folder: Path, documents: Documents, tokenizer: Tokenizer, dtype: str) -> Facts:
    text_sha, token_sha = hashlib.sha256(), hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as file:
        for texts in _batches(documents):
            flat: list[int] = []
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                hash_document(text_sha, text)
                flat += [*ids, tokenizer.eot]
            data = np.array(flat, dtype).tobytes()
            token_sha.update(data)
            file.write(data)
    if text_sha.hexdigest() != documents.sha256:
        raise DataError(f"{documents.name} changed while it was read: leave the files alone and start again")
    return {"sha256": token_sha.hexdigest()}


def _batches(documents: Documents) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in progress(documents, f"tokenising {documents.name}", documents.documents):
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class MappedFile:
    """Watches a file that is mapped into memory: reading beyond the end of a shortened file kills the process (SIGBUS).

    A file that is deleted or replaced stays mapped, and is read on.
    """

    def __init__(self, ids: NDArray[Any]) -> None:
        self._path = ids.filename if isinstance(ids, np.memmap) else None
        self._made = self._state()

    def _state(self) -> tuple[int, ...]:
        """Return inode, size, and time of the last change in ns; nothing if there is no file."""
        try:
            status = os.stat(self._path or "")
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raise DataError if the file was changed in place."""
        found, made = self._state(), self._made
        if found != made and found[:1] == made[:1]:
            raise DataError(
                f"{self._path} was changed while a run read it: it had {made[1]:,} bytes, and has {found[1]:,}: put it "
                "back as it was (delete its folder if that is in the cache), and give the same command, which goes on "
                "from the newest checkpoint"
            )
