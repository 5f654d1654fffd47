"""A prepared corpus, handed to another process as the paths of its cached arrays, so that no text is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mxref_training.data.corpus import TokenCorpus
from mxref_training.data.tokenizer import Tokenizer
from mxref_training.data.tokens import Tokens
from mxref_training.errors import DataError


def to_table(corpus: TokenCorpus) -> dict[str, Any]:
    """Return a corpus as JSON values; DataError if its tokens are in no file."""
    sides = {name: side_to_table(getattr(corpus, name)) for name in ("train", "val")}
    return {**sides, "tokenizer": corpus.tokenizer.to_table(), "report": corpus.report}


def from_table(table: dict[str, Any]) -> TokenCorpus:
    """Return the corpus that `to_table` described; DataError if an array is no longer what it was.

    The arrays are not hashed again: the process that wrote the table has done so.
    """
    tokenizer = Tokenizer.from_table(table["tokenizer"])
    return TokenCorpus(
        side_from_table(table["train"]), side_from_table(table["val"]), tokenizer, table["report"]
    )


def side_to_table(tokens: Tokens) -> dict[str, Any]:
    """Return tokens as JSON values; DataError if they are in no file."""
    path = getattr(tokens.ids, "filename", None)
    if path is None:
        raise DataError(
            "these tokens are in no file, so no other process can read them: prepare_corpus makes one"
        )
    facts = {"documents": tokens.documents, "utf8_bytes": tokens.utf8_bytes, "sha256": tokens.sha256}
    return {"path": str(path), "length": len(tokens), **facts}


def side_from_table(side: dict[str, Any]) -> Tokens:
    """Return the tokens that `side_to_table` described; DataError if the array is no longer what it was."""
    path = Path(side["path"])
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if len(ids) != side["length"]:
            raise ValueError(f"it has {len(ids):,} tokens, not {side['length']:,}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the cached tokens in {path} are damaged ({error}): give the same command again"
        ) from error
    return Tokens(ids, side["documents"], side["utf8_bytes"], side["sha256"])
