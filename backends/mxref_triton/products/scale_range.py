"""Tests whether scales are within the range of `bounded`, in one launch for both operands."""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref_triton.launch import launch, tiles_of

PART = 4096
"""Scale codes that a program reads: 16 bytes for each thread of gfx950, one load."""


@triton.jit
def _flag_scales(a, b, exceeded, of_a, of_b, LIMIT: tl.constexpr, PART: tl.constexpr):
    """Set the word if a part of A's scale codes, or after them of B's, has one above LIMIT; 255 is NaN, no scale."""
    program, at = tl.program_id(0), tl.arange(0, PART)
    parts_of_a = tl.cdiv(of_a, PART)
    if program < parts_of_a:
        start = program.to(tl.int64) * PART
        code = tl.load(a + start + at, at < of_a - start, 0)
    else:
        start = (program - parts_of_a).to(tl.int64) * PART
        code = tl.load(b + start + at, at < of_b - start, 0)
    largest = tl.max(tl.where(code == 255, 0, code.to(tl.int32)), 0)
    # All programs that store, store the same value.
    tl.store(exceeded, 1, largest > LIMIT)


def flag_scales(limit: int, exceeded: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None = None) -> None:
    """Set a word if a scale code of one operand or of two is above a limit and not 255, which is NaN.

    Args:
        limit: largest scale code within range, 0 to 254.
        exceeded: int32 [1]; becomes 1, or stays as it is.
        a: scale codes, uint8, of any shape and strides.
        b: scale codes of the other operand, if it is checked too.
    """
    # Order does not matter, and alignment only to the speed.
    first = a.contiguous()
    second = first if b is None else b.contiguous()
    sizes = first.numel(), 0 if b is None else second.numel()
    programs = sum(tiles_of(size, PART) for size in sizes)
    if programs:
        launch(_flag_scales, (programs,), first, second, exceeded, *sizes, LIMIT=limit, PART=PART)
