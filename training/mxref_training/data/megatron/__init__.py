"""Megatron's token files (`.bin` and `.idx`), in the order in which Megatron takes samples from them."""

from mxref_training.data.megatron.index import IndexedFile, open_indexed
from mxref_training.data.megatron.token_files import (
    IndexedLoader,
    IndexedTokens,
    indexed_parts,
    open_tokens,
)

__all__ = [
    "IndexedFile",
    "IndexedLoader",
    "IndexedTokens",
    "indexed_parts",
    "open_indexed",
    "open_tokens",
]
