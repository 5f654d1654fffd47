"""Random bits: Philox4x32-10, and the counter that assigns random bits to each element.

A random integer depends only on the seed, the optimizer step, the layer, the operand and the element's index
in the global logical tensor. It does not depend on call order, tiling, micro-batches or ranks.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Random123.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.errors import RecipeError
from mxref.steps.rounding import MAX_SR_BITS

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_LIMITS = {"seed": 1 << 64, "step": 1 << 32, "layer": 1 << 24, "operand": 9}

_Words = tuple[Any, Any, Any, Any]
"""Four 32-bit words: Python's integers, or arrays of uint64."""

SIGN_OPERAND = 6
"""Operand id of Fprop's Hadamard signs; Dgrad's is 7 and Wgrad's 8."""


@dataclass(frozen=True)
class Stream:
    """The stream of random bits of one operand: seed, optimizer step, layer and operand.

    Operand ids: 0 Fprop X, 1 Fprop W, 2 Dgrad dY, 3 Dgrad W, 4 Wgrad dY, 5 Wgrad X, and 6, 7, 8 the
    Hadamard signs of Fprop, Dgrad and Wgrad. Fields out of range raise RecipeError.

    Implements: random.stream, random.range
    """

    seed: int
    step: int = 0
    layer: int = 0
    operand: int = 0

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, index(value))
            except TypeError:
                raise RecipeError(f"random stream: {name} must be an integer, got {value!r}") from None
            if not 0 <= value < limit:
                raise RecipeError(f"random stream: {name} = {value} is outside 0 .. {limit - 1}")

    @property
    def word(self) -> int:
        """The 64-bit stream word: step << 32 | layer << 8 | operand."""
        return self.step << 32 | self.layer << 8 | self.operand

    @property
    def role(self) -> int:
        """Index of the GEMM that the operand belongs to: 0 Fprop, 1 Dgrad, 2 Wgrad."""
        return self.operand // 2 if self.operand < SIGN_OPERAND else self.operand - SIGN_OPERAND


def check_operand(stream: Stream) -> Stream:
    """Return the stream unchanged; RecipeError for operand ids 6, 7 and 8, which belong to the signs of a GEMM.

    Implements: random.stream, hadamard.signs
    """
    if stream.operand >= SIGN_OPERAND:
        raise RecipeError(
            f"random stream: operand = {stream.operand} is the stream of a GEMM's Hadamard signs; "
            f"quantize with the id of an operand, 0 .. {SIGN_OPERAND - 1}"
        )
    return stream


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return Philox4x32-10 of each counter.

    Args:
        counter: uint32 [..., 4].
        key: two 32-bit words.

    Returns:
        Random words, uint32 [..., 4].

    Implements: random.philox
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    return np.stack(_rounds((c0, c1, c2, c3), key), axis=-1).astype(np.uint32)


def _rounds(counter: _Words, key: tuple[int, int]) -> _Words:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def stream_words(group: NDArray[np.int64], stream: Stream) -> NDArray[np.uint32]:
    """Return the four random words of each group index g: uint32 [..., 4].

    Implements: random.counter
    """
    g = group.astype(np.uint64)
    words = np.empty((*g.shape, 4), np.uint32)
    for i, word in enumerate(_group_words(g, stream)):
        words[..., i] = word
    return words


def first_bits(count: int, stream: Stream) -> int:
    """Return the first `count` random bits of a stream: bit 32 w + i is bit i of word w, in the order of groups."""
    groups = range(-(-count // 128))
    words: list[int] = [word for group in groups for word in _group_words(group, stream)]
    return sum(word << 32 * i for i, word in enumerate(words)) & (1 << count) - 1


def _group_words(group: Any, stream: Stream) -> _Words:
    """Return the words of a group index, given as a Python integer or an array of uint64."""
    word, seed = int(stream.word), int(stream.seed)  # NumPy integers would overflow
    return _rounds((group & _LOW, group >> 32, word & _LOW, word >> 32), (seed & _LOW, seed >> 32))


def elements_per_call(bits: int) -> int:
    """Return how many consecutive elements share a Philox call: 8 for R <= 16, else 4."""
    return 8 if bits <= 16 else 4


def random_integers(
    rows: NDArray[np.int64], first: int, count: int, length: int, stream: Stream, bits: int
) -> NDArray[np.uint32]:
    """Return the SR integers r in [0, 2^bits) of a rectangle of the global logical tensor.

    Args:
        rows: row indices in the global tensor with its block axis last, int64 [M].
        first: index of the first element along the block axis, a multiple of 8.
        count: number of elements along the block axis, a multiple of 8.
        length: padded global length of the block axis, a multiple of 8.
        stream: the random stream.
        bits: R, 1 to 22.

    Returns:
        uint32 [M, count].

    Implements: random.elements, random.index, random.range
    """
    if not 1 <= bits <= MAX_SR_BITS:
        raise RecipeError(f"sr_bits = {bits} is outside 1 .. {MAX_SR_BITS}")
    per_call = elements_per_call(bits)
    group = (
        rows[:, None] * (length // per_call) + (first + np.arange(0, count, per_call)) // per_call
    )  # [M, G]
    words = stream_words(group, stream)  # [M, G, 4]
    if per_call == 4:
        return words.reshape(len(rows), count) >> np.uint32(32 - bits)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)  # [M, G, 4, 2]
    return halves.reshape(len(rows), count) >> np.uint32(16 - bits)
