"""The inner step of quantization to codes that take a byte each, the sign on top.

The halves and their order are those of `encode.py`. The element format comes as numbers (`elements.py`), which each
step reads from the first-level cache: all formats but E2M1 share this code, which waits for memory anyway. Codes of
fewer than eight bits are packed afterwards (`scalar/packing.py`).
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

from llvmlite import ir

from mxref_numba.vector.encode import CODES, ElementType, load_finite, load_scaled, roundings, rows_encoder
from mxref_numba.vector.lanes import I32, I64, vector_code
from mxref_numba.vector.native import VectorNative
from mxref_numba.vector.rounding import Grid

_SIGN = 0x80


def _codes(kind: ElementType, rounding: int) -> Any:
    """Return code for the second half, which stores two vectors.

    A rounding gives codes in the low seven bits, under other bits. It takes the builder, magnitudes, and what SR needs:
    first group, key, and an integer.
    """

    @vector_code(*CODES)
    def codes(builder, source, half, packed, element, group, key, integer):
        grid, finite = Grid(builder, element), load_finite(builder, half)
        bits, scaled = load_scaled(builder, kind, source, half, grid.top)
        rounded = roundings(grid.round_even, grid.round_by)[rounding]
        magnitudes = rounded(builder, scaled, group, key, integer)
        signed = [((b >> 24) & _SIGN) | (code & ~_SIGN) for b, code in zip(bits, magnitudes, strict=True)]
        for i, bytes_ in enumerate(kind.pack_bytes(signed)):
            words = bytes_.cast(I32)
            blocks = [(words.count * i + word) // 8 for word in range(words.count)]
            (words & finite.pick([4 * block for block in blocks])).store(
                builder.add(packed, ir.Constant(I64, bytes_.count * i))
            )

    return codes


_encode = rows_encoder(_codes, 8)


@VectorNative
def encode_byte_rows(
    source, source_step, half, rows, steps,
    floor, floor_step, packed, packed_step, scales, scales_step, group, group_step, job,
):  # fmt: skip
    """Do what `encode_rows` does, to codes of a byte each."""
    _encode(
        source, source_step, half, rows, steps,
        floor, floor_step, packed, packed_step, scales, scales_step, group, group_step, job,
    )  # fmt: skip
