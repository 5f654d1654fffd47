"""Megatron's token files as the training or the validation side of a run, and their batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.batches import SampleLoader, pair_of
from mxref_training.data.cache import Facts, cached
from mxref_training.data.megatron.index import IndexedFile, beside, open_indexed, prefix_of
from mxref_training.data.megatron.order import blend_order, cached_order, parse_blend, prepared
from mxref_training.data.progress import progress
from mxref_training.data.tokens import MappedFile
from mxref_training.errors import DataError
from mxref_training.wording import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_training.data.batches import Pair

MAX_OVERLAP = 0.01  # share of validation sequences found in training from which the data is refused
_APART = "give validation data that is not in the training data"
_PIECE = 1 << 22  # tokens that are read at once
_AHEAD = 1 << 16  # samples for which the file is chosen at once


@dataclass(frozen=True)
class FileFacts:
    """The facts about a file after one full reading.

    Attributes:
        sha256: of the token ids as they are stored.
        lengths_sha256: of the lengths of the sequences, which decide the order too.
        largest: the largest token id.
    """

    sha256: str
    lengths_sha256: str
    largest: int


@dataclass(frozen=True)
class IndexedTokens:
    """Token ids in Megatron's files, one or a blend of several.

    Attributes:
        weights: weight of each file.
        files: the files, mapped into memory.
        facts: what a full reading of each file found.
    """

    weights: tuple[float, ...]
    files: tuple[IndexedFile, ...]
    facts: tuple[FileFacts, ...]

    def __len__(self) -> int:
        return sum(len(file.ids) for file in self.files)

    def __str__(self) -> str:
        names = " + ".join(file.prefix.name for file in self.files)
        counts = f"{counted(self.documents, 'document')}, {counted(len(self), 'token')}"
        return f"{names}: {counts}, SHA-256 {self.sha256[:16]}"

    @property
    def ids(self) -> NDArray[np.integer[Any]]:
        """The tokens of all sequences in the order of the file, `[N]`; DataError for a blend."""
        if len(self.files) > 1:
            names = ", ".join(str(file.prefix) for file in self.files)
            raise DataError(f"the tokens of several files have no common order: name one of {names}")
        return self.files[0].ids

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(file.documents for file in self.files)

    @property
    def sha256(self) -> str:
        """SHA-256 of the ids of one file as they are stored; of a blend, of these hashes."""
        hashes = [facts.sha256 for facts in self.facts]
        return hashes[0] if len(hashes) == 1 else _sha256(" ".join(hashes))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the files that decides the samples: ids, lengths and weights."""
        weights = self.weights if len(self.files) > 1 else (1.0,)
        parts = zip(weights, self.facts, strict=True)
        return _sha256(" ".join(f"{w!r} {f.sha256} {f.lengths_sha256}" for w, f in parts))

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(facts.largest for facts in self.facts)

    def loader(self, seq_len: int, seed: int, samples: int) -> IndexedLoader:
        """Return a loader in Megatron's order for a number of samples; DataError as of `IndexedLoader`."""
        return IndexedLoader(self, seq_len, seed, samples)

    def to_table(self) -> dict[str, Any]:
        """Return the paths and weights as JSON values, for another process."""
        parts = zip(self.weights, self.files, strict=True)
        return {"indexed": [[weight, str(file.prefix.resolve())] for weight, file in parts]}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class IndexedLoader(SampleLoader):
    """The samples that Megatron's GPTDataset gives, or its BlendedDataset for several files, one after the other.

    Args:
        tokens: the token files; the weight of a single file means nothing.
        seq_len: tokens that are predicted per sample.
        seed: Megatron's `random_seed`, from 0 to 2^32 - 1.
        samples: samples that the order is made for, as of Megatron: its training steps times its global batch.

    Raises:
        DataError: as of `cached_order`.
    """

    def __init__(self, tokens: IndexedTokens, seq_len: int, seed: int, samples: int) -> None:
        self.seq_len, self.seed, self.fingerprint = seq_len, seed, tokens.fingerprint
        self._files, self._weights = tokens.files, tokens.weights
        self._mapped = [MappedFile(file.ids) for file in self._files]
        wanted = [samples] if len(self._files) == 1 else prepared(self._weights, samples)
        made = [
            cached_order(file.lengths, seq_len, seed, n) for file, n in zip(self._files, wanted, strict=True)
        ]
        self._orders = [order for _, order in made]
        self.order = "; ".join(str(what) for what, _ in made)
        self.windows = samples
        self._blend: tuple[NDArray[np.int16], NDArray[np.int64]] | None = None

    def take(self, samples: list[int]) -> Pair:
        """Return inputs and targets of samples that are numbered from the start of the run."""
        if samples[-1] >= self.windows:
            raise DataError(
                f"sample {samples[-1] + 1:,} is beyond the {self.windows:,} that Megatron's order was made for: set "
                "data.order_samples to the samples of the whole run"
            )
        for file in self._mapped:
            file.require_unchanged()
        return pair_of(np.stack([self._window(*self._place(sample)) for sample in samples]))

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the file of a sample, and its number among the samples of that file."""
        if len(self._files) == 1:
            return 0, sample
        if self._blend is None or sample >= len(self._blend[0]):
            self._blend = blend_order(self._weights, min(self.windows, 2 * sample + _AHEAD))
        return int(self._blend[0][sample]), int(self._blend[1][sample])

    def _window(self, which: int, number: int) -> NDArray[np.int64]:
        """Return the `seq_len + 1` tokens of a sample."""
        file, order = self._files[which], self._orders[which]
        slot, offset = order.samples[order.shuffle[number]]
        window = np.empty(self.seq_len + 1, np.int64)
        filled = 0
        while filled <= self.seq_len:
            sequence = order.documents[slot]
            first = file.starts[sequence] + offset
            part = file.ids[first : min(file.starts[sequence + 1], first + self.seq_len + 1 - filled)]
            window[filled : filled + len(part)] = part
            filled += len(part)
            slot, offset = slot + 1, 0
        return window


def indexed_parts(source: str) -> list[tuple[float, Path]] | None:
    """Return weights and prefixes if a source names token files: a prefix, a `.bin` file, or a blend; else None.

    Raises:
        DataError: a part of a blend is no token file, or a weight is none.
    """
    parts = parse_blend(source) or [(1.0, source)]
    found = [(weight, prefix_of(name)) for weight, name in parts]
    if len(parts) == 1 and found[0][1] is None:
        return None
    for (_, name), (_, prefix) in zip(parts, found, strict=True):
        if prefix is None:
            raise DataError(
                f"{name}: no {name}.bin and {name}.idx: a blend is WEIGHT PREFIX WEIGHT PREFIX and so on"
            )
    return [(weight, prefix) for weight, prefix in found if prefix is not None]


def open_tokens(parts: Sequence[tuple[float, Path]]) -> IndexedTokens:
    """Return files and what a full reading found, from the cache; DataError as of `open_indexed` and `read_facts`."""
    files = tuple(open_indexed(prefix) for _, prefix in parts)
    return IndexedTokens(tuple(weight for weight, _ in parts), files, tuple(map(read_facts, files)))


# ---- what one full reading of a file finds


def read_facts(file: IndexedFile) -> FileFacts:
    """Return the facts of a file, from the cache if the file is the one that was read.

    A file is taken for the same while path, size, times of change and inode are the same, so that hundreds of gigabytes
    are read in full only once.

    Raises:
        DataError: an id is negative, or the cache cannot be used.
    """
    path = beside(file.prefix, ".bin")
    status = path.stat()
    lengths = hashlib.sha256(np.ascontiguousarray(file.lengths).data).hexdigest()
    inputs = {
        "path": str(path.resolve()),
        # Not the device: a network file system has another number on each host, and after each boot.
        "state": [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns],
        "dtype": file.ids.dtype.str,
        "lengths": lengths,
    }
    _, found = cached("megatron-facts", inputs, lambda _: _read(file))
    return FileFacts(found["sha256"], lengths, found["largest"])


def _read(file: IndexedFile) -> Facts:
    sha, largest = hashlib.sha256(), 0
    starts = range(0, len(file.ids), _PIECE)
    for first in progress(starts, f"reading {file.prefix.name}.bin", len(starts)):
        piece = file.ids[first : first + _PIECE]
        sha.update(np.ascontiguousarray(piece).data)
        if (lowest := int(piece.min())) < 0:
            place = first + int(piece.argmin())
            raise DataError(f"{file.prefix}.bin: token {place:,} is {lowest}: ids must not be negative")
        largest = max(largest, int(piece.max()))
    return {"sha256": sha.hexdigest(), "largest": largest}


# ---- training and validation data apart


def holds_validation(train: Path, val: Path) -> DataError:
    """Return the error for a training file that has the tokens of the validation file."""
    return DataError(f"{train} holds the tokens of the validation data {val}: {_APART}")


def require_apart(train: IndexedTokens, val: IndexedTokens) -> str:
    """Return a note on the sequences that both sides have, if there are few; empty if there are none.

    Raises:
        DataError: the files are the same, or 1 % or more of the validation sequences are in the training data.
    """
    for file, facts in zip(train.files, train.facts, strict=True):
        if facts.sha256 == val.facts[0].sha256:
            raise holds_validation(file.prefix, val.files[0].prefix)
    common = len(
        {n for part in zip(train.files, train.facts, strict=True) for n in _cached_common(*part, val)}
    )
    total = int(np.count_nonzero(val.files[0].lengths))
    if common and common >= MAX_OVERLAP * total:
        raise DataError(
            f"{common:,} of {counted(total, 'validation sequence')} {'are' if common > 1 else 'is'} in the training "
            f"data too: {_APART}"
        )
    if common:
        return f"{counted(common, 'validation sequence')} stayed in the training data, because its order counts them"
    return ""


def _cached_common(file: IndexedFile, facts: FileFacts, val: IndexedTokens) -> list[int]:
    """Return `common_sequences`, from the cache if the files are known."""
    sides = ((file, facts), (val.files[0], val.facts[0]))
    inputs = {
        name: [side.ids.dtype.str, known.sha256, known.lengths_sha256]
        for name, (side, known) in zip(("train", "val"), sides, strict=True)
    }
    _, found = cached("megatron-common", inputs, lambda _: {"common": common_sequences(file, val.files[0])})
    common: list[int] = found["common"]
    return common


def common_sequences(train: IndexedFile, val: IndexedFile) -> list[int]:
    """Return the sequences of the validation file that are in the training file too; of equal ones, the first.

    Keys choose the candidates, which are then compared token by token.
    """
    candidates = np.flatnonzero(np.isin(_keys(train), _keys(val)))
    if not len(candidates):
        return []
    known = {_digest(val, int(number)): int(number) for number in np.flatnonzero(val.lengths)[::-1]}
    numbers = np.flatnonzero(train.lengths)[candidates]
    found = {known.get(_digest(train, int(number))) for number in numbers}
    return sorted(number for number in found if number is not None)


def _keys(file: IndexedFile) -> NDArray[np.uint64]:
    """Return a key for each sequence that is not empty, from its length and four of its tokens."""
    lengths = file.lengths.astype(np.int64)
    first = file.starts[:-1][lengths > 0]
    lengths = lengths[lengths > 0]
    key = lengths.astype(np.uint64)
    odd = np.uint64(0x9E3779B97F4A7C15)
    for quarter in range(4):
        token = file.ids[first + (lengths - 1) * quarter // 3].astype(np.uint64)
        key = (key ^ token) * odd  # wraps; an odd factor keeps keys of one length apart
        key ^= key >> np.uint64(29)
    return key


def _digest(file: IndexedFile, number: int) -> bytes:
    ids = file.ids[file.starts[number] : file.starts[number + 1]].astype("<i8")
    return hashlib.sha256(ids.tobytes()).digest()
