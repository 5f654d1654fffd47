"""A prepared corpus, handed to another process as the paths of its cached arrays, so that no text is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxref_training.data.corpus import TokenCorpus
from mxref_training.data.megatron import IndexedTokens, open_tokens
from mxref_training.data.tokenizer import TokenIds, Tokenizer
from mxref_training.data.tokens import Tokens, map_tokens
from mxref_training.errors import DataError


def to_table(corpus: TokenCorpus) -> dict[str, Any]:
    """Return a corpus as JSON values; DataError if its tokens are in no file."""
    sides = {name: side_to_table(getattr(corpus, name)) for name in ("train", "val")}
    rest = {"report": corpus.report, "order_samples": corpus.order_samples}
    return {**sides, "tokenizer": corpus.tokenizer.to_table(), **rest}


def from_table(table: dict[str, Any]) -> TokenCorpus:
    """Return the corpus that `to_table` described.

    The arrays are not hashed again: the process that wrote the table has done so.
    """
    told: dict[str, Any] = table["tokenizer"]
    tokenizer = TokenIds(**told) if "vocab_size" in told else Tokenizer.from_table(told)
    sides = side_from_table(table["train"]), side_from_table(table["val"])
    return TokenCorpus(*sides, tokenizer, table["report"], table["order_samples"])


def side_to_table(tokens: Tokens | IndexedTokens) -> dict[str, Any]:
    """Return tokens as JSON values; DataError if they are in no file."""
    if isinstance(tokens, IndexedTokens):
        return tokens.to_table()
    path = getattr(tokens.ids, "filename", None)
    if path is None:
        raise DataError(
            "these tokens are not in a file, so no other process can read them: prepare_corpus writes one"
        )
    where = {"path": str(path), "dtype": tokens.ids.dtype.str}
    facts = {"documents": tokens.documents, "utf8_bytes": tokens.utf8_bytes, "sha256": tokens.sha256}
    return {**where, **facts}


def side_from_table(side: dict[str, Any]) -> Tokens | IndexedTokens:
    """Return the tokens that `side_to_table` described; DataError if their file is gone."""
    if "indexed" in side:
        return open_tokens([(weight, Path(prefix)) for weight, prefix in side["indexed"]])
    path = Path(side["path"])
    try:
        ids = map_tokens(path, side["dtype"])
    except FileNotFoundError as error:  # the user deleted the cache meanwhile
        raise DataError(f"{path} is gone: give the same command again") from error
    return Tokens(ids, side["documents"], side["utf8_bytes"], side["sha256"])
