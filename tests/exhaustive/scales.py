"""Part b: every positive finite magnitude as amax, under the four scale rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

import mxref
import oracle
from exhaustive.steps import scale_steps
from exhaustive.sweep import FLT_MAX, Codes, Finding, Patterns, Span, Sweep, compare
from mxref import OperandSpec, ScaleRule
from mxref.steps.scale import scale_code

CHUNK = 1 << 16
BLOCKS = 1 << 13

ScaleCode = Callable[[Patterns, ScaleRule], Codes]


def direct(rule: oracle.Rule, function: ScaleCode = scale_code) -> Sweep:
    """`scale_code` on every amax."""
    span, steps = Span(1, FLT_MAX, CHUNK), scale_steps(rule)
    offsets = np.arange(CHUNK, dtype=np.uint32)

    def check(chunk: int) -> Finding | None:
        base = span.base(chunk)
        got = function(offsets + np.uint32(base), ScaleRule(rule))
        return compare(got, steps.values(base, CHUNK), lambda at: f"amax = {base + at:#010x}")

    return _sweep("mxref.steps.scale.scale_code", rule, span, check)


def blocks(rule: oracle.Rule, quantize: Callable[..., mxref.MXArray] | None = None) -> Sweep:
    """`quantize` of the Numba backend: a block for every amax, at a place and with a sign that change by chunk."""
    quantize = quantize or mxref.get_backend("numba").quantize
    span, steps = Span(1, FLT_MAX, BLOCKS), scale_steps(rule)
    spec = OperandSpec(scale_rule=ScaleRule(rule))
    offsets = np.arange(BLOCKS, dtype=np.uint32)
    patterns = np.zeros((BLOCKS, 32), np.uint32)

    def check(chunk: int) -> Finding | None:
        base, place = span.base(chunk), chunk % 32
        patterns[:, place] = offsets + np.uint32(base | (chunk // 32 & 1) << 31)
        q = quantize(patterns.reshape(-1, 256).view(np.float32), spec)
        patterns[:, place] = 0
        return compare(
            q.scales.reshape(-1), steps.values(base, BLOCKS), lambda at: f"amax = {base + at:#010x}"
        )

    return _sweep("numba: quantize, scale bytes", rule, span, check)


def _sweep(function: str, rule: str, span: Span, check: Callable[[int], Finding | None]) -> Sweep:
    starts = (s for s in scale_steps(rule).starts.tolist() if s <= FLT_MAX)
    corners = tuple({c for s in starts for c in span.around(s)})
    return Sweep(
        "b", function, f"rule {rule}: all positive finite amax", span.cases, span.chunks, check, corners
    )


def sweeps() -> Iterator[Sweep]:
    """Yield all sweeps of part b."""
    for rule in get_args(oracle.Rule):
        yield direct(rule)
        yield blocks(rule)
