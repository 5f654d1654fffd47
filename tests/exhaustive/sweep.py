"""A sweep: a domain cut into chunks, each of which is compared completely."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.uint32]
Codes = NDArray[np.uint8]

FLT_MAX = 0x7F7FFFFF
SIGN = 0x80000000


@dataclass(frozen=True)
class Finding:
    """Cases of a chunk that disagree."""

    count: int
    first: str


@dataclass(frozen=True)
class Sweep:
    """One function under test over one domain."""

    part: str
    function: str
    domain: str
    cases: int
    """How many different cases all chunks cover together."""
    chunks: int
    check: Callable[[int], Finding | None]
    """Compare all cases of a chunk."""
    corners: tuple[int, ...] = ()
    """Chunks with a threshold in them or at their edge: no slice leaves them out."""

    def slice(self, every: int) -> Iterator[int]:
        """Yield every `every`-th chunk and all corners; 1 gives every chunk once."""
        yield from sorted({*range(0, self.chunks, every), *self.corners, self.chunks - 1})


@dataclass(frozen=True)
class Result:
    """What came of a sweep."""

    chunks: int
    faults: int
    first: str
    seconds: float


def run(sweep: Sweep, every: int = 1, advance: Callable[[int], None] = lambda chunks: None) -> Result:
    """Run the chunks of a slice; `advance` is told of every chunk that is done."""
    start, faults, first, done = time.perf_counter(), 0, "", 0
    for chunk in sweep.slice(every):
        finding = sweep.check(chunk)
        if finding is not None:
            faults += finding.count
            first = first or finding.first
        done += 1
        advance(1)
    return Result(done, faults, first, time.perf_counter() - start)


@dataclass(frozen=True)
class Span:
    """The bit patterns `first` to `last` in chunks of one size; the last chunk overlaps the one before it."""

    first: int
    last: int
    size: int

    def __post_init__(self) -> None:
        assert self.last - self.first + 1 >= self.size, "a span holds at least one chunk"

    @property
    def cases(self) -> int:
        return self.last - self.first + 1

    @property
    def chunks(self) -> int:
        return -(-self.cases // self.size)

    def base(self, chunk: int) -> int:
        """The first pattern of a chunk."""
        return min(self.first + chunk * self.size, self.last + 1 - self.size)

    def around(self, pattern: int, distance: int = 2) -> set[int]:
        """The chunks that hold the patterns up to `distance` from `pattern`, itself included."""
        near = (min(max(pattern + d, self.first), self.last) for d in range(-distance, distance + 1))
        return {(p - self.first) // self.size for p in near}


def compare(got: NDArray[Any], want: NDArray[Any] | int, describe: Callable[[int], str]) -> Finding | None:
    """Compare two arrays, or an array and a constant; `describe` puts a flat index into words."""
    assert isinstance(want, int) or got.shape == want.shape
    differ = got != want
    if not differ.any():
        return None
    at = int(np.flatnonzero(differ)[0])
    wanted = want if isinstance(want, int) else int(want.flat[at])
    return Finding(int(differ.sum()), f"{describe(at)}: got {int(got.flat[at])}, want {wanted}")
