"""Shared scales of four blocks at once: the integer operations of the reference on lanes."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from mxref_numba.vector.lanes import F32, I8, I32, Lanes, splat

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
_NAN_CODE = 255


def largest(halves: Sequence[Lanes]) -> Lanes:
    """Return the largest magnitude bits of four blocks, one block per group of four lanes.

    Args:
        halves: a block's 32 magnitudes are two neighbouring vectors of 16.
    """
    tops = [a.call("umax", b) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    low, high = (a.pick([*range(8), *range(16, 24)], b).call("umax", a.pick([*range(8, 16), *range(24, 32)], b))
                 for a, b in (tops[:2], tops[2:]))  # fmt: skip
    quarters = [lane + quarter for quarter in (0, 8, 16, 24) for lane in range(4)]
    top = low.pick(quarters, high).call("umax", low.pick([lane + 4 for lane in quarters], high))
    for distance in (2, 1):
        top = top.call("umax", top.pick([lane ^ distance for lane in range(16)]))
    return top


def scale_codes(amax: Lanes, round_up: Any, zero_scale: Any, max_exponent: Any) -> tuple[Lanes, Lanes, Lanes]:
    """Return E8M0 codes with all policies applied, 2^-e as float32, and which blocks are finite.

    Args:
        amax: magnitude bits.
        round_up: int32; what carries into the exponent exactly when the scale rule bumps it.
        zero_scale: int32; code of a block of zeros.
        max_exponent: int32; exponent of the element's largest binade.
    """
    builder, count = amax.builder, amax.count
    # Float32 and E8M0 have the same bias.
    exponent, top = (amax + splat(builder, round_up, count)) >> 23, splat(builder, max_exponent, count)
    code = exponent.call("umax", top) - top
    inverse = ((code ^ 0xFF) - 1) << 23
    finite = amax.compare("<", INFINITY)
    stored = amax.compare("==", 0).choose(splat(builder, zero_scale, count), code)
    stored = finite.choose(stored, splat(builder, ir.Constant(I32, _NAN_CODE), count))
    return stored, inverse.cast(F32), finite


def store_codes(codes: Lanes, address: Any) -> None:
    """Store the four scale codes that `scale_codes` gives for four blocks, as bytes."""
    word = codes.cast(I8).pick([0, 16, 32, 48]).cast(I32)
    word.store(address)
