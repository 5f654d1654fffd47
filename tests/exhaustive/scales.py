"""Part b: every positive finite magnitude as amax, under the four scale rules of every element format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

import mxref
import oracle
from exhaustive.families import FAMILIES, NUMBA, element_of, prefix, subjects
from exhaustive.steps import scale_steps
from exhaustive.sweep import FLT_MAX, Codes, Finding, Patterns, Span, Sweep, compare
from mxref import OperandSpec, ScaleRule
from mxref.formats import MXFP4, BlockFormat, ElementFormat
from mxref.steps.scale import scale_code

CHUNK = 1 << 16
BLOCKS = 1 << 13

ScaleCode = Callable[[Patterns, ScaleRule, ElementFormat], Codes]


def direct(rule: oracle.Rule, function: ScaleCode = scale_code, block_format: BlockFormat = MXFP4) -> Sweep:
    """`scale_code` on every amax."""
    span, steps = Span(1, FLT_MAX, CHUNK), scale_steps(rule, element_of(block_format))
    offsets = np.arange(CHUNK, dtype=np.uint32)

    def check(chunk: int) -> Finding | None:
        base = span.base(chunk)
        got = function(offsets + np.uint32(base), ScaleRule(rule), block_format.element)
        return compare(got, steps.values(base, CHUNK), lambda at: f"amax = {base + at:#010x}")

    return _sweep("mxref.steps.scale.scale_code", rule, span, check, block_format)


def blocks(
    rule: oracle.Rule,
    quantize: Callable[..., mxref.MXArray] | None = None,
    block_format: BlockFormat = MXFP4,
) -> Sweep:
    """`quantize` of the Numba backend: a block for every amax, at a place and with a sign that change by chunk."""
    quantize = quantize or NUMBA.quantize
    span, steps = Span(1, FLT_MAX, BLOCKS), scale_steps(rule, element_of(block_format))
    spec = OperandSpec(format=block_format, scale_rule=ScaleRule(rule))
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

    return _sweep("numba: quantize, scale bytes", rule, span, check, block_format)


def _sweep(
    function: str,
    rule: oracle.Rule,
    span: Span,
    check: Callable[[int], Finding | None],
    block_format: BlockFormat,
) -> Sweep:
    starts = (s for s in scale_steps(rule, element_of(block_format)).starts.tolist() if s <= FLT_MAX)
    corners = tuple({c for s in starts for c in span.around(s)})
    domain = f"{prefix(block_format)}rule {rule}: all positive finite amax"
    return Sweep("b", function, domain, span.cases, span.chunks, check, corners)


def sweeps(family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield all sweeps of part b."""
    for block_format in FAMILIES[family]:
        for rule in oracle.RULES:
            yield direct(rule, block_format=block_format)
            if "numba" in subjects(block_format):
                yield blocks(rule, block_format=block_format)
