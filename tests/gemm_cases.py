"""Operands of products in every pair of formats that show one wrong bit of `ordered`; each backend multiplies them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from mxref.conformance.checks.gemms import spanning
from mxref.formats import BLOCK_FORMATS, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray

K = 32
Pair = tuple[BlockFormat, BlockFormat]
Operands = Iterator[tuple[MXArray, MXArray]]


def pairs(formats: frozenset[BlockFormat]) -> list[Pair]:
    """Return each pair of formats that can be multiplied, in the order of the table of formats."""
    known = [made for made in BLOCK_FORMATS.values() if made in formats]
    return [(a, b) for a, b in itertools.product(known, repeat=2) if a.k == b.k]


def ids(pair: Pair) -> str:
    """Return the name of a pair in the title of a test."""
    return "-".join(map(str, pair))


def operand(
    made: BlockFormat,
    rows: int,
    length: int,
    scales: tuple[int, int],
    seed: int,
    *,
    special: bool = False,
    **fields: Any,
) -> MXArray:
    """Any finite codes, or NaN and Inf too, one block in ten all zeros, under scale codes drawn from a range."""
    rng = np.random.default_rng(seed)
    element, k = made.element, made.k
    codes = rng.integers(0, 2 * element.sign, (rows, length // k, k), np.uint8)
    beyond = (codes & (element.sign - 1)) > element.max_code
    keep = rng.random(codes.shape) < (0.05 if special else 0)
    codes[beyond & ~keep] &= 0x83
    codes[rng.random(codes.shape[:2]) < 0.1] &= element.sign
    drawn = rng.integers(scales[0], scales[1] + 1, codes.shape[:2]).astype(np.uint8)
    packed = pack(codes.reshape(rows, length), element)
    if made.tensor_scale:
        drawn = np.where(drawn > made.scale.nan_code, drawn // 2, drawn).astype(np.uint8)
        fields["tensor_scale"] = np.exp2(np.float32([rng.uniform(-126, 126)]))
    return MXArray(packed, drawn, (rows, length), 1, format=made, **fields)


def of(made: BlockFormat, elements: list[list[int]], scales: list[list[int]]) -> MXArray:
    """Rows of blocks, each given by its first codes of eight bits, and their scale codes."""
    blocks = len(scales[0])
    codes = np.zeros((len(scales), blocks, K), np.uint8)
    for i, first in enumerate(elements):
        codes[i // blocks, i % blocks, : len(first)] = first
    length = blocks * K
    return MXArray(
        codes.reshape(len(scales), length), np.uint8(scales), (len(scales), length), 1, format=made
    )


def drawn(pair: Pair) -> Operands:
    """Yield operands of many shapes under small scales, large ones, all of them, and NaN."""
    for (m, n, length), scales in (
        ((1, 1, K), (127, 127)),
        ((5, 7, 2 * K), (0, 254)),
        ((70, 133, 3 * K), (120, 134)),
        ((9, 260, K), (100, 255)),
        ((66, 3, 8 * K), (0, 3)),
        ((6, 40, 8 * K), (185, 200)),
    ):
        a, b = (operand(each, rows, length, scales, rows) for each, rows in zip(pair, (m, n), strict=True))
        yield a, b


def special(pair: Pair) -> Operands:
    """Yield operands with codes of NaN and Inf, where the formats have some."""
    for scales in ((120, 134), (180, 255)):
        a, b = (operand(each, 30, 3 * K, scales, i, special=True) for i, each in enumerate(pair))
        yield a, b


def infinities() -> tuple[MXArray, MXArray, np.ndarray]:
    """Return operands whose infinities meet, and their product [5, 2]."""
    one, infinity, minus, zero = [0x3C], [0x7C], [0xFC], [0x00]
    rows = [[infinity, one], [infinity, minus], [one, minus], [zero, infinity], [infinity, infinity]]
    a = of(MXFP8_E5M2, [block for row in rows for block in row], [[127, 127]] * len(rows))
    b = of(MXFP8_E5M2, [one, one, one, zero], [[127, 127]] * 2)
    inf, nan = np.inf, np.nan
    return a, b, np.float32([[inf, inf], [nan, nan], [-inf, nan], [inf, nan], [inf, nan]])


def _rounded(value: Fraction) -> np.float32:
    """The float32 nearest to a finite value of moderate size, ties to even."""
    near = np.float32(float(value))
    found = [np.nextafter(near, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)] + [near]
    return min(found, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


def one_rounding(made: BlockFormat, sign: int) -> Iterator[tuple[MXArray, MXArray, np.float32]]:
    """Yield operands in MXFP8 and their product, beside a tie of float32 by less than float64 can tell.

    That is half a last place and the smallest product.
    """
    element = made.element
    smallest, power = 1, element.max_code & ~((1 << element.mantissa_bits) - 1)  # 2^emax
    one = element.bias << element.mantissa_bits
    exponent = 2 * element.max_exponent + 24  # of an accumulator whose half last place is 2^(2 emax)
    half = exponent // 2
    for last, tiny in itertools.product((0, 1), (smallest, smallest | 0x80)):
        # The accumulator is 2^exponent, or one last place above: its second block is 2 times 2^emax * 2^emax.
        a = of(
            made,
            [[one | sign], [power | sign] * (2 * last), [power | sign, tiny ^ sign]],
            [[127 + half, 127, 127]],
        )
        b = of(made, [[one], [power] * (2 * last), [power, smallest]], [[127 + exponent - half, 127, 127]])
        unit = Fraction(2) ** (2 * element.unit_exponent)
        total = Fraction(2) ** exponent + (2 * last + 1) * Fraction(2) ** (2 * element.max_exponent)
        total += unit if tiny == smallest else -unit
        want = _rounded(-total if sign else total)
        assert (np.float32(float(total)) != abs(want)) == ((last == 0) == (tiny == smallest)), (
            "float64 would do"
        )
        yield a, b, want


def cancelled() -> Iterator[tuple[MXArray, MXArray, float]]:
    """Yield the largest products of E5M2, cancelled but for the smallest, and their sum: all bits of 69 matter."""
    top, smallest = 0x7B, 0x01
    for tiny in (0x01, 0x81):
        a = of(MXFP8_E5M2, [[top, top | 0x80, tiny]], [[127]])
        yield a, of(MXFP8_E5M2, [[top, top, smallest]], [[127]]), 2.0**-32 if tiny == 1 else -(2.0**-32)
    a = of(MXFP8_E5M2, [[top] * 16 + [top | 0x80] * 15 + [0x01]], [[127]])
    yield a, of(MXFP8_E5M2, [[top] * 31 + [smallest]], [[127]]), 57344.0**2


def spans() -> Iterator[tuple[MXArray, MXArray, float]]:
    """Yield products of blocks that span the bits that float64 adds without loss, or one or two more, and their sum."""
    for pair in ((MXFP8_E5M2, MXFP8_E5M2), (MXFP8_E4M3, MXFP8_E5M2)):
        for span in (48, 49, 50):
            ((a, b),) = spanning(span, *pair)
            yield a, b, 2.0 ** sum(made.element.unit_exponent for made in pair)


def limits(pair: Pair) -> Operands:
    """Yield the largest dots and the smallest ones, where their products with both scales leave float32."""
    operands = []
    for made in pair:
        largest, smallest, negative = made.element.max_code, 1, made.element.sign | 1
        rows = [[largest] * K, [largest] * K, [smallest] + [0] * (K - 1), [negative] + [0] * (K - 1)]
        operands.append(
            pack(np.uint8([[*rows[i], *rows[j]] for i, j in ((0, 3), (1, 2), (2, 3))]), made.element)
        )
    for total in (*range(98, 124, 5), *range(355, 380, 3)):
        for code in (max(0, total - 254), total // 2, min(254, total)):
            a, b = (
                MXArray(codes, np.full((3, 2), scale, np.uint8), (3, 2 * K), 1, format=made)
                for codes, scale, made in zip(operands, (code, total - code), pair, strict=True)
            )
            yield a, b


def tensor_scales() -> Operands:
    """Yield NVFP4 under scales of tensors, between which a result may overflow or underflow."""
    a, b = (operand(NVFP4, rows, 4 * K, (0, 126), rows) for rows in (5, 7))
    for t in itertools.product((1.0, 1 / 3, 1.5e-45, 2e38, 3e-20), repeat=2):
        left, right = (replace(q, tensor_scale=np.float32([one])) for q, one in zip((a, b), t, strict=True))
        yield left, right
