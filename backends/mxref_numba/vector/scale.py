"""Shared scales of the blocks of a step, four lanes for each: the integer operations of the reference."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from mxref_numba.vector.lanes import F32, I8, I32, Lanes, splat

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
_NAN_CODE = 255
_LARGEST_CODE = 254
_SMALLEST_INVERSE = 1 << 22
"""Bits of 2^-127, which is subnormal."""


def largest(halves: Sequence[Lanes]) -> Lanes:
    """Return the largest magnitude bits of a step's blocks, one block per group of four lanes.

    Args:
        halves: eight vectors; a block's 32 magnitudes are neighbours.
    """
    lanes, tops = halves[0].count, list(halves)
    while len(tops) > lanes // 4:  # two neighbours are of one block
        tops = _pairs_of(tops, lambda a, b: a.call("umax", b))
    distance = lanes // 2
    while (
        distance >= 4
    ):  # two neighbours are of two blocks, or of two halves: each keeps its lanes side by side
        low = [2 * distance * group + lane for group in range(lanes // distance) for lane in range(distance)]
        high = [lane + distance for lane in low]
        tops = _pairs_of(tops, partial(_larger_of, low, high))
        distance //= 2
    (top,) = tops
    for distance in (2, 1):
        top = top.call("umax", top.pick([lane ^ distance for lane in range(lanes)]))
    return top


def _larger_of(low: list[int], high: list[int], a: Lanes, b: Lanes) -> Lanes:
    return a.pick(low, b).call("umax", a.pick(high, b))


def _pairs_of(vectors: Sequence[Lanes], join: Callable[[Lanes, Lanes], Lanes]) -> list[Lanes]:
    return [join(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def scale_codes(
    amax: Lanes, round_up: Any, zero_scale: Any, max_exponent: Any, *, to_the_end: bool
) -> tuple[Lanes, Lanes, Lanes]:
    """Return E8M0 codes with all policies applied, 2^-e as float32, and which blocks are finite.

    Args:
        amax: magnitude bits.
        round_up: int32; what carries into the exponent exactly when the scale rule bumps it.
        zero_scale: int32; code of a block of zeros.
        max_exponent: int32; exponent of the element's largest binade.
        to_the_end: whether an element's largest binade may be so low that codes reach the last one, 254. The code of
            E2M1 never does, and would lose 4 % of its speed to the two steps that hold it there.
    """
    builder, count = amax.builder, amax.count
    # Float32 and E8M0 have the same bias.
    exponent, top = (amax + splat(builder, round_up, count)) >> 23, splat(builder, max_exponent, count)
    code = exponent.call("umax", top) - top
    code = code.call("umin", _LARGEST_CODE) if to_the_end else code
    inverse = ((code ^ 0xFF) - 1) << 23
    inverse = inverse.call("umax", _SMALLEST_INVERSE) if to_the_end else inverse
    finite = amax.compare("<", INFINITY)
    stored = amax.compare("==", 0).choose(splat(builder, zero_scale, count), code)
    stored = finite.choose(stored, splat(builder, ir.Constant(I32, _NAN_CODE), count))
    return stored, inverse.cast(F32), finite


def store_codes(codes: Lanes, address: Any) -> None:
    """Store the scale codes that `scale_codes` gives for groups of four lanes, as bytes."""
    codes.cast(I8).pick([16 * block for block in range(codes.count // 4)]).store(address)
