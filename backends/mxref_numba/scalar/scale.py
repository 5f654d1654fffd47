"""Shared scales by integer operations on the bits of amax, as in the reference."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from mxref_numba.compiled import float_of, kernel

MANTISSA = 0x7FFFFF
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
NAN_CODE = np.uint8(255)


@kernel
def block_amax(bits, start, k):
    """Return the largest magnitude bits of bits[start : start + k], int32; NaN is above Inf."""
    top = np.int32(0)
    base = np.uint64(start)
    for j in range(np.uint64(k)):
        top = max(top, np.int32(bits[base + j] & MAGNITUDE))
    return top


@kernel
def code_of_amax(amax, bound, max_exponent):
    """Return the E8M0 code of a block from its finite amax bits, int32 0 to 254.

    `bound` is `bump_above` of the scale rule, `max_exponent` the exponent of the element's largest binade.
    """
    bump = np.int32(np.int32(amax & np.int32(0x7FFFFF)) > np.int32(bound))
    # Float32 and E8M0 have the same bias.
    code = np.int32(np.int32(amax >> np.int32(23)) - np.int32(max_exponent) + bump)
    return min(max(code, np.int32(0)), np.int32(254))


@kernel
def inverse_scale(code):
    """Return 2^-e of an E8M0 code of at most 254, float32, exact: at code 254 it is subnormal."""
    return float_of(max(np.int32(np.int32(np.int32(254) - code) << np.int32(23)), np.int32(1 << 22)))
