"""Backends with a range that their products can leave, and one whose chosen GEMMs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mxref.reference import ReferenceBackend


class Widening(ReferenceBackend):
    """Knows whether it is widened."""

    wide = False

    @contextmanager
    def widened(self) -> Iterator[None]:
        self.wide = True
        try:
            yield
        finally:
            self.wide = False


class Narrow(Widening):
    """Spoils some GEMMs, by their number, unless it is widened; the spoiled ones set its flag."""

    name = "narrow"

    def __init__(self, spoiled: set[int]) -> None:
        self.spoiled, self.calls, self.flag = spoiled, 0, False

    def _scaled_gemm(self, *request: Any) -> Any:
        out = super()._scaled_gemm(*request)
        if self.wide:
            return out
        self.calls += 1
        if self.calls not in self.spoiled:
            return out
        self.flag = True
        return out + 1

    def range_exceeded(self) -> bool:
        found, self.flag = self.flag, False
        return found
