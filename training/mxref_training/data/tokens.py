"""A tokenised corpus: one flat array on disk, mapped into memory, every document followed by its end token."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.cache import cache_key, cached
from mxref_training.data.documents import Documents, TextHash
from mxref_training.data.encoding import encoded
from mxref_training.data.progress import progress
from mxref_training.data.token_ids import TokenIds
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_training.data.tokenizer import Tokenizer

_BATCH = 256  # documents that are encoded together
_BATCH_CHARACTERS = 1 << 22  # characters that fill a batch, so that long documents do not fill the memory
_QUIET_BELOW = 20_000_000  # bytes of text; less takes only a few seconds and gets no progress bar
_FORMAT = "1"


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids.

    Attributes:
        ids: token ids, `[N]`, uint16 if every id fits and uint32 otherwise, read-only.
        documents: number of documents, hence of end tokens.
        utf8_bytes: size of the text in UTF-8, for losses in bits per byte.
        sha256: of the ids as little-endian bytes.
    """

    ids: NDArray[np.unsignedinteger[Any]]
    documents: int
    utf8_bytes: int
    sha256: str

    def __len__(self) -> int:
        return len(self.ids)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest of uint16 and uint32, little-endian, that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    """Return the header of an .npy file; NumPy pads it so that its size does not depend on the length."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    )
    return buffer.getvalue()


def _batches(documents: Documents, sha: TextHash) -> Iterator[list[str]]:
    texts = iter(documents)
    if documents.utf8_bytes >= _QUIET_BELOW:
        texts = progress(texts, f"tokenising {documents.name}", documents.documents)
    batch: list[str] = []
    characters = 0
    for text in texts:
        sha.add(text)
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(folder: Path, documents: Documents, tokenizer: Tokenizer, workers: int) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    workers = min(workers, -(-documents.documents // _BATCH))
    text_sha, token_sha, total = TextHash(), hashlib.sha256(), 0
    with (folder / "tokens.npy").open("wb") as file:
        start = file.write(_header(dtype, 0))
        for data in encoded(_batches(documents, text_sha), tokenizer, dtype.str, workers):
            token_sha.update(data)
            file.write(data)
            total += len(data) // dtype.itemsize
        file.seek(0)
        if file.write(_header(dtype, total)) != start:
            raise DataError(f"{total} tokens do not fit the header that was reserved for their number")
    if text_sha.hexdigest() != documents.sha256:
        raise DataError(f"{documents.name} changed while it was read: leave the files alone and start again")
    facts = {
        "documents": documents.documents,
        "utf8_bytes": documents.utf8_bytes,
        "sha256": token_sha.hexdigest(),
    }
    (folder / "tokens.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def tokenize(documents: Documents, tokenizer: Tokenizer | TokenIds, workers: int = 0) -> Tokens:
    """Return the tokens of documents, each followed by the end token, from the cache if it has them.

    Args:
        documents: one side of a corpus.
        tokenizer: the tokenizer; its SHA-256 and that of the text identify the cached array.
        workers: processes that encode; below 2, this process encodes. The tokens are the same.

    Returns:
        The token array, mapped from disk; the cache has verified its SHA-256.

    Raises:
        DataError: the text changes while it is read, the cached array is damaged, there is no tokenizer, or a worker
            failed or died.
    """
    import tokenizers

    if isinstance(tokenizer, TokenIds):
        raise DataError(
            f"{documents.name} is text, but the run's data came as token ids: set data.tokenizer to the tokenizer that "
            "made them"
        )
    key = cache_key(_FORMAT, documents.sha256, tokenizer.sha256, tokenizers.__version__)
    folder = cached("tokens", key, lambda partial: _write(partial, documents, tokenizer, workers))
    try:
        facts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        ids = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)
        tokens = Tokens(ids, int(facts["documents"]), int(facts["utf8_bytes"]), str(facts["sha256"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the cached tokens in {folder} are damaged ({error}): delete this folder") from error
    return tokens


def token_hash(ids: NDArray[Any]) -> str:
    """Return the SHA-256 of an array of token ids as little-endian bytes."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<")).data).hexdigest()
