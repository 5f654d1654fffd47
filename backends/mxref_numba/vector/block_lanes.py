"""What a step of quantization computes, on lanes: the amax of its blocks, random integers, and codes of magnitudes.

The scales of amax are in `scale.py`.

Each is the integer operations of the reference on vectors. Their order may be changed, not their results.

Philox4x32-10 has half as many counters in a vector as there are float32. A counter's words live in 64-bit lanes, whose
upper halves hold leftovers: the multiplication reads lower halves only, so a product is at once the new low word and,
shifted, the new high one.

Magnitudes are rounded to the grid of an element: E2M1 by special arithmetic, all others by their numbers. Both leave
the magnitude's code in the low three or seven bits of each lane, under other bits.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from llvmlite import ir

from mxref.formats import E2M1
from mxref_numba.grids import FRACTION_BITS, Grid
from mxref_numba.kernels import FIELD
from mxref_numba.lanes import F32, F64, I16, I32, I64, Lanes, broadcast, constant, load, splat
from mxref_numba.vector.target import lanes_of

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_ROUNDS = 10
_LOW = 0xFFFFFFFF

TOP_VALUE = E2M1.max_value
"""The largest value of E2M1."""
# Between 2^22 and 2^23 the last bit of a float32 is worth a half, above 2^23 one.
_BELOW_TWO = 2.0**23 - 2
_FROM_FOUR = 2.0**23
_EXPONENT_FIELD = 0x7F800000


# ---- the largest magnitude ----


def largest(halves: Sequence[Lanes], k: int) -> Lanes:
    """Return the largest magnitude bits of a step's blocks, one block per group of k / 8 lanes.

    Args:
        halves: eight vectors; a block's k magnitudes are neighbours.
        k: block length.
    """
    lanes, tops, each = halves[0].count, list(halves), k // len(halves)
    while len(tops) > lanes // each:  # two neighbours are of one block
        tops = _pairs_of(tops, lambda a, b: a.call("umax", b))
    distance = lanes // 2
    while (
        distance >= each
    ):  # two neighbours are of two blocks, or of two halves: each keeps its lanes side by side
        low = [2 * distance * group + lane for group in range(lanes // distance) for lane in range(distance)]
        high = [lane + distance for lane in low]
        tops = _pairs_of(tops, partial(_larger_of, low, high))
        distance //= 2
    (top,) = tops
    while distance:
        top = top.call("umax", top.pick([lane ^ distance for lane in range(lanes)]))
        distance //= 2
    return top


def _larger_of(low: list[int], high: list[int], a: Lanes, b: Lanes) -> Lanes:
    return a.pick(low, b).call("umax", a.pick(high, b))


def _pairs_of(vectors: Sequence[Lanes], join: Callable[[Lanes, Lanes], Lanes]) -> list[Lanes]:
    return [join(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


# ---- random integers ----


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


# ---- rounding ----


def round_even(v: Lanes) -> Lanes:
    """Return codes of magnitudes in [0, 6], float32, under RNE, with bit 2 flipped."""
    # One sum rounds to halves while v is below 2, and to ones from there, and its bits count on across 2^23;
    # the other rounds to twos. v / 2 is exact, or too small to matter, so that a fused operation rounds once.
    # Code 0 has bits that end in 100, which keeps ties even and flips bit 2.
    fine, coarse = (v + _BELOW_TWO).cast(I32), v.call("fma", 0.5, _FROM_FOUR).cast(I32)
    return fine.call("umin", coarse)


LINE_UNIT = 2.0 ** (FRACTION_BITS - E2M1.unit_exponent)


def round_by(v: Lanes, random: Lanes) -> Lanes:
    """Return codes of v in [0, 6]: rounded up if the fraction, in units of 2^-22, plus `random` carries."""
    return round_line((v * LINE_UNIT).convert("fptosi", I32), random)


def round_line(line: Lanes, random: Lanes) -> Lanes:
    """Do the same with v times `LINE_UNIT`, rounded down: int32."""
    second = (line >> 1) + (2 << FRACTION_BITS)
    third = (line >> 2) + (4 << FRACTION_BITS)
    position = line.call("umin", second.call("umin", third)) + random
    return position >> FRACTION_BITS


class GridLanes:
    """A `Grid` in every lane, from its address. Each use reads memory: kept in registers, the fields would push others
    out.
    """

    def __init__(self, builder: ir.IRBuilder, address: Any) -> None:
        self._builder, self._address = builder, address
        self.top = self._of("top").cast(F32)
        """The largest magnitude."""

    def _of(self, field: str) -> Lanes:
        place = FIELD * Grid._fields.index(field)
        return broadcast(self._builder, I32, lanes_of(self._builder), self._address, place)

    def round_even(self, v: Lanes) -> Lanes:
        """Return codes of magnitudes up to the largest one, float32, under RNE."""
        binade = (v.cast(I32) & _EXPONENT_FIELD).call("umax", self._of("smallest_normal"))
        # The product is exact. Adding it to v rounds once, to the steps of the binade, with ties to even steps.
        steps = binade.cast(F32).call("fma", self._of("even_unit").cast(F32), v)
        return steps.cast(I32) + (binade >> self._of("step_shift"))

    def round_by(self, v: Lanes, random: Lanes) -> Lanes:
        """Return codes of such magnitudes: rounded up if the fraction, in units of 2^-22, plus `random` carries."""
        bits, smallest = v.cast(I32), self._of("smallest_normal")
        # The position of v if it is below the smallest normal magnitude, else of that magnitude, plus the distance from
        # it.
        low = bits.call("umin", smallest).cast(F32) * self._of("line_unit").cast(F32)
        above = (bits.call("umax", smallest) - smallest) << self._of("position_shift")
        return (low.convert("fptosi", I32) + above + random) >> FRACTION_BITS


# ---- rounding of quotients, by divisors of at most 28 bits ----

_ABOVE = 1 + 2.0**-40
"""By which a midpoint is multiplied that rounds down: times a divisor, it stays below the next float32."""
_STARTS = [
    (low + high) / 2 * (_ABOVE if code % 2 else 1)
    for code, (low, high) in enumerate(pairwise(E2M1.magnitudes), 1)
]
"""From which magnitude on RNE gives the codes 1 to 7 of E2M1."""
_BEYOND = 1 + 2.0**-49
"""Lifts a quotient over an integer that it is: no other one is so near, in 2^16 steps of a gap."""


_ROOT, _NODES, _LEAVES = 4, (6, 2), (7, 5, 3, 1)
"""Codes in a binary tree: from the start of one on, its greater child follows, below it the smaller one."""


def store_starts(divisor: Lanes, place: Any) -> None:
    """Store the magnitudes from which on RNE of a block's quotients gives each code of E2M1, float32: four vectors.

    The first has the roots of the blocks, the second both nodes of each, the other two its four leaves.

    Args:
        divisor: float64, one lane for each block.
        place: where they go, an address.
    """
    builder, size = divisor.builder, 4 * lanes_of(divisor.builder)

    def of(code: int) -> Lanes:
        return (divisor * _STARTS[code - 1]).raised()

    blocks = divisor.count
    pairs = [of(a).pick(range(2 * blocks), of(b)) for a, b in (_NODES, _LEAVES[:2], _LEAVES[2:])]
    of_block = [[block + i * blocks for i in range(4)] for block in range(blocks)]
    nodes = pairs[0].pick([lane for four in of_block for lane in four[:2]])
    leaves = [
        pairs[1].pick([lane for four in some for lane in four], pairs[2])
        for some in (of_block[: blocks // 2], of_block[blocks // 2 :])
    ]
    for i, vector in enumerate([of(_ROOT), nodes, *leaves]):
        vector.store(builder.add(place, ir.Constant(I64, size * i)))


class Starts:
    """The starts of a step's blocks, as `store_starts` stores them."""

    def __init__(self, builder: ir.IRBuilder, place: Any) -> None:
        self._builder, self._place = builder, place
        self._nodes, *self._leaves = (self._vector(i) for i in (1, 2, 3))

    def _vector(self, index: int) -> Lanes:
        lanes = lanes_of(self._builder)
        return load(self._builder, F32, lanes, self._place, 4 * lanes * index)

    def round_even(self, x: Lanes, block: int) -> Lanes:
        """Return the codes of magnitudes of a block, bits of float32, with the low three bits flipped.

        Above them is the number of the block: where a node is among its vectors follows from both.
        """
        root = broadcast(self._builder, I32, x.count, self._place, 4 * block)
        node = constant(self._builder, I32, [block] * x.count).descended(x, root)
        for starts in (self._nodes, self._leaves[4 * block // x.count]):
            node = node.descended(x, starts.at(node).cast(I32))
        return node


def inverse_lines(divisor: Lanes) -> Lanes:
    """Return by what `line` multiplies in place of a division, if 16 bits of a fraction are enough."""
    return constant(divisor.builder, F64, [LINE_UNIT * _BEYOND] * divisor.count) / divisor


def line(x: Lanes, factor: Lanes, *, divides: bool) -> Lanes:
    """Return quotients times `LINE_UNIT`, rounded down, at most the largest code: int32.

    Args:
        x: magnitudes, float32.
        factor: the divisor, or its `inverse_lines`, float64, half as many lanes.
        divides: whether it is the divisor.
    """
    parts = []
    for half in range(0, x.count, factor.count):
        part = x.pick(range(half, half + factor.count)).convert("fpext", F64)
        v = part / factor * LINE_UNIT if divides else part * factor
        top = constant(x.builder, F64, [TOP_VALUE * LINE_UNIT] * factor.count)
        parts.append(v.ordered("<", top).choose(v, top).convert("fptosi", I32))
    return parts[0].pick(range(x.count), parts[1])
