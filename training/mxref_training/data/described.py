"""Describes the data and the tokenizer of a configuration in words, without reading any data."""

from __future__ import annotations

from mxref_training.config import DataConfig
from mxref_training.data.megatron import indexed_parts
from mxref_training.data.sources import BUILTIN
from mxref_training.data.streamed import C4, parse_stream


def described(data: DataConfig, vocab: int) -> tuple[str, str]:
    """Return where the tokens of a run come from, and which tokenizer makes them.

    Args:
        data: the configuration of the data.
        vocab: vocabulary of the model.

    Raises:
        DataError: a source cannot be understood.
    """
    indexed = indexed_parts(data.train) is not None
    if data.train in (BUILTIN, C4):
        own = "its own validation side"
    elif parse_stream(data.train):
        own = "its split `validation`, or documents held out of it"
    else:
        own = "documents held out of it"
    made = "none: the data is token ids" if indexed else f"BPE of {vocab:,} tokens, trained on the data"
    fetched = any(parse_stream(side) for side in (data.train, data.val) if side)
    later = "; fetched when the run begins" if fetched else ""
    return f"{data.train}, validated on {data.val or own}{later}", data.tokenizer or made
