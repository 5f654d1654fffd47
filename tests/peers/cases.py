"""The crafted inputs, each with the fault that it is meant to show."""

from dataclasses import dataclass
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

FLT_MAX = float(np.finfo(np.float32).max)


def after(value: float) -> float:
    """The next float32 above."""
    return float(np.nextafter(np.float32(value), np.float32(inf)))


def before(value: float) -> float:
    """The next float32 below."""
    return float(np.nextafter(np.float32(value), np.float32(-inf)))


@dataclass(frozen=True)
class Case:
    """A block: the values that it starts with; zeros follow."""

    values: tuple[float, ...]
    shown: str
    """The values in reStructuredText."""
    catches: str


def halves(largest: float) -> tuple[float, ...]:
    return tuple(largest / 2**i for i in range(5))


BLOCKS = {
    "zero": Case(
        (0.0,) * 5, "0, 0, 0, ...", "No scale follows from amax = 0; every byte but 255 gives the same values."
    ),
    "signs": Case(
        (4.0, -0.0, -0.1, 0.1), "4, -0, -0.1, 0.1", "E2M1 has -0 (code 8): the sign of what rounds to zero stays."
    ),
    "ties": Case(
        (4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5), "4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5",
        "Each lies midway between two element values; RNE takes the even code.",
    ),
    "beside ties": Case(
        (4.0, after(0.25), before(0.25), after(2.5), before(2.5)),
        "4, 0.25\\ :sup:`+`, 0.25\\ :sup:`-`, 2.5\\ :sup:`+`, 2.5\\ :sup:`-`",
        "One float32 above and below a tie: nothing is even here.",
    ),
    "above 4": Case((after(4.0), 1.0, 2.0, 3.0), "4\\ :sup:`+`, 1, 2, 3", "Where CEIL turns."),
    "6": Case((6.0, 0.5, 2.0, 3.0), "6, 0.5, 2, 3", "The largest element at scale 1: RCEIL does not go up yet."),
    "above 6": Case(
        (after(6.0), 0.5, 2.0, 3.0), "6\\ :sup:`+`, 0.5, 2, 3", "RCEIL goes up here: amax / 6 is 1 + 2\\ :sup:`-23`."
    ),
    "above 6, large": Case(
        (after(6.0) * 2.0**80, 2.0**79, 2.0**81, 3 * 2.0**80), "6\\ :sup:`+`, 0.5, 2 and 3, each times 2\\ :sup:`80`",
        "The same, where a float32 log2 of amax / 6 rounds to 80.",
    ),
    "below 7": Case(
        (before(7.0), 1.0, 2.0, 3.0), "7\\ :sup:`-`, 1, 2, 3", "EVEN does not go up yet; in bfloat16 it is 7."
    ),
    "7": Case((7.0, 1.0, 2.0, 3.0), "7, 1, 2, 3", "Where EVEN turns."),
    "7.9": Case((7.9, 1.0, 2.0, 3.0), "7.9, 1, 2, 3", "FLOOR saturates to 6."),
    "below 8": Case(
        (before(8.0), 1.0, 2.0, 3.0), "8\\ :sup:`-`, 1, 2, 3",
        "FLOOR still saturates; a float32 log2 gives 3, and the scale doubles.",
    ),
    "3e38": Case(
        (3e38, 1.5e38, 7e37, 3e37), "3e38, 1.5e38, 7e37, 3e37",
        "At least 1.75 x 2\\ :sup:`127`: EVEN rounds amax up to 2\\ :sup:`128`, which float32 cannot hold.",
    ),
    "FLT_MAX": Case(
        halves(FLT_MAX), "FLT_MAX and its halves", "The largest finite input; CEIL and RCEIL reach byte 253."
    ),
    "NaN": Case((nan, 1.0, 2.0, -3.0, 4.0), "NaN, 1, 2, -3, 4", "The standard leaves this open; mxref: NaN."),
    "Inf": Case((inf, 1.0, 2.0, -3.0, 4.0), "+Inf, 1, 2, -3, 4", "No scale can represent it; mxref: NaN."),
    "2^-125": Case(
        halves(2.0**-125), "2\\ :sup:`-125` and its halves", "The smallest byte, 0, is 2\\ :sup:`-127` and not zero."
    ),
    "1.5 x 2^-126": Case(
        halves(1.5 * 2.0**-126), "1.5 x 2\\ :sup:`-126` and its halves",
        "A normal float below the range of scales: the byte is clamped to 0.",
    ),
    "2^-126": Case(halves(2.0**-126), "2\\ :sup:`-126` and its halves", "The smallest normal float."),
    "2^-127": Case(halves(2.0**-127), "2\\ :sup:`-127` and its halves", "Subnormal inputs are not flushed."),
}  # fmt: skip

ELEMENTS = {
    "0.25": 0.25, "0.25+": after(0.25), "0.75": 0.75, "1.25": 1.25, "1.75": 1.75, "2.5": 2.5, "3.5": 3.5, "5": 5.0,
    "-0": -0.0, "-0.1": -0.1, "-0.25": -0.25,
}  # fmt: skip
"""Values at scale 1; all but -0, -0.1 and 0.25+ are ties."""

CASTS = {
    "0": 0.0, "-1": -1.0, "1.25": 1.25, "1.5": 1.5, "3": 3.0, "3e38": 3e38, "2^-127": 2.0**-127,
    "2^-149": 2.0**-149, "Inf": inf, "NaN": nan,
}  # fmt: skip
"""Values to cast to E8M0."""

SCALE_BYTES = (0, 1, 252, 253, 254, 255)
"""Scale bytes to decode code 7 at."""


def block_array() -> NDArray[np.float32]:
    """The blocks, float32 [len(BLOCKS), 32]."""
    blocks = np.zeros((len(BLOCKS), 32), np.float32)
    for row, case in zip(blocks, BLOCKS.values(), strict=True):
        row[: len(case.values)] = case.values
    return blocks


def normal_blocks(count: int) -> NDArray[np.float32]:
    """Blocks of N(0, 1), float32 [count, 32]; the first ones are the same for every count."""
    return np.random.default_rng(2026).standard_normal((count, 32)).astype(np.float32)
