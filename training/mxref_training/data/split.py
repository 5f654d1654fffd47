"""The training and the validation documents of a run: what a source names, and how the two sides are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mxref_training.data.builtin import builtin_corpus
from mxref_training.data.documents import MAX_LINE, Documents, digest, iter_documents, survey
from mxref_training.data.files import PathLike, resolve_files, without_checksum
from mxref_training.data.streamed import C4, TRAIN, VALIDATION, fetched, has_validation, parse_stream
from mxref_training.errors import DataError
from mxref_training.wording import counted

BUILTIN = "builtin"
HOLDOUT_SHARE = 0.02  # share of the documents that is held out if no validation data is given
MAX_OVERLAP = 0.01  # share of validation documents found in training from which the split counts as broken

CorpusPaths = PathLike | Sequence[PathLike]


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents that share no document, and what was decided about them."""

    train_docs: Documents
    val_docs: Documents
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join([f"train {self.train_docs}; validation {self.val_docs}", *self.notes])


@dataclass(frozen=True)
class _Source:
    """A named stream of documents."""

    name: str
    files: tuple[Path, ...]
    max_line: int

    def read(self, keep: Callable[[int], bool] | None = None) -> Iterable[str]:
        texts = iter_documents(self.files, max_line=self.max_line)
        return texts if keep is None else (text for text in texts if keep(digest(text)))

    def survey(self, keep: Callable[[int], bool] | None = None, more: str = "") -> Documents:
        return survey(self.name + more, partial(self.read, keep))


def open_corpus(
    train: CorpusPaths,
    val: CorpusPaths | None = None,
    *,
    stream_documents: int = 100_000,
    stream_val_documents: int = 2_000,
    max_line: int = MAX_LINE,
) -> Corpus:
    """Return training and validation documents that have no document in common.

    Args:
        train: `builtin`; a data set of the package `datasets`, fetched and kept in the cache, see
            `streamed.parse_stream`; or JSONL files, see `files.resolve_files`.
        val: the same; None means the validation side of the built-in text, or the split `validation` of a data set
            that has one; otherwise 2 % of the documents are held out by their hash.
        stream_documents: training documents to fetch of a data set.
        stream_val_documents: validation documents to fetch of a data set.
        max_line: longest line of a file in bytes, decompressed.

    Returns:
        Documents that can be read any number of times; as a string, counts and SHA-256 of both sides, and the notes.

    Raises:
        DataError: a source is missing, damaged or empty, a data set cannot be fetched, or 1 % or more of the validation
            documents are in the training data; if fewer are, they are dropped from training, which becomes a note.
    """
    notes: list[str] = []
    if val is None and _has_own_validation(train):
        val = train
    ours = _source(train, "train", stream_documents, max_line, notes)
    if val is None:
        sides = _hold_out(ours, notes)
        read = ours.files
    else:
        theirs = _source(val, "val", stream_val_documents, max_line, notes)
        sides = _separate(ours, theirs, notes)
        read = ours.files + theirs.files
    return Corpus(*sides, (*dict.fromkeys(notes), *_unchecked(read)))


def _has_own_validation(train: CorpusPaths) -> bool:
    """Return whether a source for training has a validation side of its own."""
    if train in (BUILTIN, C4):
        return True
    stream = parse_stream(train)
    return stream is not None and stream.split is None and has_validation(stream)


def _source(source: CorpusPaths, side: str, documents: int, max_line: int, notes: list[str]) -> _Source:
    """Return one side of a corpus; `side` is `train` or `val`."""
    if source == BUILTIN:
        made = builtin_corpus()
        notes.append(made.note)
        return _Source(f"{BUILTIN}-{side}", (made.train if side == "train" else made.val,), max_line)
    if stream := parse_stream(source):
        split = stream.split or (TRAIN if side == "train" else VALIDATION)
        return _Source(f"{stream} {split}", (fetched(stream, split, documents, notes),), max_line)
    files = resolve_files(source)
    return _Source(files[0].name if len(files) == 1 else f"{len(files)} files", files, max_line)


def _hold_out(whole: _Source, notes: list[str]) -> tuple[Documents, Documents]:
    """Split one stream by the hash of its documents, so that equal documents stay on one side."""
    codes = sorted(set(map(digest, whole.read())))
    if len(codes) < 2:
        raise DataError(f"{whole.name} has one document, nothing to validate on: give validation data")
    # The smallest hashes are a random choice that stays nearly the same when documents are added.
    bound = codes[max(1, round(HOLDOUT_SHARE * len(codes))) - 1]
    train = whole.survey(lambda code: code > bound)
    val = whole.survey(lambda code: code <= bound, " (held out)")
    share = val.documents / (train.documents + val.documents)
    notes.append(
        f"no validation data given: held out {counted(val.documents, 'document')} ({share:.1%}) by hash"
    )
    return train, val


def _separate(train: _Source, val: _Source, notes: list[str]) -> tuple[Documents, Documents]:
    """Refuse training data that contains many validation documents; drop them from training if they are few."""
    val_docs = val.survey()
    known = set(map(digest, val_docs))
    common: set[int] = set()

    def is_new(code: int) -> bool:
        if code in known:
            common.add(code)
        return code not in known

    train_docs = train.survey(is_new)
    if common and len(common) >= MAX_OVERLAP * len(known):
        raise DataError(
            f"{len(common):,} of {counted(len(known), 'validation document')} "
            f"{'are' if len(common) > 1 else 'is'} in the training data too: "
            "give validation data that is not in the training data, or none: then some documents are held out"
        )
    if common:
        notes.append(f"dropped {counted(len(common), 'document')} from training: also in validation")
    return train_docs, val_docs


def _unchecked(files: Iterable[Path]) -> list[str]:
    """Return a note on the compressed files that have no checksum."""
    found = [path for path in dict.fromkeys(files) if without_checksum(path)]
    if not found:
        return []
    more = f" and {counted(len(found) - 1, 'other file')}" * (len(found) > 1)
    return [
        f"{found[0]}{more} {'hold' if more else 'holds'} compressed data without a checksum, so damage to it may go "
        "unnoticed: compress with `zstd --check` or `xz --check=crc64`"
    ]
