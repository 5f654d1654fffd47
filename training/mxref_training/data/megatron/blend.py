"""Several token files in given shares, sample by sample, in the order of Megatron's BlendedDataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SURPLUS = 0.005  # more samples than its share that Megatron prepares of every file
MAX_FILES = 32767  # Megatron numbers them in int16


def parse_blend(source: str) -> list[tuple[float, str]]:
    """Return weights and prefixes of `WEIGHT PREFIX WEIGHT PREFIX ...`, separated by spaces; else the whole, alone.

    Raises:
        DataError: a weight is not a positive, finite number, or there are too many files.
    """
    words = source.split()
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return [(1.0, source)]
    if len(words) < 2 or len(words) % 2:
        return [(1.0, source)]
    for weight, prefix in zip(weights, words[1::2], strict=True):
        if not 0 < weight < math.inf:
            raise DataError(
                f"the weight {weight} of {prefix} is not a positive number: leave the file out, or weigh it"
            )
    if len(weights) > MAX_FILES:
        raise DataError(f"{len(weights):,} files are more than Megatron's {MAX_FILES:,}: merge some")
    return list(zip(weights, words[1::2], strict=True))


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
    # Megatron divides by the sum twice, and the second division may change the last bit.
    share = _normalised(_normalised(np.array(weights, np.float64)))
    taken = np.zeros(len(weights))
    file = np.zeros(samples, np.int16)
    number = np.zeros(samples, np.int64)
    for i in range(samples):
        chosen = int((share * max(i, 1) - taken).argmax())
        file[i], number[i] = chosen, taken[chosen]
        taken[chosen] += 1
    return file, number
