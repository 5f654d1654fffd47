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

from mxref_numba.vector.encode import CODES, STEP, Source, load_finite, load_scaled, rows_encoder
from mxref_numba.vector.jobs import CONSTANT, EVEN, RANDOM_16, RANDOM_32
from mxref_numba.vector.lanes import I32, I64, Lanes, splat, vector_code
from mxref_numba.vector.native import Native
from mxref_numba.vector.philox import random_vectors
from mxref_numba.vector.rounding import Grid

_SIGN = 0x80


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


_ROUNDED: dict[int, Callable[..., list[Lanes]]] = {
    EVEN: _rounded_even,
    CONSTANT: _rounded_by_constant,
    RANDOM_16: _rounded_randomly(8),
    RANDOM_32: _rounded_randomly(4),
}


def _codes(kind: Source, rounding: int) -> Any:
    """Return code for the second half, which stores 128 bytes.

    What rounds gives codes in the low seven bits, under other bits, from the builder, magnitudes, the grid, and what
    SR needs: first group, key, and an integer.
    """
    rounded = _ROUNDED[rounding]

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


_encode = rows_encoder(_codes, STEP)


@Native
def encode_byte_rows(
    source, source_step, half, rows, steps,
    floor, floor_step, packed, packed_step, scales, scales_step, group, group_step, job,
):  # fmt: skip
    """Do what `encode_rows` does, to codes of eight bits."""
    _encode(
        source, source_step, half, rows, steps,
        floor, floor_step, packed, packed_step, scales, scales_step, group, group_step, job,
    )  # fmt: skip
