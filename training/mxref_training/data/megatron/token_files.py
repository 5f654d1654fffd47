"""Megatron's token files as the training or the validation side of a run, and their batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

_PIECE = 1 << 22  # tokens that are read at once
_AHEAD = 1 << 16  # samples for which the file is chosen at once


class FileFacts(NamedTuple):
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
        documents = counted(sum(file.documents for file in self.files), "document")
        return f"{names}: {documents}, {counted(len(self), 'token')}, SHA-256 {self.sha256[:16]}"

    @property
    def ids(self) -> NDArray[np.integer[Any]]:
        """The tokens of all sequences in the order of the file, `[N]`; DataError for a blend."""
        if len(self.files) > 1:
            names = ", ".join(str(file.prefix) for file in self.files)
            raise DataError(f"the tokens of several files have no common order: name one of {names}")
        return self.files[0].ids

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

    def to_table(self) -> dict[str, Any]:
        """Return the weights and prefixes as JSON values, for another process; `open_tokens` takes them."""
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


def indexed_parts(source: str) -> list[tuple[float, Path]]:
    """Return weights and prefixes if a source names token files: a prefix, one of its files, or a blend; else nothing.

    Raises:
        DataError: a part of a blend is no token file, or a weight is none.
    """
    blend = parse_blend(source)
    found = []
    for weight, name in blend or [(1.0, source)]:
        if prefix := prefix_of(name):
            found.append((weight, prefix))
        elif blend:
            raise DataError(
                f"{name}: no {name}.bin and {name}.idx: a blend is WEIGHT PREFIX WEIGHT PREFIX and so on"
            )
    return found


def open_tokens(parts: Sequence[tuple[float, str | Path]]) -> IndexedTokens:
    """Return the files of weights and prefixes; DataError as of `open_indexed` and `read_facts`."""
    files = tuple(open_indexed(Path(prefix)) for _, prefix in parts)
    return IndexedTokens(tuple(weight for weight, _ in parts), files, tuple(map(read_facts, files)))


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
