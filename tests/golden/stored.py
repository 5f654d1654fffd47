"""Drafts of golden vectors about stored arrays: dequantization, packing, scaled GEMM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from golden.draft import bits_of, codes_block, draft, hex64
from mxref.formats import E2M1
from mxref.vectors import Record, RecordOp, Source
from mxref.vectors.data import digits_text, input_words, words_text


def dequantize() -> Iterator[Record]:
    """Yield the drafts of the chapter dequantize."""
    both = digits_text([*range(16), *range(15, -1, -1)], 1)
    values = bits_of([*E2M1.magnitudes, *(-m for m in E2M1.magnitudes)])
    table = np.concatenate([values, values[::-1]])
    yield draft(
        RecordOp.DEQUANTIZE, "dequantize.elements", ["formats.e2m1", "dequantize.value"], "OCP MX v1.0, table 5: E2M1",
        source=Source.STANDARD, expected={"y": words_text(table)}, out="float32", scales="7f", codes=both,
    )  # fmt: skip
    powers = {"00": 0x00400000, "01": 0x00800000, "7f": 0x3F800000, "fe": 0x7F000000, "ff": 0x7FC00000}
    for code, word in powers.items():
        expected = words_text(np.full(32, word, np.uint32))
        yield draft(
            RecordOp.DEQUANTIZE, f"dequantize.scale.{code}",
            ["formats.e8m0", "dequantize.nan" if code == "ff" else "dequantize.value"],
            "OCP MX v1.0, table 7: E8M0", source=Source.STANDARD, expected={"y": expected}, out="float32",
            scales=code, codes="2" * 32,
        )  # fmt: skip
    narrow = (*range(4), *range(119, 136), *range(248, 256))
    for out, codes in (("float32", range(256)), ("bfloat16", narrow)):
        for byte in codes:
            clauses = ["formats.e8m0", "formats.e2m1", "dequantize.value"]
            if byte >= 253:
                clauses.insert(0, "dequantize.nan" if byte == 255 else "dequantize.overflow")
            yield draft(
                RecordOp.DEQUANTIZE, f"dequantize.{out}.{byte:02x}", clauses, "every code at this byte",
                out=out, scales=f"{byte:02x}", codes=both,
            )  # fmt: skip
    for name, shape, axis in (
        ("axis0", [64, 3], 0),
        ("middle", [2, 32, 3], 1),
        ("padded", [3, 40], 1),
        ("padded0", [5, 4], 0),
    ):
        rows = int(np.prod(shape)) // shape[axis]
        count = rows * (-(-shape[axis] // 32))
        yield draft(
            RecordOp.DEQUANTIZE, f"dequantize.{name}", ["quantize.axis", "dequantize.value"],
            "back in the order of the axes, without padding", out="float32", shape=shape, axis=axis,
            scales=digits_text(120 + input_words(7, 0, count) % 16, 2),
            codes=digits_text(input_words(7, 1, 32 * count) & 15, 1),
        )  # fmt: skip


def packing() -> Iterator[Record]:
    """Yield the drafts of the chapter packing."""
    every = digits_text(np.arange(256), 2)
    yield draft(
        RecordOp.UNPACK, "packing.unpack", ["packing.nibbles"], "every byte: the first element is the low nibble",
        packed=every,
    )  # fmt: skip
    pairs = "".join(f"{low:x}{high:x}" for high in range(16) for low in range(16))
    yield draft(RecordOp.PACK, "packing.pack", ["packing.nibbles"], "every pair of codes", codes=pairs)
    yield draft(
        RecordOp.EXCHANGE, "packing.ml_dtypes", ["packing.exchange", "packing.scales"],
        "float4_e2m1fn and float8_e8m0fnu hold the same bits", packed=every, scales=every,
    )  # fmt: skip


def gemm() -> Iterator[Record]:
    """Yield the drafts of the chapter gemm."""
    answers = [(profile, out) for profile in ("exact", "ordered") for out in ("float32", "bfloat16")]
    for name, (clauses, note, a, b) in _operands().items():
        for profile, out in answers:
            for prescaled in range(3) if name in ("random", "range") else (0,):
                yield _product(
                    f"gemm.{name}", [*clauses, "gemm.block_dot"], note, a, b, profile, out, prescaled
                )
    _, note, a, b = _operands()["random"]
    for out, prescaled in itertools.product(("float32", "bfloat16"), range(3)):
        yield _product("gemm.random", ["gemm.bounded"], note, a, b, "bounded", out, prescaled)
    for number, (m, n, k) in enumerate(((32, 48, 512), (5, 7, 4096))):
        for profile in ("ordered", "exact"):
            yield draft(
                RecordOp.SCALED_GEMM, f"gemm.digest.{m}x{n}x{k}.{profile}", [f"gemm.{profile}", "gemm.block_dot"],
                "operands made from a seed", profile=profile, out="float32", m=m, n=n, k=k, operand_seed=hex64(number),
            )  # fmt: skip


_OWN = ("gemm.nan", "gemm.operands")
"""Clauses that a record is about before it is about its profile."""

_Rows = list[list[tuple[int, str]]]
"""Rows of an operand: blocks of a scale byte and 32 code digits."""


def _product(
    id: str, clauses: list[str], note: str, a: _Rows, b: _Rows, profile: str, out: str, prescaled: int
) -> Record:
    extra = ["gemm.prescale"] * (prescaled > 0) + ["gemm.output"] * (out == "bfloat16")
    names = [*(c for c in clauses if c in _OWN), *extra, f"gemm.{profile}", *clauses]
    which = (None, True) if prescaled == 1 else (True, True) if prescaled else (None, None)
    operands: dict[str, Any] = {
        f"{name}_{part}": "".join(f"{block[at]:02x}" if at == 0 else str(block[at]) for line in rows for block in line)
        for name, rows in (("a", a), ("b", b))
        for at, part in enumerate(("scales", "codes"))
    }  # fmt: skip
    suffix = f".prescaled{prescaled}" if prescaled else ""
    return draft(
        RecordOp.SCALED_GEMM, f"{id}.{profile}.{out}{suffix}", names, note, profile=profile, out=out,
        m=len(a), n=len(b), k=32 * len(a[0]), a_prescale=which[0], b_prescale=which[1], **operands,
    )  # fmt: skip


def _random_rows(seed: int, count: int, blocks: int, base: int, spread: int) -> _Rows:
    words = input_words(seed, 0, count * blocks * 33).reshape(count, blocks, 33)
    return [
        [(base + int(block[32]) % spread, digits_text(block[:32] & 15, 1)) for block in line]
        for line in words
    ]


def _operands() -> dict[str, tuple[list[str], str, _Rows, _Rows]]:
    """Return the operands of the GEMM vectors by name, with the clauses and what they are meant to catch."""
    one, minus, six = codes_block((3, 2)), codes_block((3, 10)), codes_block((3, 7))
    half, full, cancelling = codes_block((3, 1)), "7" * 32, "7f" * 16
    edges = (0, 1, 63, 127, 190, 252, 253, 254)
    ones = [(127, one)]
    return {
        "products": (
            ["formats.e2m1"], "every pair of codes",
            [[(127, codes_block((5, code)))] for code in range(16)],
            [[(127, codes_block((5, code)))] for code in range(16)],
        ),
        "pairing": (
            ["packing.nibbles"], "element i of A meets element i of B",
            [[(127, codes_block((at, 2)))] for at in range(32)], [[(127, "0123456789abcdeffedcba9876543210")]],
        ),
        "range": (
            ["formats.e8m0"], "scale bytes from end to end: underflow to -0, subnormals, overflow to Inf",
            [[(byte, codes)] for byte in edges for codes in (half, minus)], [[(byte, six)] for byte in edges],
        ),
        "largest": (
            [], "the largest dot, 1152, beside the least",
            [[(127, full)], [(127, half)]], [[(127, full)], [(127, half)]],
        ),
        "exponents": (
            [], "operands that overflow float32 on their own, and whose product is small",
            [[(254, six), (254, codes_block((0, 4), (1, 12)))]], [[(3, six), (2, full)], [(0, half), (1, half)]],
        ),
        "order": (
            [], "large, small, minus large: what a sum in order loses",
            [[(150, one), (120, six), (150, minus)], [(120, six), (150, one), (150, minus)]],
            [[*ones, *ones, *ones], [(127, six), *ones, (127, six)]],
        ),
        "ties": (
            [], "halfway between two floats, then a little more: one rounding or many",
            [[(151, one), (127, one), (120, one)], [(151, one), (127, one), (120, minus)],
             [(152, one), (128, "2a" * 16), (128, one)],
             [(135, one), (127, one), (100, one)], [(135, one), (127, one), (100, minus)]],
            [[*ones, *ones, *ones], [*ones, (127, codes_block((3, 3))), *ones]],
        ),
        "infinity": (
            [], "an accumulator that overflowed stays infinite; the real sum does not",
            [[(254, full), (254, full), (1, one)], [(254, full), (254, cancelling), (254, minus)]],
            [[(200, six), (200, codes_block((3, 15))), *ones], [(127, six), (127, six), (254, six)]],
        ),
        "nan": (
            ["gemm.nan"], "a NaN block gives NaN in its row or column and nowhere else",
            [[(255, "0" * 32), *ones], [*ones, *ones], [*ones, (255, full)]],
            [[*ones, *ones], [*ones, (255, "0" * 32)]],
        ),
        "zero": (
            [], "a zero dot is +0, whatever its signs and scales",
            [[(254, "8" * 32)], [(254, cancelling)], [(0, "0" * 32)]], [[(254, full)], [(0, full)], [(127, "8" * 32)]],
        ),
        "empty": (["gemm.operands"], "a contraction over nothing gives +0", [[], []], [[], [], []]),
        "random": (
            [], "blocks that matter to each other",
            _random_rows(5, 3, 5, 122, 8), _random_rows(6, 4, 5, 122, 8),
        ),
        "apart": ([], "blocks of all magnitudes", _random_rows(7, 4, 6, 0, 255), _random_rows(8, 4, 6, 0, 255)),
    }  # fmt: skip
