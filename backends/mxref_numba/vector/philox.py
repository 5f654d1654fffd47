"""Philox4x32-10 on vectors of counters, and the random integers of consecutive elements.

A vector has half as many counters as float32.

A counter's words live in 64-bit lanes, whose upper halves hold leftovers: the multiplication reads lower
halves only, so a product is at once the new low word and, shifted, the new high one.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from mxref_numba.vector.lanes import I16, I32, I64, Lanes, broadcast, constant, splat
from mxref_numba.vector.target import lanes_of

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def round_table(key: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return what `random_vectors` needs of a key (seed and stream word, four halves): uint64 [2 + 2 * 10].

    The last two words of the counter, then a pair of key words per round.
    """
    rounds = np.arange(_ROUNDS, dtype=np.uint32)[:, None] * np.array(_WEYL, np.uint32)
    return np.concatenate([key[2:], (key[:2] + rounds).reshape(-1)]).astype(np.uint64)


def _philox(group: Lanes, table: list[Lanes]) -> list[Lanes]:
    """Return four words per group index, each in the lower half of its 64-bit lane."""
    c0, c1 = group, group >> 32
    c2, c3, *keys = table
    for k0, k1 in zip(keys[::2], keys[1::2], strict=True):
        p0, p1 = (c0 & _LOW) * _MULTIPLIERS[0], (c2 & _LOW) * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32) ^ c1 ^ k0, (p0 >> 32) ^ c3 ^ k1
        c1, c3 = p1, p0
    return [c0, c1, c2, c3]


def random_vectors(
    builder: ir.IRBuilder, first: Any, key: Any, mask: Any, count: int, per_call: int
) -> list[Lanes]:
    """Return what `round_by` adds to consecutive elements: int32 vectors.

    Args:
        builder: where the code goes.
        first: group index of the first element, int64.
        key: address of a `round_table`.
        mask: int32; the top bits of the 22 of a fraction that are random.
        count: elements, a multiple of what eight calls give.
        per_call: elements that share a Philox call: 8 (16 bits each) or 4 (32 bits each).
    """
    lanes = lanes_of(builder)
    counters = lanes // 2
    # Group in each lane, so that interleaving two words at a time gives groups in order.
    order = [group for pair in range(counters // 2) for group in (pair, pair + counters // 2)]
    table = [broadcast(builder, I64, counters, key, 8 * i) for i in range(2 + 2 * _ROUNDS)]
    kept = splat(builder, mask, lanes)
    vectors = []
    for start in range(0, count // per_call, counters):
        offsets = constant(builder, I64, [start + group for group in order])
        w0, w1, w2, w3 = _philox(splat(builder, first, counters) + offsets, table)
        low, high = ((a & _LOW) | (b << 32) for a, b in ((w0, w1), (w2, w3)))
        for lane in (0, 1):
            pairs = [i for even in range(lane, counters, 2) for i in (even, even + counters)]
            integers = low.pick(pairs, high)  # half of the groups, in order
            if per_call == 4:
                vectors.append((integers.cast(I32) >> 10) & kept)
                continue
            halves = integers.cast(I16)
            parts = (halves.pick(range(part, part + lanes)).convert("zext", I32) for part in (0, lanes))
            vectors.extend((part << 6) & kept for part in parts)
    return vectors
