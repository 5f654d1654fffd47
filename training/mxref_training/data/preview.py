"""A short look at the data of a run, without reading all of it and without writing: for a dry run."""

from __future__ import annotations

from pathlib import Path

from mxref_training.config import DataConfig
from mxref_training.data.corpus import require_indexed_sides
from mxref_training.data.documents import iter_documents
from mxref_training.data.files import resolve_files
from mxref_training.data.megatron import indexed_parts, open_indexed
from mxref_training.data.megatron.token_files import holds_validation
from mxref_training.data.split import BUILTIN
from mxref_training.data.streamed import C4, parse_stream
from mxref_training.data.tokenizer import load_tokenizer, require_vocab_to_train
from mxref_training.errors import DataError


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


def require_readable(data: DataConfig, vocab: int) -> None:
    """Raise the error with which a run would refuse its data or its tokenizer, as far as a short look can find it.

    Every file is opened, and of each side the first document is read, or the index of token files. The tokenizer is
    loaded. Nothing is fetched, and the built-in corpus is not made.

    Args:
        data: the configuration of the data.
        vocab: vocabulary of the model.

    Raises:
        DataError: a file is missing or cannot be read, its first document is damaged, both sides are the same files,
            or the tokenizer cannot be read or has another vocabulary.
        ConfigError: one side names token files and the other does not.
    """
    train, val = indexed_parts(data.train), indexed_parts(data.val) if data.val else None
    if train is not None or val is not None:
        ours, theirs = require_indexed_sides(data, train, val)
        for _, prefix in (*ours, *theirs):
            open_indexed(prefix)
        for _, prefix in ours:
            if prefix.resolve() == theirs[0][1].resolve():
                raise holds_validation(prefix, theirs[0][1])
    else:
        sides = [_files(side, data.max_line_mib << 20) for side in (data.train, data.val) if side]
        if len(sides) > 1 and sides[1] and set(sides[1]) <= set(sides[0]):
            raise DataError(
                f"data.val names {sides[1][0]}, which is in the training data too: give validation data that is not "
                "in the training data, or none: then some documents are held out"
            )
    if data.tokenizer:
        load_tokenizer(data.tokenizer).check_vocab(vocab)
    elif train is None:
        require_vocab_to_train(vocab)


def _files(source: str, max_line: int) -> list[Path]:
    """Return the files of a side of text, each of which can be opened; none if they are made or fetched."""
    if source == BUILTIN or parse_stream(source):
        return []
    files = resolve_files(source)
    for path in files:
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}): ask its owner, or copy it") from error
    next(iter_documents(files, max_line=max_line))
    return [path.resolve() for path in files]
