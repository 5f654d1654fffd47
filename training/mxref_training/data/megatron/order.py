"""The order in which Megatron's GPTDataset takes samples, and its BlendedDataset those of several files.

A sample has `seq_len` + 1 tokens. Three arrays decide the order of one file. The document index holds the numbers of
all sequences, once for each epoch, shuffled. Their tokens, joined in this order, are cut into samples that share one
token with the next; the sample index says where each begins. The shuffle index permutes the samples. A last epoch of
which less than 80 % of the samples are needed is shuffled apart, behind all others. The random numbers are those of
NumPy's RandomState, whose stream is frozen, drawn in this order: documents, documents of an epoch apart, samples,
samples of an epoch apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mxref_training.data.cache import Facts, cached
from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SURPLUS = 0.005  # more samples than its share that Megatron prepares of every file of a blend
_SLOTS = 1 << 22  # entries of the document index that are summed at once


class Epochs(NamedTuple):
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


class Order(NamedTuple):
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

    def build(folder: Path) -> Facts:
        for name, array in make_order(lengths, what, seq_len, seed)._asdict().items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        return {}

    inputs = {
        "lengths": sha256(np.ascontiguousarray(lengths).data).hexdigest(),
        "seq_len": seq_len,
        "seed": seed,
        "epochs": what._asdict(),
    }
    folder, _ = cached("megatron-order", inputs, build)
    return what, Order(*(np.load(folder / f"{name}.npy", "r", allow_pickle=False) for name in Order._fields))


def parse_blend(source: str) -> list[tuple[float, str]]:
    """Return weights and prefixes of `WEIGHT PREFIX WEIGHT PREFIX ...`, separated by spaces; nothing for another form.

    Raises:
        DataError: a weight is not a positive, finite number.
    """
    words = source.split()
    try:
        parts = [(float(weight), prefix) for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    except ValueError:
        return []
    for weight, prefix in parts:
        if not 0 < weight < math.inf:
            raise DataError(
                f"the weight {weight} of {prefix} is not a positive number: leave the file out, or weigh it"
            )
    return parts


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    total: np.float64 = weights.sum()
    return np.divide(weights, total)


def prepared(weights: Sequence[float], samples: int) -> list[int]:
    """Return for each file the number of samples that Megatron prepares for a blend of `samples` samples."""
    each = _normalised(np.array(weights, np.float64)).tolist()
    return [math.ceil(math.ceil(samples * weight) * (1 + SURPLUS)) for weight in each]


def blend_order(weights: Sequence[float], samples: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return for each of the first samples its file, and its number among the samples of that file.

    Each sample comes from the file that is furthest behind its share: for sample i, the one with the largest
    `weight * max(i, 1) - taken`, in float64; the first of equals.

    Returns:
        Two arrays `[samples]`; the order of a longer blend begins with the same entries.
    """
    # Megatron divides by the sum twice, in its builder and in BlendedDataset. The second may change a last bit.
    share = _normalised(_normalised(np.array(weights, np.float64)))
    taken = np.zeros(len(weights))
    file = np.zeros(samples, np.int16)
    number = np.zeros(samples, np.int64)
    for i in range(samples):
        chosen = int((share * max(i, 1) - taken).argmax())
        file[i], number[i] = chosen, taken[chosen]
        taken[chosen] += 1
    return file, number
