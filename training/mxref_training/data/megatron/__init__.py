"""Megatron's token files (`.bin` and `.idx`), in the order in which Megatron takes samples from them."""

from mxref_training.data.megatron.index import IndexedFile, open_indexed
from mxref_training.data.megatron.loader import IndexedLoader
from mxref_training.data.megatron.tokens import IndexedTokens, indexed_parts, open_tokens, require_apart
from mxref_training.data.megatron.writer import write_indexed

__all__ = [
    "IndexedFile",
    "IndexedLoader",
    "IndexedTokens",
    "indexed_parts",
    "open_indexed",
    "open_tokens",
    "require_apart",
    "write_indexed",
]
