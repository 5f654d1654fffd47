"""Megatron's token files as the training or the validation side of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.megatron.blend import parse_blend
from mxref_training.data.megatron.facts import Facts, cached_common, read_facts
from mxref_training.data.megatron.index import IndexedFile, open_indexed, prefix_of
from mxref_training.data.megatron.loader import IndexedLoader
from mxref_training.errors import DataError
from mxref_training.wording import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_OVERLAP = 0.01  # share of validation sequences found in training from which the data is refused
_APART = "give validation data that is not in the training data"


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
    facts: tuple[Facts, ...]

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
        return _combined([facts.sha256 for facts in self.facts])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the files that decides the samples: ids, lengths and weights."""
        parts = zip(self.weights, self.facts, strict=True)
        alone = len(self.files) == 1
        return _combined(
            [f"{1.0 if alone else w!r} {f.sha256} {f.lengths_sha256}" for w, f in parts], always=True
        )

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(facts.largest for facts in self.facts)

    def loader(self, seq_len: int, seed: int, samples: int) -> IndexedLoader:
        """Return a loader in Megatron's order for a number of samples; DataError as of `IndexedLoader`."""
        return IndexedLoader(self.files, self.weights, seq_len, seed, samples, self.fingerprint)

    def to_table(self) -> dict[str, Any]:
        """Return the paths and weights as JSON values, for another process."""
        parts = zip(self.weights, self.files, strict=True)
        return {"indexed": [[weight, str(file.prefix.resolve())] for weight, file in parts]}


def _combined(hashes: Sequence[str], always: bool = False) -> str:
    if len(hashes) == 1 and not always:
        return hashes[0]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def indexed_parts(source: str) -> list[tuple[float, Path]] | None:
    """Return weights and prefixes if a source names token files: a prefix, a `.bin` file, or a blend; else None.

    Raises:
        DataError: a part of a blend is no token file, or a weight is none.
    """
    parts = parse_blend(source)
    found = [(weight, prefix_of(name)) for weight, name in parts]
    if len(parts) == 1 and (found[0][1] is None or parts[0][1] == source):
        return None if found[0][1] is None else [(1.0, found[0][1])]
    named = [(weight, prefix) for weight, prefix in found if prefix is not None]
    for (_, name), (_, prefix) in zip(parts, found, strict=True):
        if prefix is None:
            raise DataError(
                f"{name}: no {name}.bin and {name}.idx: a blend is WEIGHT PREFIX WEIGHT PREFIX and so on"
            )
    return named


def open_tokens(parts: Sequence[tuple[float, Path]]) -> IndexedTokens:
    """Return files and what a full reading found, from the cache; DataError as of `open_indexed` and `read_facts`."""
    files = tuple(open_indexed(prefix) for _, prefix in parts)
    return IndexedTokens(tuple(weight for weight, _ in parts), files, tuple(map(read_facts, files)))


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
    pairs = zip(train.files, train.facts, strict=True)
    common = len({n for file, facts in pairs for n in cached_common(file, facts, val.files[0], val.facts[0])})
    total = int(np.count_nonzero(val.files[0].lengths))
    if common and common >= MAX_OVERLAP * total:
        raise DataError(
            f"{common:,} of {counted(total, 'validation sequence')} {'are' if common > 1 else 'is'} in the training "
            f"data too: {_APART}"
        )
    if common:
        return f"{counted(common, 'validation sequence')} stayed in the training data, because its order counts them"
    return ""
