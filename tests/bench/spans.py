"""What a profiler's kernels say of the time of a GPU: which kernels ran alone, and when none did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

Span = tuple[float, float]


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def shares(named: Iterable[tuple[str, Span]]) -> dict[str, float]:
    """Return how long only NCCL's kernels ran, and how long none did between the first and the last.

    Args:
        named: name, begin and end of each kernel, in any unit of time; the result has the same.
    """
    spans = list(named)
    if not spans:
        return {"nccl_alone": 0.0, "idle": 0.0}
    everything = covered(span for _, span in spans)
    others = covered(span for name, span in spans if "nccl" not in name.lower())
    length = max(stop for _, (_, stop) in spans) - min(start for _, (start, _) in spans)
    return {"nccl_alone": everything - others, "idle": length - everything}


def kernels_of(events: Iterable[Any]) -> list[tuple[str, Span]]:
    """Return name, begin and end of the kernels among a profiler's events, in milliseconds."""
    return [
        (event.name, (event.time_range.start / 1e3, event.time_range.end / 1e3))
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
