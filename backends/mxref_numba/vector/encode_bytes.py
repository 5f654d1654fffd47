"""The inner step of quantization to codes of eight bits: 128 consecutive elements to four scale codes and 128 bytes.

The halves and their order are those of `encode.py`. The element format comes as numbers (`elements.py`), which each
step reads from the first-level cache: all formats of eight bits share this code, which waits for memory anyway.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mxref_numba.vector.encode import (
    BFLOAT16,
    CODES,
    FLOAT32,
    STEP,
    Source,
    encoder,
    halves,
    load_finite,
    load_scaled,
    scales_bfloat16,
    scales_float32,
)
from mxref_numba.vector.jobs import CONSTANT, EVEN, RANDOM_16, read_job
from mxref_numba.vector.lanes import I32, I64, Lanes, splat, vector_code
from mxref_numba.vector.native import Native
from mxref_numba.vector.philox import random_vectors
from mxref_numba.vector.rounding import Grid

_SIGN = 0x80


def _codes(kind: Source, rounded: Callable[..., list[Lanes]]) -> Any:
    """Return code for the second half, which stores 128 bytes.

    `rounded` gives codes in the low seven bits, under other bits, from the builder, magnitudes, the grid, and what SR
    needs: first group, key, and an integer.
    """

    @vector_code(*CODES)
    def codes(builder, source, half, packed, element, group, key, integer):
        grid, finite = Grid(builder, element), load_finite(builder, half)
        bits, scaled = load_scaled(builder, kind, source, half, grid.top)
        magnitudes = rounded(builder, scaled, grid, group, key, integer)
        signed = [((b >> 24) & _SIGN) | (code & ~_SIGN) for b, code in zip(bits, magnitudes, strict=True)]
        blocks = [kind.pack_block(*signed[i : i + 2]) for i in range(0, len(signed), 2)]
        for i, pair in enumerate((blocks[:2], blocks[2:])):
            lanes = [lane for block in (2 * i, 2 * i + 1) for lane in [4 * block] * 8]
            stored = pair[0].pick(range(64), pair[1]).cast(I32) & finite.pick(lanes)
            stored.store(builder.add(packed, ir.Constant(I64, 64 * i)))

    return codes


def _rounded_even(_: Any, scaled: list[Lanes], grid: Grid, *__: Any) -> list[Lanes]:
    return [grid.round_even(v) for v in scaled]


def _rounded_by_constant(
    builder: Any, scaled: list[Lanes], grid: Grid, group: Any, key: Any, integer: Any
) -> list[Lanes]:
    same = splat(builder, integer, 16)
    return [grid.round_by(v, same) for v in scaled]


def _rounded_randomly(per_call: int) -> Callable[..., list[Lanes]]:
    def rounded(builder, scaled, grid, group, key, integer):
        random = random_vectors(builder, group, key, integer, STEP, per_call)
        return [grid.round_by(v, r) for v, r in zip(scaled, random, strict=True)]

    return rounded


_row_even = encoder(FLOAT32, 0, scales_float32, _codes(FLOAT32, _rounded_even), STEP)
_row_even_bfloat16 = encoder(BFLOAT16, 0, scales_bfloat16, _codes(BFLOAT16, _rounded_even), STEP)
_row_by_constant = encoder(FLOAT32, 0, scales_float32, _codes(FLOAT32, _rounded_by_constant), STEP)
_row_random_16 = encoder(FLOAT32, STEP // 8, scales_float32, _codes(FLOAT32, _rounded_randomly(8)), STEP)
_row_random_32 = encoder(FLOAT32, STEP // 4, scales_float32, _codes(FLOAT32, _rounded_randomly(4)), STEP)


@Native
def encode_byte_rows(
    source, source_step, half, rows, steps,
    floor, floor_step, packed, packed_step, scales, scales_step, group, group_step, job,
):  # fmt: skip
    """Do what `encode_rows` does, to codes of eight bits."""
    round_up, zero_scale, prescale, rounding, integer, key = read_job(job)[4]
    _, _, max_exponent, element = read_job(job)[6]
    policy, room = (round_up, zero_scale, prescale, max_exponent), halves()
    for r in range(rows if steps else 0):
        x, p, s, g = (
            source + source_step * r,
            packed + packed_step * r,
            scales + scales_step * r,
            group + group_step * r,
        )
        if rounding == EVEN and half:
            _row_even_bfloat16(x, steps, floor, floor_step, p, s, element, g, policy, key, integer, room)
        elif rounding == EVEN:
            _row_even(x, steps, floor, floor_step, p, s, element, g, policy, key, integer, room)
        elif rounding == CONSTANT:
            _row_by_constant(x, steps, floor, floor_step, p, s, element, g, policy, key, integer, room)
        elif rounding == RANDOM_16:
            _row_random_16(x, steps, floor, floor_step, p, s, element, g, policy, key, integer, room)
        else:
            _row_random_32(x, steps, floor, floor_step, p, s, element, g, policy, key, integer, room)
