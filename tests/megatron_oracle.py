"""Megatron's order of samples, written down a second time from its description: one number at a time, in lists.

The description is that of `GPTDataset` and `BlendedDataset` in Megatron Core: epochs until there are enough tokens;
document, sample and shuffle index; the last epoch apart below 80 % of its samples; the blend that always takes from
the file furthest behind. Nothing here is shared with the product.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np


def shuffled(items: list[int], state: np.random.RandomState) -> list[int]:
    array = np.array(items, np.int64)
    state.shuffle(array)
    return [int(item) for item in array]


def epochs_for(tokens: int, length: int, wanted: int) -> int:
    epochs = 1
    while epochs * tokens < wanted * length + 1:
        epochs += 1
    return epochs


def last_apart(tokens: int, length: int, wanted: int) -> bool:
    epochs = epochs_for(tokens, length, wanted)
    if epochs == 1:
        return False
    from_last = wanted - floor(Fraction((epochs - 1) * tokens - 1, length))
    return from_last < int(0.80 * floor(Fraction(tokens - 1, length)))


def indices(
    lengths: list[int], length: int, seed: int, wanted: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Return the document index, the sample index and the shuffle index."""
    tokens = sum(lengths)
    epochs, apart = epochs_for(tokens, length, wanted), last_apart(tokens, length, wanted)
    state = np.random.RandomState(seed)
    together = epochs - 1 if apart else epochs
    documents = shuffled([number for _ in range(together) for number in range(len(lengths))], state)
    if apart:
        documents += shuffled(list(range(len(lengths))), state)
    # One pass over all tokens: sample k begins where the last token of sample k - 1 lies.
    samples = [(0, 0)]
    seen = 0
    for slot, number in enumerate(documents):
        for offset in range(lengths[number]):
            if seen and seen % length == 0:
                samples.append((slot, offset))
            seen += 1
    count = (epochs * tokens - 1) // length
    samples = samples[: count + 1]
    first = ((epochs - 1) * tokens - 1) // length if apart else count
    order = shuffled(list(range(first)), state)
    if apart:
        order += shuffled(list(range(first, count)), state)
    return documents, samples, order


def windows(texts: list[list[int]], length: int, seed: int, wanted: int) -> list[list[int]]:
    """Return all samples in the order of use, each `length + 1` tokens."""
    documents, samples, order = indices([len(text) for text in texts], length, seed, wanted)
    found = []
    for number in order:
        slot, offset = samples[number]
        window: list[int] = []
        while len(window) < length + 1:
            window += texts[documents[slot]][offset:][: length + 1 - len(window)]
            slot, offset = slot + 1, 0
        found.append(window)
    return found


def blend(weights: list[float], count: int) -> list[tuple[int, int]]:
    """Return the file of each sample and its number in that file."""
    for _ in range(2):  # as Megatron does; the sum of a short list, in order
        total = float(np.sum(np.array(weights, np.float64)))
        weights = [weight / total for weight in weights]
    taken = [0 for _ in weights]
    found = []
    for place in range(count):
        best, best_error = 0, weights[0] * float(max(place, 1)) - float(taken[0])
        for which in range(1, len(weights)):
            error = weights[which] * float(max(place, 1)) - float(taken[which])
            if error > best_error:
                best, best_error = which, error
        found.append((best, taken[best]))
        taken[best] += 1
    return found


def prepared(weights: list[float], count: int) -> list[int]:
    """Return how many samples of each file a blend prepares."""
    total = float(np.sum(np.array(weights, np.float64)))
    return [ceil(ceil(count * (weight / total)) * 1.005) for weight in weights]


def index_bytes(lengths: list[int], code: int, size: int, boundaries: list[int] | None = None) -> bytes:
    """Return an `.idx` file of sequences of given lengths, whose tokens have `size` bytes each."""
    boundaries = list(range(len(lengths) + 1)) if boundaries is None else boundaries
    data = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
    data += b"".join(struct.pack("<i", length) for length in lengths)
    place = 0
    for length in lengths:
        data += struct.pack("<q", place)
        place += length * size
    return data + b"".join(struct.pack("<q", boundary) for boundary in boundaries)


CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_indexed(prefix: Path, texts: Sequence[Sequence[int]], dtype: Any) -> None:
    """Write sequences as a pair of files, each a document."""
    stored = np.dtype(dtype).newbyteorder("<")
    tokens = np.array([token for text in texts for token in text], stored).tobytes()
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens)
    index = index_bytes([len(text) for text in texts], CODES[stored.name], stored.itemsize)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
