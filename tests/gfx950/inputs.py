"""Inputs on which the specification's corners lie: blocks of 32 elements, as float32, bfloat16 or float16."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mxref.formats import BlockFormat
from mxref.steps.scale import MANTISSA_MASK, ScaleRule, bump_above, scale_code, scale_exponent

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TIES = (GRID[1:] + GRID[:-1]) / 2
MANTISSAS = (
    0,
    1,
    0x3FFFFF,
    0x400000,
    0x400001,
    0x5FFFFF,
    0x600000,
    0x600001,
    0x7FFFFF,
    0x7F0000,
    0x5F0000,
    0x610000,
)
"""Of the largest element: where each scale rule changes its mind, and bfloat16's neighbours of those places."""
EXPONENTS = (0, 1, 2, 3, 4, 5, 24, 126, 127, 128, 140, 252, 253, 254)
"""Biased, of the largest element."""


def largest_first(rng: np.random.Generator) -> np.ndarray:
    """Return blocks [n, 32]: every exponent and mantissa for the largest element, ties below it."""
    blocks = []
    for exponent in EXPONENTS:
        for mantissa in MANTISSAS:
            top = np.uint32(exponent << 23 | mantissa).view(np.float32)
            unit = np.ldexp(1.0, max(exponent, 1) - 127 - rng.integers(1, 3))
            values = rng.choice(np.concatenate([GRID, TIES]), 32) * unit
            values = np.minimum(values * rng.choice([1, 1, 1, 1 - 2.0**-8, 1 + 2.0**-7], 32), float(top))
            values[rng.integers(32)] = top
            blocks.append(values * rng.choice([-1, 1], 32))
    with np.errstate(over="ignore", under="ignore"):
        return np.array(blocks).astype(np.float32)


def special(rng: np.random.Generator) -> np.ndarray:
    """Return blocks of zeros of both signs, of subnormals, with one NaN or Inf, and of random bits."""
    zeros = np.zeros((4, 32), np.uint32)
    zeros[1], zeros[2, ::3] = 0x80000000, 0x80000000
    zeros[3, 5] = 1
    tiny = (
        rng.integers(0, 1 << 23, (8, 32), dtype=np.uint32)
        | rng.integers(0, 2, (8, 32), dtype=np.uint32) << 31
    )
    spoiled = np.full((8, 32), 0x3F800000, np.uint32)
    for row, pattern in enumerate((0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F810000, 0xFFFFFFFF)):
        spoiled[row, rng.integers(32)] = pattern
    spoiled[6], spoiled[7] = 0x7F800000, 0xFFC00000
    noise = rng.integers(0, 1 << 32, (64, 32), dtype=np.uint64).astype(np.uint32)
    return np.concatenate([zeros, tiny, spoiled, noise]).view(np.float32)


def ordinary(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return blocks of small multiples of powers of two, whose transforms meet ties too, and of normal numbers."""
    whole = rng.integers(-12, 13, (count // 2, 32)) * np.ldexp(1.0, rng.integers(-20, 20, (count // 2, 1)))
    normal = rng.standard_normal((count - count // 2, 32)) * np.ldexp(
        1.0, rng.integers(-30, 30, (count - count // 2, 1))
    )
    return np.concatenate([whole, normal]).astype(np.float32)


def matrix(rows: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    """Return [rows, columns] made of all those blocks, lying along the rows."""
    rng = np.random.default_rng(seed)
    made = np.concatenate([largest_first(rng), special(rng)])
    count = rows * columns // 32
    if kind == "float16":
        # float16 has its own range; the patterns of large float32 numbers all become Inf.
        scaled = np.concatenate([largest_first(rng)[::14], special(rng)])
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            made = np.concatenate(
                [scaled.astype(np.float16), (made[:100] * np.float32(2.0**100)).astype(np.float16)]
            )
            noise = rng.integers(0, 1 << 16, (100, 32), dtype=np.uint16).view(np.float16)
            rest = ordinary(rng, count - len(made) - 100).astype(np.float16)
        made = np.concatenate([made, noise, rest])
    else:
        made = np.concatenate([made, ordinary(rng, max(count - len(made), 2))])
    made = made[rng.permutation(len(made))[:count]].reshape(rows, columns)
    if kind == "bfloat16":
        return (made.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    return made


def random_operand(
    rows: int, columns: int, lowest: int, highest: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return random packed codes and scale codes from a range."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return codes, rng.integers(lowest, highest + 1, (rows, columns // 32), dtype=np.uint8)


def corners(made: BlockFormat, rule: ScaleRule, exponents: Sequence[int]) -> np.ndarray:
    """Return blocks [N, 32] with amax on either side of a rule's bound, and elements on and near grid and midpoints.

    `exponents` are the exponent fields of amax, 0 for a subnormal one.
    """
    element = made.element
    grid = np.array(element.magnitudes)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    around = np.concatenate(
        [np.nextafter(points, np.float32(0)), points, np.nextafter(points, np.float32(np.inf))]
    )
    bound = bump_above(rule, element)
    mantissas = sorted({0, max(bound, 0), min(bound + 1, MANTISSA_MASK), MANTISSA_MASK})
    blocks = []
    for exponent, mantissa in itertools.product(exponents, mantissas):
        amax = np.uint32([exponent << 23 | mantissa])
        scale = scale_exponent(scale_code(amax, rule, element))[0]
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(around.astype(np.float64), scale).astype(np.float32)
        values = np.resize(values[values <= amax.view(np.float32)], -(-len(values) // 31) * 31).reshape(
            -1, 31
        )
        blocks.append(np.column_stack([values, np.full(len(values), amax.view(np.float32))]))
    x = np.concatenate(blocks)
    x[::2, ::3] *= -1
    return x
