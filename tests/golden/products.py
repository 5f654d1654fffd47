"""Drafts of golden vectors of a block format about stored arrays: dequantization and products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from golden.draft import draft
from mxref.formats import BlockFormat, ElementFormat
from mxref.vectors import DEFAULT, Record, RecordOp
from mxref.vectors.data import code_of, digits_text, input_words

Rows = list[list[tuple[int, list[int]]]]
"""Rows of an operand: blocks of a scale code and their element codes, zeros where they end."""


def dequantize(made: BlockFormat) -> Iterator[Record]:
    """Every code under scale codes from end to end."""
    element = made.element
    digits = -(-element.bits // 4)
    codes = np.resize(np.arange(1 << element.bits), max(1 << element.bits, made.k))  # whole blocks
    of_element, stored = {
        4: ("formats.element", "packing.nibbles"),
        6: ("formats.fp6", "packing.sixes"),
        8: ("formats.fp8", "packing.bytes"),
    }[element.bits]
    clauses = ["formats.e8m0", of_element, "dequantize.value"]
    asked = {"float32": (0, 1, 126, 127, 128, 200, 247, 253, 254, 255), "bfloat16": (0, 127, 247, 254)}
    for out, scales in asked.items():
        for scale in scales:
            ends = ["dequantize.overflow"] * (scale > 127 + 127 - element.max_exponent - 1)
            special = not np.isfinite(element.values).all()
            first = ["dequantize.nan"] if scale == 255 or (special and scale == 126) else []
            first += [stored] if scale == 127 else []
            yield draft(
                RecordOp.DEQUANTIZE, f"{made.name}.{out}.{scale:02x}", [*first, *ends, *clauses],
                "every code under this scale code", out=out, format=made.name,
                scales=f"{scale:02x}" * (codes.size // made.k), codes=digits_text(codes, digits),
            )  # fmt: skip


def products(a: BlockFormat, b: BlockFormat) -> Iterator[Record]:
    """Products of the file: of two operands of its own format, or of one with another format."""
    own = a if a.name != DEFAULT else b
    answers = [("exact", "float32"), ("ordered", "float32"), ("ordered", "bfloat16")]
    for name, (clauses, note, left, right) in _operands(a, b).items():
        for profile, out in answers if name == "drawn" else answers[:2]:
            for prescaled in product((None, True), repeat=2) if name == "drawn" else [(None, None)]:
                suffix = "".join(side for side, flag in zip("ab", prescaled, strict=True) if flag)
                extra = ["gemm.prescale"] * any(prescaled) + ["gemm.output"] * (out == "bfloat16")
                yield draft(
                    RecordOp.SCALED_GEMM, f"{own.name}.gemm.{a.name}.{b.name}.{name}.{profile}.{out}"
                    + f".prescaled{suffix}" * bool(suffix),
                    [*clauses, *extra, f"gemm.{profile}", "gemm.block_dot"], note, profile=profile, out=out,
                    m=len(left), n=len(right), k=a.k * len(left[0]),
                    a_format=a.name if a.name != DEFAULT else None, b_format=b.name if b.name != DEFAULT else None,
                    a_prescale=prescaled[0], b_prescale=prescaled[1], **_stored(a, "a", left), **_stored(b, "b", right),
                )  # fmt: skip


def _stored(made: BlockFormat, name: str, rows: Rows) -> dict[str, Any]:
    digits = -(-made.element.bits // 4)
    codes = [(codes + [0] * made.k)[: made.k] for row in rows for _, codes in row]
    return {
        f"{name}_scales": digits_text([scale for row in rows for scale, _ in row], 2),
        f"{name}_codes": digits_text(codes, digits),
    }


def _drawn(made: BlockFormat, seed: int, count: int, blocks: int, base: int, spread: int) -> Rows:
    """Return drawn rows of numbers: a special code is taken without its highest exponent bit."""
    words = input_words(seed, 0, count * blocks * (made.k + 1)).reshape(count, blocks, -1)
    codes = words[..., 1:] & np.uint32((1 << made.element.bits) - 1)
    special = ~np.isfinite(np.array(made.element.values)[codes])
    codes = np.where(special, codes & ~np.uint32(made.element.sign >> 1), codes)
    scales = base + words[..., 0] % np.uint32(spread)
    return [
        [(int(s), c.tolist()) for s, c in zip(row_scales, row_codes, strict=True)]
        for row_scales, row_codes in zip(scales, codes, strict=True)
    ]


def _operands(a: BlockFormat, b: BlockFormat) -> dict[str, tuple[list[str], str, Rows, Rows]]:
    """Return the operands of the products by name, with their own clauses and what they are meant to catch."""

    def blocks(made: BlockFormat, *rows: Sequence[tuple[int, Sequence[float]]]) -> Rows:
        return [
            [(scale, [code_of(v, made.element) for v in values]) for scale, values in row] for row in rows
        ]

    largest = a.element.max_value, b.element.max_value
    least = a.element.magnitudes[1], b.element.magnitudes[1]
    found = {
        "drawn": ([], "blocks that matter to each other", _drawn(a, 5, 3, 4, 122, 8), _drawn(b, 6, 4, 4, 122, 8)),
        "apart": ([], "blocks of all magnitudes", _drawn(a, 7, 4, 4, 0, 255), _drawn(b, 8, 4, 4, 0, 255)),
        "cancel": (
            ["gemm.block_dot"], "a small product between large ones that cancel",
            blocks(a, [(127, (largest[0], least[0], -largest[0]))], [(127, (-largest[0], largest[0], least[0]))]),
            blocks(b, [(127, (largest[1], least[1], largest[1]))], [(127, (largest[1], largest[1], -least[1]))]),
        ),
        "nan": (
            ["gemm.nan"], "a NaN block gives NaN in its row or column and nowhere else",
            blocks(a, [(255, ()), (127, (1.0,))], [(127, (1.0,)), (127, (1.0,))]),
            blocks(b, [(127, (1.0,)), (127, (1.0,))], [(127, (1.0,)), (255, ())]),
        ),
    }  # fmt: skip
    if a == b and a.element.mantissa_bits:  # without a mantissa there is no 3
        high = min(12, a.element.max_exponent)
        ones = 2.0**high, 2.0 ** max(high - 12, a.element.unit_exponent)
        found["tie"] = (
            ["gemm.block_dot"], "half a unit of the accumulator, and a little more or less",
            blocks(a, *([(127, (*ones, sign * least[0]))] for sign in (1, -1))),
            blocks(b, *([(127, (ones[0], odd * ones[1], least[1]))] for odd in (1, 3))),
        )  # fmt: skip
    special = _special_codes(a.element)
    if special:
        one = [code_of(1.0, b.element)] * b.k
        found["special"] = (
            ["gemm.special"], "codes of NaN and Inf: IEEE arithmetic on what they are",
            [[(127, [0, code]), (127, [0, code_of(1.0, a.element)])] for code in special]
            + [[(127, [special[0], special[-1]]), (0, [])]],
            [[(127, one)] * 2, [(127, [code | b.element.sign for code in one]), (0, one)], [(127, []), (127, one)]],
        )  # fmt: skip
    return found


def _special_codes(element: ElementFormat) -> list[int]:
    """Return a code of each kind that is no number, with either sign."""
    first: dict[str, int] = {}
    for code, value in enumerate(element.values):
        if not np.isfinite(value):
            first.setdefault(f"{np.isnan(value)} {code & element.sign}", code)
    return list(first.values())
