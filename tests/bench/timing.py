"""Times two pieces of work in turns, so that a disturbance of the machine affects both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST_REPEATS = 3
MOST_REPEATS = 300


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the fastest is what the work takes, the median shows what disturbed it."""

    min_ms: float
    median_ms: float
    cpu_ms: float
    """Least CPU time of the calling thread: on one thread, the time without whatever else ran."""
    repeats: int


class _Samples:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take(self) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        self.work()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)

    def timing(self) -> Timing:
        return Timing(
            1e3 * min(self.wall), 1e3 * statistics.median(self.wall), 1e3 * min(self.cpu), len(self.wall)
        )


def in_turns(seconds: float, *works: Callable[[], Any]) -> list[Timing]:
    """Return the timings of each work, run once before, then in turns for about so many seconds in all."""
    samples = [_Samples(work) for work in works]
    for work in works:
        work()
    end = time.perf_counter() + seconds
    repeats = 0
    while repeats < LEAST_REPEATS or (time.perf_counter() < end and repeats < MOST_REPEATS):
        for sample in samples:
            sample.take()
        repeats += 1
    return [sample.timing() for sample in samples]
