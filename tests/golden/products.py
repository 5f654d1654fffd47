"""Drafts of golden vectors of a block format about stored arrays: dequantization and products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from golden.draft import draft
from mxref.formats import BlockFormat, ElementFormat, Negatives
from mxref.vectors import DEFAULT, Record, RecordOp
from mxref.vectors.data import code_of, digits_text, input_words, words_text

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
    if element.negatives is Negatives.TWOS_COMPLEMENT:
        of_element = "formats.int8"
    if not made.scale.powers:
        yield from _under_tensor_scales(made, [of_element, "formats.scale", "dequantize.value"])
        return
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


def _under_tensor_scales(made: BlockFormat, clauses: list[str]) -> Iterator[Record]:
    """Every code under every scale code, then under some of them and scales of tensors from end to end."""
    scale, count = made.scale, max(1 << made.element.bits, made.k)
    codes = digits_text(np.resize(np.arange(1 << made.element.bits), count), -(-made.element.bits // 4))
    some = [0, 1, 3, 7, 8, 9, 21, scale.one_code, 63, 90, scale.max_code, scale.nan_code, 0xB8, 255]
    every = list(range(256)) if count <= 16 else some  # a record is one line, and its length is limited
    asked = [("float32", 0x3F800000, every), ("bfloat16", 0x3F800000, some)]
    if made.tensor_scale:
        asked += [(out, tensor, some) for out in ("float32", "bfloat16") for tensor in _TENSOR_SCALES]
    for out, tensor, scales in asked:
        yield draft(
            RecordOp.DEQUANTIZE, f"{made.name}.{out}.{tensor:08x}", [*clauses, "dequantize.nan", "packing.scales"],
            "every code under these scale codes and this scale of the tensor", out=out, format=made.name,
            tensor_scale=words_text([tensor]) if made.tensor_scale else None,
            scales=digits_text(np.repeat(scales, count // made.k), 2), codes=codes * len(scales),
        )  # fmt: skip


_WIDE = ("drawn", "infinities")
"""Operands whose products have each type of result and each prescale."""

_TENSOR_SCALES = (
    0x3DCCCCCD,
    0x39C30C31,
    0x00000001,
    0x00000003,
    0x007FFFFF,
    0x00C30C31,
    0x76C30C31,
    0x7F7FFFFF,
)
"""Words of scales of tensors, subnormal ones too, and such that large values overflow."""

_TENSOR_PAIRS = (
    (0x3F800000, 0x3F800000), (0x39C30C31, 0x3DCCCCCD), (0x7F000000, 0x00800001), (0x00800001, 0x7F000000),
    (0x20000003, 0x1F000005),
)  # fmt: skip
"""Words of the scales of two tensors, such that the order of the last products shows."""


def products(a: BlockFormat, b: BlockFormat) -> Iterator[Record]:
    """Products of the file: of two operands of its own format, or of one with another format."""
    own = a if a.name != DEFAULT else b
    answers = [("exact", "float32"), ("ordered", "float32"), ("ordered", "bfloat16")]
    if not a.scale.powers:
        yield from _scaled_products(a, b)
        return
    for name, (clauses, note, left, right) in _operands(a, b).items():
        for profile, out in answers if name in _WIDE else answers[:2]:
            for prescaled in product((None, True), repeat=2) if name in _WIDE else [(None, None)]:
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


def _scaled_products(a: BlockFormat, b: BlockFormat) -> Iterator[Record]:
    """Products under scales with a mantissa, for drawn operands under all pairs of scales of tensors."""
    answers = [("exact", "float32"), ("ordered", "float32"), ("ordered", "bfloat16"), ("exact", "bfloat16")]
    tensor_clauses = ["gemm.tensor_scale"] * (a.tensor_scale or b.tensor_scale)
    for name, (clauses, note, left, right) in _operands(a, b).items():
        under_all = a.tensor_scale and name in ("drawn", "apart")
        pairs = list(enumerate(_TENSOR_PAIRS)) if under_all else [(0, _TENSOR_PAIRS[0])]
        for (number, tensors), (profile, out) in product(pairs, answers):
            yield draft(
                RecordOp.SCALED_GEMM, f"{a.name}.gemm.{name}.{number}.{profile}.{out}",
                [*clauses, *tensor_clauses, "gemm.output", f"gemm.{profile}", "gemm.block_dot"], note,
                profile=profile, out=out, m=len(left), n=len(right), k=a.k * len(left[0]), a_format=a.name,
                b_format=b.name, a_tensor_scale=words_text([tensors[0]]) if a.tensor_scale else None,
                b_tensor_scale=words_text([tensors[1]]) if b.tensor_scale else None,
                **_stored(a, "a", left), **_stored(b, "b", right),
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

    assert a.scale == b.scale
    one, nan = a.scale.one_code, a.scale.nan_code
    near = one - (5 << a.scale.mantissa_bits), 8 << a.scale.mantissa_bits  # eight binades around 1
    largest = a.element.max_value, b.element.max_value
    least = a.element.magnitudes[1], b.element.magnitudes[1]
    found = {
        "drawn": ([], "blocks that matter to each other", _drawn(a, 5, 3, 4, *near), _drawn(b, 6, 4, 4, *near)),
        "apart": ([], "blocks of all magnitudes", _drawn(a, 7, 4, 4, 0, nan), _drawn(b, 8, 4, 4, 0, nan)),
        "cancel": (
            ["gemm.block_dot"], "a small product between large ones that cancel",
            blocks(a, [(one, (largest[0], least[0], -largest[0]))], [(one, (-largest[0], largest[0], least[0]))]),
            blocks(b, [(one, (largest[1], least[1], largest[1]))], [(one, (largest[1], largest[1], -least[1]))]),
        ),
        "nan": (
            ["gemm.nan"], "a NaN block gives NaN in its row or column and nowhere else",
            blocks(a, [(nan, ()), (one, (1.0,))], [(one, (1.0,)), (one, (1.0,))]),
            blocks(b, [(one, (1.0,)), (one, (1.0,))], [(one, (1.0,)), (nan, ())]),
        ),
    }  # fmt: skip
    if a == b and a.element.mantissa_bits:  # without a mantissa there is no 3
        high = min(12, a.element.max_exponent)
        ones = 2.0**high, 2.0 ** max(high - 12, a.element.unit_exponent)
        found["tie"] = (
            ["gemm.block_dot"], "half a unit of the accumulator, and a little more or less",
            blocks(a, *([(one, (*ones, sign * least[0]))] for sign in (1, -1))),
            blocks(b, *([(one, (ones[0], odd * ones[1], least[1]))] for odd in (1, 3))),
        )  # fmt: skip
    if not a.scale.powers:
        high, low = a.scale.values.index(128.0), 1  # products of 2^14 and 2^-18
        found["half"] = (
            ["gemm.block_dot"], "half a unit of the accumulator, which a later block decides",
            blocks(a, *([(high, (1.0,)), (low, (4.0,) * 16), (low, (sign * least[0],))] for sign in (1, -1))),
            blocks(b, *([(high, (1.0,)), (low * odd, (4.0,) * 16), (low, (least[1],))] for odd in (1, 3))),
        )  # fmt: skip
    special = _special_codes(a.element)
    if special:
        plus = [code_of(1.0, b.element)] * b.k
        found["special"] = (
            ["gemm.special"], "codes of NaN and Inf: IEEE arithmetic on what they are",
            [[(127, [0, code]), (127, [0, code_of(1.0, a.element)])] for code in special]
            + [[(127, [special[0], special[-1]]), (0, [])]],
            [[(127, plus)] * 2, [(127, [code | b.element.sign for code in plus]), (0, plus)], [(127, []), (127, plus)]],
        )  # fmt: skip
    if a == b and math.inf in a.element.values:
        note = "infinities beside numbers, zeros, each other and a sum that overflowed, in a block and across blocks"
        found["infinities"] = (["gemm.special"], note, *_infinities(a))
    return found


def _infinities(made: BlockFormat) -> tuple[Rows, Rows]:
    """Return rows of three blocks each; the largest products overflow where both scales are the largest."""
    inf, top, one, high = math.inf, made.element.max_value, made.scale.one_code, made.scale.max_code

    def rows(*each: Sequence[tuple[int, Sequence[float]]]) -> Rows:
        return [
            [(scale, [made.element.values.index(v) for v in values]) for scale, values in row] for row in each
        ]

    left = rows(
        ((one, (inf,)), (one, (1.0,)), (one, (-1.0,))),
        ((one, (1.0,)), (one, (inf,)), (one, (1.0,))),
        ((one, (inf,)), (one, (-inf,)), (one, (1.0,))),
        ((high, (top, top)), (one, (-inf,)), (one, (1.0,))),
        ((high, (-top, -top)), (one, (1.0,)), (one, (-inf,))),
        ((one, (inf, -inf)), (one, (1.0,)), (one, (1.0,))),
    )
    right = rows(
        ((one, (1.0, 1.0)), (one, (1.0, 1.0)), (one, (1.0, 1.0))),
        ((one, (1.0, -1.0)), (one, (-1.0, 1.0)), (one, (1.0, 1.0))),
        ((high, (top, top)), (one, (1.0, 1.0)), (one, (1.0, 1.0))),
        ((one, (inf, 1.0)), (one, (1.0, 1.0)), (one, (1.0, 1.0))),
        ((one, (1.0, 1.0)), (one, (0.0, 1.0)), (one, (1.0, 1.0))),
        ((one, (1.0, 1.0)), (one, (1.0, inf)), (one, (-inf,))),
    )
    return left, right


def _special_codes(element: ElementFormat) -> list[int]:
    """Return a code of each kind that is no number, with either sign."""
    first: dict[str, int] = {}
    for code, value in enumerate(element.values):
        if not np.isfinite(value):
            first.setdefault(f"{np.isnan(value)} {code & element.sign}", code)
    return list(first.values())
