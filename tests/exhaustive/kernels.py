"""SR in integers, element by element, for random integers that differ from element to element.

There the answer has no steps to search for. These kernels share nothing with what is under test, and are
themselves held to the scalar oracle before any sweep uses them (`elements.formula`).
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined"

from __future__ import annotations

import numba
import numpy as np

import oracle

_MASK = np.uint64(0xFFFFFFFF)


def grid_numbers(element: oracle.Element) -> tuple[int, int, int, int]:
    """What the kernels need of a grid: mantissa bits, the exponent of 1 in its smallest steps, top code and count."""
    return element.mantissa_bits, element.per_one.bit_length() - 1, element.top, element.counts[-1]


@numba.njit(cache=True)
def _lower_and_threshold(magnitude, byte, bits, grid):
    """Return (l, T) of v = |x| / X: the code below and floor(2^R f); (top code, 0) from the largest value on.

    v is m / 2^k smallest steps of the grid, for the 24-bit integer significand m. The grid has 2^(p + 1) codes
    one step apart, and then 2^p codes per binade, each binade's step twice the one before.
    """
    mantissa_bits, per_one, top, largest = grid
    exponent, m = np.int64(magnitude >> 23), np.int64(magnitude & 0x7FFFFF)
    if exponent:
        m += 1 << 23
    k = 150 - per_one - max(exponent, np.int64(1)) + byte - 127
    if k < -16:
        return np.int64(top), np.int64(0)
    if k < 0:
        m, k = m << -k, np.int64(0)
    k = min(k, np.int64(60))  # the shift is cut off where T is 0 anyway
    count = m >> k
    if count >= largest:
        return np.int64(top), np.int64(0)
    doubled = np.int64(0)
    while count >> (doubled + mantissa_bits + 1):
        doubled += 1
    steps = count >> doubled
    rest = m - (steps << (doubled + k))
    return steps + (doubled << mantissa_bits), (rest << bits) >> min(k + doubled, np.int64(63))


@numba.njit(cache=True)
def sr_codes(magnitudes, byte, random, bits, grid, out):
    """Fill `out` with the magnitude codes of flat `magnitudes` (float32 bits) for integers `random`."""
    for i in range(magnitudes.size):
        low, threshold = _lower_and_threshold(magnitudes[i], byte, bits, grid)
        out[i] = low + (threshold + np.int64(random[i]) >= 1 << bits)


@numba.njit(cache=True)
def sr_edge(magnitudes, byte, bits, up, grid, random, out):
    """Fill `random` with the first integer that goes up (`up`) or the last that does not, and `out` with codes.

    Where no integer goes up, because T is 0, the first one is replaced by the largest integer, which stays.
    """
    for i in range(magnitudes.size):
        low, threshold = _lower_and_threshold(magnitudes[i], byte, bits, grid)
        goes_up = up and threshold > 0
        random[i] = (1 << bits) - threshold - (0 if goes_up else 1)
        out[i] = low + goes_up


@numba.njit(cache=True)
def sr_integers(first, key, bits, out):
    """Fill `out` with the integers of elements `first`, a multiple of 8, and on; `key` as four 32-bit words."""
    per_call = 8 if bits <= 16 else 4
    for call in range(out.size // per_call):
        g = np.uint64(first // per_call + call)
        c0, c1, c2, c3 = g & _MASK, g >> np.uint64(32), np.uint64(key[2]), np.uint64(key[3])
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        for _ in range(10):
            left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
            c0, c2 = (right >> np.uint64(32)) ^ c1 ^ k0, (left >> np.uint64(32)) ^ c3 ^ k1
            c1, c3 = right & _MASK, left & _MASK
            k0 = (k0 + np.uint64(0x9E3779B9)) & _MASK
            k1 = (k1 + np.uint64(0xBB67AE85)) & _MASK
        at = call * per_call
        for j, word in enumerate((c0, c1, c2, c3)):
            if per_call == 8:
                out[at + 2 * j] = np.uint32((word & np.uint64(0xFFFF)) >> np.uint64(16 - bits))
                out[at + 2 * j + 1] = np.uint32(word >> np.uint64(32 - bits))
            else:
                out[at + j] = np.uint32(word >> np.uint64(32 - bits))
