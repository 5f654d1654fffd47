"""Philox4x32-10, several counters side by side, and the random integers of consecutive elements."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mxref.philox import Stream
from mxref_numba.compiled import kernel

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW, _HIGH_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def stream_key(stream: Stream | None) -> NDArray[np.uint32]:
    """Return what Philox needs of a stream, uint32 [4]: seed low and high, stream word low and high."""
    seed, word = (stream.seed, stream.word) if stream else (0, 0)
    return np.array([seed & 0xFFFFFFFF, seed >> 32, word & 0xFFFFFFFF, word >> 32], np.uint32)


@kernel
def philox_groups(first_group, groups, key, words):
    """Fill words[4, :groups], uint32, with the four words of each group from `first_group`, uint64, on."""
    for i in range(groups):
        group = np.uint64(first_group + np.uint64(i))
        c0, c1 = np.uint32(group & _LOW), np.uint32(group >> _HIGH_SHIFT)
        c2, c3 = key[2], key[3]
        k0, k1 = key[0], key[1]
        for _ in range(10):
            p0, p1 = np.uint64(np.uint64(c0) * _M0), np.uint64(np.uint64(c2) * _M1)
            c0, c2 = (
                np.uint32(np.uint32(p1 >> _HIGH_SHIFT) ^ np.uint32(c1 ^ k0)),
                np.uint32(np.uint32(p0 >> _HIGH_SHIFT) ^ np.uint32(c3 ^ k1)),
            )
            c1, c3 = np.uint32(p1 & _LOW), np.uint32(p0 & _LOW)
            k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
        words[0, i], words[1, i], words[2, i], words[3, i] = c0, c1, c2, c3


@kernel
def random_integers(row, column, count, length, key, bits, words, out):
    """Fill out[:count], int32, with the integers in [0, 2^bits) of consecutive elements.

    `row` and `column` place the first element in the global tensor, whose padded length is `length`;
    `column`, `count` and `length` are multiples of 8, and `words` is scratch, uint32 [4, >= count / 4].
    """
    per_call = 8 if bits <= 16 else 4
    groups = count // per_call
    first = np.uint64(row) * np.uint64(length // per_call) + np.uint64(column // per_call)
    philox_groups(first, groups, key, words)
    if per_call == 8:
        drop = np.uint32(16 - bits)
        for g in range(groups):
            for w in range(4):
                word = words[w, g]
                out[8 * g + 2 * w] = np.int32(np.uint32(word & np.uint32(0xFFFF)) >> drop)
                out[8 * g + 2 * w + 1] = np.int32(np.uint32(word >> np.uint32(16)) >> drop)
    else:
        drop = np.uint32(32 - bits)
        for g in range(groups):
            for w in range(4):
                out[4 * g + w] = np.int32(words[w, g] >> drop)
