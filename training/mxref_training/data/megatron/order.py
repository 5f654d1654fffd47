"""The order in which Megatron's GPTDataset takes samples of `seq_len` + 1 tokens from sequences of tokens.

Three arrays decide it. The document index holds the numbers of all sequences, once for each epoch, shuffled. Their
tokens, joined in this order, are cut into samples that share one token with the next; the sample index says where each
begins. The shuffle index permutes the samples. A last epoch of which less than 80 % of the samples are needed is
shuffled apart, behind all others. The random numbers are those of NumPy's RandomState, whose stream is frozen.
Section "Megatron's order" in docs/how-to/data.rst defines it in full.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.data.cache import cache_key, cached
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMAT = "megatron-1"
_SLOTS = 1 << 22  # entries of the document index that are summed at once
_FILES = ("documents", "samples", "shuffle")


@dataclass(frozen=True)
class Epochs:
    """The epochs of the data that a number of samples needs.

    Attributes:
        epochs: epochs that hold the samples.
        apart: whether the last epoch is shuffled apart.
        before_last: samples of all epochs but the last one.
        samples: samples of all epochs, at least as many as were wanted.
    """

    epochs: int
    apart: bool
    before_last: int
    samples: int

    def __str__(self) -> str:
        apart = ", the last one apart" if self.apart else ""
        return f"{self.epochs} epoch{'s' * (self.epochs > 1)}{apart}"


def plan(tokens: int, seq_len: int, wanted: int) -> Epochs:
    """Return the epochs that a number of samples needs of data of `tokens` tokens."""
    epochs = max(1, -(-(wanted * seq_len + 1) // tokens))
    before_last = max(0, ((epochs - 1) * tokens - 1) // seq_len)
    of_an_epoch = (tokens - 1) // seq_len
    # As Megatron computes it: the product in float64, then rounded down.
    apart = epochs > 1 and wanted - before_last < int(0.80 * of_an_epoch)
    return Epochs(epochs, apart, before_last, (epochs * tokens - 1) // seq_len)


@dataclass(frozen=True)
class Order:
    """The arrays of one file, under Megatron's names.

    Attributes:
        documents: document index, `[epochs * S]` int32.
        samples: sample index, `[samples + 1, 2]` int64: an entry of the document index, and a token of its sequence.
        shuffle: shuffle index, `[samples]`.
    """

    documents: NDArray[np.int32]
    samples: NDArray[np.int64]
    shuffle: NDArray[np.integer[Any]]


def make_order(lengths: NDArray[np.int32], what: Epochs, seq_len: int, seed: int) -> Order:
    """Return the order of sequences of given lengths, as Megatron builds it."""
    state = np.random.RandomState(seed)
    sequences = np.arange(len(lengths), dtype=np.int32)
    documents = _shuffled(state, np.tile(sequences, what.epochs - what.apart))
    if what.apart:
        documents = np.concatenate([documents, _shuffled(state, sequences)])
    dtype = np.uint32 if what.samples < 2**32 - 2 else np.int64
    first = what.before_last if what.apart else what.samples
    shuffle = _shuffled(state, np.arange(first, dtype=dtype))
    if what.apart:
        shuffle = np.concatenate([shuffle, _shuffled(state, np.arange(first, what.samples, dtype=dtype))])
    return Order(documents, _sample_index(lengths, documents, what.samples, seq_len), shuffle)


def _shuffled(state: np.random.RandomState, array: NDArray[Any]) -> NDArray[Any]:
    state.shuffle(array)
    return array


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], samples: int, seq_len: int
) -> NDArray[np.int64]:
    """Return for each sample the entry of the document index in which its first token lies, and that token's place.

    Sample k begins at token k * seq_len of the joined sequences. The first one begins in entry 0, even if that is an
    empty sequence.
    """
    index = np.zeros((samples + 1, 2), np.int64)
    done, base = 1, 0
    for first in range(0, len(documents), _SLOTS):
        part = lengths[documents[first : first + _SLOTS]].astype(np.int64)
        ends = base + np.cumsum(part)
        last = min(samples, (int(ends[-1]) - 1) // seq_len)  # the last sample that begins in this part
        targets = np.arange(done, last + 1, dtype=np.int64) * seq_len
        slots = np.searchsorted(ends, targets, side="right")
        index[done : last + 1, 0] = first + slots
        index[done : last + 1, 1] = targets - (ends[slots] - part[slots])
        done, base = max(done, last + 1), int(ends[-1])
    return index


def cached_order(lengths: NDArray[np.int32], seq_len: int, seed: int, wanted: int) -> tuple[Epochs, Order]:
    """Return plan and order for a number of samples; the arrays are mapped from the cache, made once.

    Raises:
        DataError: the seed is not below 2^32, as RandomState demands, or the cache cannot be used.
    """
    if not 0 <= seed < 1 << 32:
        raise DataError(
            f"the data seed {seed} is out of range: Megatron's order takes one from 0 to 2^32 - 1; set run.data_seed"
        )
    what = plan(int(lengths.sum(dtype=np.int64)), seq_len, wanted)

    def build(folder: Path) -> None:
        made = make_order(lengths, what, seq_len, seed)
        for name in _FILES:
            np.save(folder / f"{name}.npy", getattr(made, name), allow_pickle=False)

    facts = struct.pack("<5Q", seq_len, seed, what.epochs, what.apart, what.samples)
    key = cache_key(_FORMAT, sha256(np.ascontiguousarray(lengths).data).hexdigest(), facts.hex())
    folder = cached("megatron-order", key, build)
    try:
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _FILES)
        return what, Order(*arrays)
    except (OSError, ValueError) as error:
        raise DataError(f"the cached order in {folder} is damaged ({error}): delete this folder") from error
