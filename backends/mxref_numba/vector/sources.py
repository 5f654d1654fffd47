"""A vector of consecutive elements of each input type, as the bits of float32."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mxref_numba.vector.lanes import F16, F32, I16, I32, Lanes, load
from mxref_numba.vector.target import lanes_of

VectorLoad = Callable[..., Lanes]
"""What loads elements from an address, int64, plus a constant number of elements: int32 lanes."""


def float32(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load float32."""
    return load(builder, I32, lanes_of(builder), address, 4 * first)


def bfloat16(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load bfloat16, the upper half of a float32."""
    return load(builder, I16, lanes_of(builder), address, 2 * first).convert("zext", I32) << 16


def float16(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load float16; the conversion is exact, subnormals included."""
    return load(builder, F16, lanes_of(builder), address, 2 * first).convert("fpext", F32).cast(I32)
