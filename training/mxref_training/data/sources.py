"""A corpus from the built-in text, a streamed data set, or JSONL files, its training and validation documents apart."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mxref_training.data.builtin import builtin_corpus
from mxref_training.data.documents import (
    MAX_LINE,
    Documents,
    PathLike,
    digest,
    iter_documents,
    resolve_files,
    survey,
)
from mxref_training.data.streamed import C4, TRAIN, VALIDATION, fetched, has_validation, parse_stream
from mxref_training.errors import DataError
from mxref_training.wording import counted

BUILTIN = "builtin"
HOLDOUT_SHARE = 0.02  # share of the documents that is held out if no validation data is given
MAX_OVERLAP = 0.01  # share of validation documents found in training from which the split counts as broken

CorpusPaths = PathLike | Sequence[PathLike]


@dataclass(frozen=True)
class CorpusReport:
    """The training and validation documents of a run, in numbers.

    Attributes:
        train: training documents with counts and SHA-256.
        val: validation documents with counts and SHA-256.
        dropped: training documents left out because validation has the same ones.
        notes: decisions that were made for the user, one sentence each.
    """

    train: Documents
    val: Documents
    dropped: int = 0
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        text = f"train {self.train}; validation {self.val}"
        return "; ".join([text, *self.notes])


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents that share no document, and the report on them."""

    train_docs: Documents
    val_docs: Documents
    report: CorpusReport


@dataclass(frozen=True)
class _Reader:
    """A named stream of documents, optionally without some of them."""

    name: str
    source: CorpusPaths
    max_line: int
    unchecked: dict[Path, None] = field(default_factory=dict)
    """The files without a checksum among those read so far, in the order of reading."""

    def __call__(self) -> Iterator[str]:
        return iter_documents(
            self.source, max_line=self.max_line, unchecked=lambda path: self.unchecked.setdefault(path)
        )

    def only(self, keep: Callable[[int], bool]) -> Callable[[], Iterable[str]]:
        return lambda: (text for text in self() if keep(digest(text)))

    def note(self) -> list[str]:
        """Return a note about files without a checksum, after the files were read."""
        if not self.unchecked:
            return []
        more = f" and {counted(len(self.unchecked) - 1, 'other file')}" * (len(self.unchecked) > 1)
        hold = "hold" if more else "holds"
        return [
            f"{next(iter(self.unchecked))}{more} {hold} compressed data without a checksum, so damage to it may go "
            "unnoticed: compress with `zstd --check` or `xz --check=crc64`"
        ]


def _reader(source: CorpusPaths, side: str, documents: int, max_line: int, notes: list[str]) -> _Reader:
    """Resolve one side of a corpus; `side` is `train` or `val`."""
    if source == BUILTIN:
        corpus = builtin_corpus()
        if (note := str(corpus.report)) not in notes:
            notes.append(note)
        return _Reader(f"{BUILTIN}-{side}", corpus.train if side == "train" else corpus.val, max_line)
    if stream := parse_stream(source):
        split = stream.split or (TRAIN if side == "train" else VALIDATION)
        return _Reader(f"{stream} {split}", fetched(stream, split, documents, notes), max_line)
    files = resolve_files(source)
    return _Reader(files[0].name if len(files) == 1 else f"{len(files)} files", files, max_line)


def _hold_out(whole: _Reader, notes: list[str]) -> tuple[Documents, Documents]:
    """Split one stream by the hash of its documents, so that equal documents stay on one side."""
    codes = sorted(set(array("Q", map(digest, whole()))))
    if len(codes) < 2:
        raise DataError(f"{whole.name} has one document, nothing to validate on: give validation data")
    # The smallest hashes are a random choice that stays nearly the same when documents are added.
    bound = codes[max(1, round(HOLDOUT_SHARE * len(codes))) - 1]
    train = survey(whole.name, whole.only(lambda code: code > bound))
    val = survey(f"{whole.name} (held out)", whole.only(lambda code: code <= bound))
    share = val.documents / (train.documents + val.documents)
    notes.append(
        f"no validation data given: held out {counted(val.documents, 'document')} ({share:.1%}) by hash"
    )
    return train, val


def _separate(train: _Reader, val: _Reader, notes: list[str]) -> tuple[Documents, Documents, int]:
    """Refuse training data that contains many validation documents; drop them from training if they are few."""
    val_docs = survey(val.name, val)
    known = set(map(digest, val_docs))
    common: set[int] = set()

    def is_new(code: int) -> bool:
        if code in known:
            common.add(code)
        return code not in known

    train_docs = survey(train.name, train.only(is_new))
    if common and len(common) >= MAX_OVERLAP * len(known):
        raise DataError(
            f"{len(common):,} of {counted(len(known), 'validation document')} "
            f"{'are' if len(common) > 1 else 'is'} in the training data too: "
            "give validation data that is not in the training data, or none: then some documents are held out"
        )
    if common:
        notes.append(f"dropped {counted(len(common), 'document')} from training: also in validation")
    return train_docs, val_docs, len(common)


def _has_own_validation(train: CorpusPaths) -> bool:
    """Return whether a source for training has a validation side of its own."""
    if train in (BUILTIN, C4):
        return True
    stream = parse_stream(train)
    return stream is not None and stream.split is None and has_validation(stream)


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
            `streamed.parse_stream`; or JSONL files, see `documents.resolve_files`.
        val: the same; None means the validation side of the built-in corpus, or the split `validation` of a data set
            that has one; otherwise 2 % of the documents are held out by their hash.
        stream_documents: training documents to fetch of a data set.
        stream_val_documents: validation documents to fetch of a data set.
        max_line: longest line of a file in bytes, decompressed.

    Returns:
        Documents that can be read any number of times, and a report with counts and SHA-256 of both sides.

    Raises:
        DataError: a source is missing, damaged or empty, a data set cannot be fetched, or 1 % or more of the validation
            documents are in the training data; if fewer are, they are dropped from training and counted in the report.
    """
    notes: list[str] = []
    if val is None and _has_own_validation(train):
        val = train
    train_reader = _reader(train, "train", stream_documents, max_line, notes)
    dropped = 0
    if val is None:
        train_docs, val_docs = _hold_out(train_reader, notes)
        notes += train_reader.note()
    else:
        val_reader = _reader(val, "val", stream_val_documents, max_line, notes)
        train_docs, val_docs, dropped = _separate(train_reader, val_reader, notes)
        notes += [*train_reader.note(), *val_reader.note()]
    return Corpus(train_docs, val_docs, CorpusReport(train_docs, val_docs, dropped, tuple(notes)))
