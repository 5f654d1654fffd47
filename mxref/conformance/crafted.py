"""Crafted blocks: inputs at which quantizers are known to go wrong, the same on every run.

Drawn data hits a tie once in millions of elements. These blocks hold every tie and its neighbours at many
shared scales, every exponent of amax with the mantissas at which a scale rule turns, zeros, subnormals, NaN,
Inf and the largest finite values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mxref.formats import E2M1, MXFP4
from mxref.scale import INFINITY_BITS

K = MXFP4.k
SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of the E2M1 grid."""
TURNS = (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x7FFFF0, 0x7FFFFF)
"""Mantissas at or beside a power of two and 1.5 and 1.75 times it; 0x7ffff0 is where a float32 log2 still rounds up."""
NAN_PAYLOADS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)

Bits = NDArray[np.uint32]
Rows = list[tuple[str, Bits]]


@dataclass(frozen=True)
class Crafted:
    """Named blocks."""

    names: tuple[str, ...]
    x: NDArray[np.float32]
    """[N, 32], read-only."""


@cache
def crafted_blocks(full: bool = True) -> Crafted:
    """Return the crafted blocks; without `full`, those at every sixteenth exponent and at all the edges."""
    rng = np.random.default_rng(31)
    exponents = range(-127, 126) if full else (-127, -126, -125, -110, -64, -1, 0, 1, 64, 100, 124, 125)
    biased = (
        range(255) if full else sorted({*range(4), *range(7, 255, 16), 126, 127, 128, 129, 252, 253, 254})
    )
    rows = [*_special(rng), *_ties(rng, exponents), *_saturating(rng, exponents), *_amax(rng, biased)]
    x = np.stack([bits for _, bits in rows]).view(np.float32)
    x.flags.writeable = False
    return Crafted(tuple(name for name, _ in rows), x)


def near(values: NDArray[np.float64], distance: int = 1) -> Bits:
    """Return the float32 bits of positive values and of their neighbours up to `distance` ulps away."""
    steps = np.arange(-distance, distance + 1)
    with np.errstate(over="ignore"):  # Inf, whose neighbour below is the largest finite value
        bits = values.astype(np.float32).view(np.uint32).astype(np.int64)[:, None] + steps
    out: Bits = np.clip(bits, 0, FLT_MAX).astype(np.uint32).ravel()
    return out


def fill(rng: np.random.Generator, members: Bits) -> Bits:
    """Return a block of all `members` (32 at most) and draws from them, shuffled, with random signs."""
    row = np.concatenate([members, rng.choice(members, K - members.size)])
    rng.shuffle(row)
    out: Bits = row | rng.integers(0, 2, K).astype(np.uint32) << np.uint32(31)
    return out


def _with(base: Bits, position: int, value: int) -> Bits:
    row = base.copy()
    row[position] = value
    return row


def _special(rng: np.random.Generator) -> Rows:
    zeros = np.tile(np.array([0, SIGN], np.uint32), K // 2)
    normal = rng.standard_normal(K).astype(np.float32).view(np.uint32)
    rows: Rows = [
        ("all +0", np.zeros(K, np.uint32)),
        ("all -0", np.full(K, SIGN, np.uint32)),
        ("zeros of both signs", zeros),
        ("one -0 among ones", _with(np.full(K, 0x3F800000, np.uint32), 5, SIGN)),
    ]
    for value in (
        1,
        2,
        3,
        0x3FFFFF,
        0x400000,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x7F000000,
        FLT_MAX - 1,
        FLT_MAX,
    ):
        rows += [
            (f"all {value:#010x}", np.full(K, value, np.uint32)),
            (f"all negative {value:#010x}", np.full(K, value | SIGN, np.uint32)),
            (f"zeros and one {value:#010x}", _with(zeros, 7, value)),
            (f"normals and one {value:#010x}", _with(normal, 19, value)),
        ]
    for value in (*NAN_PAYLOADS, INFINITY_BITS, INFINITY_BITS | SIGN):
        rows += [(f"{value:#010x} at {at}", _with(normal, at, value)) for at in (0, 13, 31)]
        rows += [
            (f"all {value:#010x}", np.full(K, value, np.uint32)),
            (f"zeros and one {value:#010x}", _with(zeros, 16, value)),
        ]
    rows.append(("both infinities", _with(_with(normal, 3, INFINITY_BITS), 28, INFINITY_BITS | SIGN)))
    rows.append(("NaN and infinity", _with(_with(normal, 30, INFINITY_BITS), 1, NAN_PAYLOADS[0])))
    for exponent in range(4):  # where the scale is clamped, and just above
        row = rng.integers(1, (exponent + 1) << 23, K).astype(np.uint32)
        rows.append((f"biased exponents to {exponent}", _with(row, 5, (exponent << 23) + 0x7FFFFF) | zeros))
    binades = np.linspace(0, 254, K).astype(np.uint32) << np.uint32(23) | np.uint32(0x2AAAAA)
    rows.append(("every magnitude, rising", binades))
    rows.append(("every magnitude, falling, signs alternate", binades[::-1] | zeros))
    rows += [
        (f"negative underflow below {big:#010x}", _with(np.full(K, SIGN | 1, np.uint32), 11, big))
        for big in (0x3F800000, FLT_MAX)
    ]
    return rows


def _ties(rng: np.random.Generator, exponents: range | tuple[int, ...]) -> Rows:
    """Ties and their neighbours under amax = 4X and 6X, of which every rule but CEIL makes X."""
    rows: Rows = []
    grid = np.array(E2M1.magnitudes)
    for e in exponents:
        scale = 2.0**e
        for top in (4.0, 6.0):
            members = near(np.array([t for t in TIES if t < top]) * scale)
            members = np.append(members, near(np.array([top]) * scale, 0))
            rows.append((f"ties X=2^{e} amax={top:g}X", fill(rng, members)))
        rows.append((f"grid X=2^{e}", fill(rng, near(grid * scale, 0))))
        thirds = np.concatenate([near(np.array(TIES) * 4 / 3 * scale), near(np.array([6.0]) * scale, 0)])
        rows.append((f"ties of 3/4 X=2^{e}", fill(rng, thirds)))
    return rows


def _saturating(rng: np.random.Generator, exponents: range | tuple[int, ...]) -> Rows:
    """Amax just below 8X: what lies above 6X saturates under FLOOR and EVEN."""
    rows: Rows = []
    for e in exponents:
        scale = 2.0**e
        members = np.concatenate(
            [near(np.array([5.0, 6.0, 7.0, 7.5]) * scale), near(np.array([8.0]) * scale)[:1]]
        )
        rows.append((f"saturating X=2^{e}", fill(rng, members)))
    return rows


def _amax(rng: np.random.Generator, biased: range | list[int]) -> Rows:
    """Amax at every turn of every rule, the rest spread over six binades below."""
    rows: Rows = []
    for exponent in biased:
        for mantissa in TURNS:
            amax = exponent << 23 | mantissa
            row = np.maximum(amax - rng.integers(0, 6 << 23, K), 0).astype(np.uint32)
            row |= rng.integers(0, 2, K).astype(np.uint32) << np.uint32(31)
            row[rng.integers(K)] = amax | int(rng.integers(2)) << 31
            rows.append((f"amax E={exponent} m={mantissa:#08x}", row))
    return rows


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return Student-t draws of 2 degrees of freedom, their rows spread over many binades."""
    spread = np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))
    x: NDArray[np.float32] = (rng.standard_t(2, shape) * spread).astype(np.float32)
    return x


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], finite: bool = False) -> NDArray[np.float32]:
    """Return float32 drawn by bit pattern within 8 binades of one exponent per row, rarely NaN or Inf."""
    centre = rng.integers(0, 255, (*shape[:-1], 1))
    exponent = np.clip(centre + rng.integers(-8, 9, shape), 0, 254)
    mantissa = np.where(rng.random(shape) < 0.5, rng.choice(TURNS, shape), rng.integers(0, 1 << 23, shape))
    bits = exponent << 23 | mantissa | rng.integers(0, 2, shape) << 31
    if not finite:
        bits = np.where(rng.random(shape) < 0.002, rng.choice(NAN_PAYLOADS, shape), bits)
        bits = np.where(rng.random(shape) < 0.002, INFINITY_BITS | rng.integers(0, 2, shape) << 31, bits)
    x: NDArray[np.float32] = bits.astype(np.uint32).view(np.float32)
    return x


def cancelling(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return values whose sums cancel to their last bits, so that the order of additions shows."""
    x = rng.standard_normal(shape).astype(np.float32)
    even = x[..., 0::2][..., : shape[-1] // 2]
    x[..., 1::2] = -even * (1 + rng.integers(-4, 5, even.shape).astype(np.float32) * 2.0**-22)
    out: NDArray[np.float32] = (x * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)
    return out


def tame(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int = -1, spread: bool = True
) -> NDArray[np.float32]:
    """Return grid points, 4 the largest of each block along `axis`, each block times a power of two if `spread`.

    Every scale rule and every rounding keeps them as they are, so a quantizer that gets those wrong still
    gets these right, unless it puts them in the wrong place.
    """
    lengths = [*shape]
    length = lengths.pop(axis)
    x = rng.choice([0.5, 1.0, 1.5, 2.0, 3.0, 4.0], (*lengths, length))
    x *= rng.choice([-1.0, 1.0], x.shape)
    x[..., ::8] = 4.0
    blocks = -(-length // K)
    if spread:
        x *= np.repeat(np.exp2(rng.integers(-9, 10, (*lengths, blocks))), K, axis=-1)[..., :length]
    return np.ascontiguousarray(np.moveaxis(x, -1, axis), np.float32)
