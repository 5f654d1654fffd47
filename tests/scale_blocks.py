"""Crafted blocks for scales with a mantissa: where a scale or an element under it turns, and float32 beside that."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import oracle
from oracle import Element, Scale
from strategies import FLT_MAX

Rows = list[tuple[str, list[int]]]
"""Names and the float32 bits of one block each."""
NONFINITE = (oracle.NAN32, 0xFFC00001, 0x7F800001, oracle.INF32, oracle.INF32 | oracle.SIGN32)
SPECIAL = {
    "all +0": [0],
    "all -0": [oracle.SIGN32],
    "zeros of both signs": [0, oracle.SIGN32],
    "the smallest float32": [1],
    "the smallest float32 and zeros": [0, oracle.SIGN32, oracle.SIGN32 | 1],
    "FLT_MAX": [FLT_MAX, FLT_MAX | oracle.SIGN32],
    "1 and what underflows": [0x3F800000, oracle.SIGN32 | 1, 1, oracle.SIGN32],
}


@dataclass(frozen=True)
class Blocks:
    """Crafted blocks of `k` elements under a tensor scale of bits `tensor`, as NAMES and float32 [N, k]."""

    element: Element
    scale: Scale
    k: int
    tensor: int = oracle.ONE

    def near(self, numbers: Iterable[Fraction]) -> list[int]:
        """The float32 bits nearest to numbers times the tensor's scale, and their neighbours, up to FLT_MAX."""
        bits = []
        for number in numbers:
            at = oracle.round_f32(number * oracle.f32_value(self.tensor))
            bits += [b for b in (at - 1, at, at + 1) if 0 <= b <= FLT_MAX]
        return bits

    def filled(self, amax: int, members: Sequence[int], rng: np.random.Generator) -> list[int]:
        """A block of a largest magnitude, of members, and of what lies below, with random signs and in random order."""
        below = rng.integers(max(amax - (6 << 23), 0), amax + 1, self.k - 1 - len(members)).tolist()
        row = [amax, *(b for b in members), *below]
        signs = rng.integers(0, 2, self.k).tolist()
        order = rng.permutation(self.k).tolist()
        return [row[i] | signs[i] << 31 for i in order]

    def scale_turns(self, rng: np.random.Generator, count: int) -> Rows:
        """Largest magnitudes at and beside ties of two scales, and around the largest scale; `count` ties or all."""
        values = self.scale.values
        lows = range(len(values) - 1)
        if count < len(lows):
            lows = sorted({0, 1, len(values) - 2, *rng.choice(len(lows), count).tolist()})
        turns = [(f"between scales {low} and {low + 1}", (values[low] + values[low + 1]) / 2) for low in lows]
        beyond = self.scale.largest * Fraction(29, 28)  # where the next scale would begin, if there were one
        turns += [
            ("at the largest scale", self.scale.largest),
            ("above it", beyond),
            ("far above", 999 * beyond),
        ]
        return [
            (f"{name} {amax:#010x}", self.filled(amax, [], rng))
            for name, turn in turns
            for amax in self.near([turn * self.element.largest])
            if amax
        ]

    def element_turns(self, rng: np.random.Generator, codes: Iterable[int]) -> Rows:
        """Every tie of two elements and its neighbours, and grid points, under the scales of the given codes."""
        grid = self.element.grid
        ties = [(low + high) / 2 for low, high in pairwise(grid)]
        if len(ties) > 8:
            ties = [ties[0], ties[-1], *(ties[i] for i in rng.choice(len(ties), 6).tolist())]
        rows = []
        for code in codes:
            shared = self.scale.values[code]
            amax = self.near([self.element.largest * shared])[1:2]
            if not amax:
                continue
            members = [b for b in self.near([tie * shared for tie in ties]) if b <= amax[0]]
            members += [b for b in self.near([grid[1] * shared])[1:2] if b <= amax[0]]
            for first in range(0, len(members), self.k - 1):
                part = members[first : first + self.k - 1]
                rows.append((f"elements under scale {code} from {first}", self.filled(amax[0], part, rng)))
        return rows

    def random_turns(
        self, rng: np.random.Generator, codes: Iterable[int], random: Callable[[int], int], R: int
    ) -> Rows:
        """Elements at and beside the step at which their own random integer, of `random(index)`, takes them up."""
        grid = self.element.grid
        rows: Rows = []
        for code in codes:
            shared = self.scale.values[code]
            amax = self.near([self.element.largest * shared])[1]
            row = []
            for column in range(self.k):
                low = int(rng.integers(self.element.top))
                steps = Fraction(2**R - random(len(rows) * self.k + column), 2**R)
                turn = (grid[low] + (grid[low + 1] - grid[low]) * steps) * shared
                around = self.near([turn])
                row.append(around[column % len(around)] | int(rng.integers(2)) << 31)
            row[int(rng.integers(self.k))] = amax
            rows.append((f"steps of SR under scale {code}", row))
        return rows

    def special(self, rng: np.random.Generator) -> Rows:
        """Zeros, the ends of float32, NaN and infinities."""
        rows = [(name, (row * self.k)[: self.k]) for name, row in SPECIAL.items()]
        for bits in NONFINITE:
            row = self.filled(0x3F800000, [], rng)
            row[int(rng.integers(self.k))] = bits
            rows += [(f"one {bits:#010x}", row), (f"all {bits:#010x}", [bits] * self.k)]
        return rows

    def drawn(self, rng: np.random.Generator, count: int) -> Rows:
        """Blocks of magnitudes over the whole of float32, and of magnitudes near one another."""
        rows = []
        for i in range(count):
            top = int(rng.integers(1, FLT_MAX))
            members = rng.integers(0, top, self.k) if i % 2 else top - rng.integers(0, 5 << 23, self.k)
            row = np.maximum(members, 0) | rng.integers(0, 2, self.k) << 31
            rows.append((f"drawn {i}", row.tolist()))
        return rows

    def below(self, rng: np.random.Generator, amax: int, count: int) -> Rows:
        """Drawn blocks of finite magnitudes up to `amax`, more of them the nearer it."""
        tops = [max(int(amax - rng.exponential(5) * 2**23), 1) for _ in range(count)]
        return [(f"below amax {i}", self.filled(min(top, amax), [], rng)) for i, top in enumerate(tops)]


def arrays(rows: Rows) -> tuple[list[str], NDArray[np.float32]]:
    """The names of rows, and the rows as float32 [N, k]."""
    return [name for name, _ in rows], np.array([row for _, row in rows], np.uint32).view(np.float32)
