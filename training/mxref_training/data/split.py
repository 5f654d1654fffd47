"""The training and the validation documents of a run: what a source names, and how the two sides are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mxref_training.data.builtin import builtin_corpus
from mxref_training.data.documents import Documents, digest, iter_documents, survey
from mxref_training.data.streamed import C4, TRAIN, VALIDATION, fetched, has_validation, parse_stream
from mxref_training.errors import DataError
from mxref_training.wording import counted

BUILTIN = "builtin"
HOLDOUT_SHARE = 0.02  # share of the documents that is held out if no validation data is given
MAX_OVERLAP = 0.01  # share of validation documents found in training from which the split counts as broken

Named = tuple[str, str | Path]
"""Name and path of JSONL."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents that share no document, and what was decided about them."""

    train_docs: Documents
    val_docs: Documents
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join([f"train {self.train_docs}; validation {self.val_docs}", *self.notes])


def open_corpus(
    train: str | Path,
    val: str | Path | None = None,
    *,
    stream_documents: int = 100_000,
    stream_val_documents: int = 2_000,
) -> Corpus:
    """Return training and validation documents that have no document in common.

    Args:
        train: `builtin`; a data set of the package `datasets`, fetched and kept in the cache, see
            `streamed.parse_stream`; or JSONL files, see `files.resolve_files`.
        val: the same; None means the validation side of the built-in text, or the split `validation` of a data set
            that has one; otherwise 2 % of the documents are held out by their hash.
        stream_documents: training documents to fetch of a data set.
        stream_val_documents: validation documents to fetch of a data set.

    Returns:
        Documents that can be read any number of times; as a string, counts and SHA-256 of both sides, and the notes.

    Raises:
        DataError: a source is missing, damaged or empty, a data set cannot be fetched, or 1 % or more of the validation
            documents are in the training data; if fewer are, they are dropped from training, which becomes a note.
    """
    notes: list[str] = []
    if val is None and _has_own_validation(train):
        val = train
    ours = _source(train, TRAIN, stream_documents, notes)
    if val is None:
        sides = _hold_out(*ours)
    else:
        sides = _separate(ours, _source(val, VALIDATION, stream_val_documents, notes), notes)
    return Corpus(*sides, tuple(dict.fromkeys(notes)))


def _has_own_validation(train: str | Path) -> bool:
    if train in (BUILTIN, C4):
        return True
    stream = parse_stream(train)
    return stream is not None and stream.split is None and has_validation(stream)


def _source(source: str | Path, split: str, documents: int, notes: list[str]) -> Named:
    """Return one side of a corpus, `TRAIN` or `VALIDATION`."""
    if source == BUILTIN:
        made = builtin_corpus()
        notes.append(made.note)
        return (f"{BUILTIN}-train", made.train) if split == TRAIN else (f"{BUILTIN}-val", made.val)
    if stream := parse_stream(source):
        split = stream.split or split
        return f"{stream} {split}", fetched(stream, split, documents)
    return Path(source).name or str(source), source


def _read(path: str | Path, keep: Callable[[int], bool]) -> Iterable[str]:
    return (text for text in iter_documents(path) if keep(digest(text)))


def _hold_out(name: str, path: str | Path) -> tuple[Documents, Documents]:
    """Split one source by the hash of its documents, so that equal documents stay on one side."""
    codes = sorted(set(map(digest, iter_documents(path))))
    if len(codes) < 2:
        raise DataError(f"{name} has one document, nothing to validate on: give validation data")
    # The smallest hashes are a random choice that stays nearly the same when documents are added.
    bound = codes[max(1, round(HOLDOUT_SHARE * len(codes))) - 1]
    train = survey(name, partial(_read, path, lambda code: code > bound))
    return train, survey(f"held out of {name}", partial(_read, path, lambda code: code <= bound))


def _separate(train: Named, val: Named, notes: list[str]) -> tuple[Documents, Documents]:
    """Refuse training data that contains many validation documents; drop them from training if they are few."""
    val_docs = survey(val[0], partial(iter_documents, val[1]))
    known = set(map(digest, val_docs))
    common: set[int] = set()

    def is_new(code: int) -> bool:
        if code in known:
            common.add(code)
        return code not in known

    train_docs = survey(train[0], partial(_read, train[1], is_new))
    if common and len(common) >= MAX_OVERLAP * len(known):
        raise DataError(
            f"{len(common):,} of {counted(len(known), 'validation document')} "
            f"{'are' if len(common) > 1 else 'is'} in the training data too: "
            "give validation data that is not in the training data, or none: then some documents are held out"
        )
    if common:
        notes.append(f"dropped {counted(len(common), 'document')} from training: also in validation")
    return train_docs, val_docs
