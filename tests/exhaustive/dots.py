"""Part e: pairs of element codes in block dots, at every place, under scales up to both ends of the range.

A row holds codes at few places and zeros elsewhere, so one small GEMM multiplies all pairs of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations, product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mxref
import oracle
from exhaustive.decodes import array
from exhaustive.families import FAMILIES, NUMBA, element_of, prefix, subjects
from exhaustive.sweep import Codes, Finding, Sweep, compare
from mxref.formats import MXFP4, BlockFormat

ENDS = (-254, -253, -150, -149, -127, -126, 0, 1, 127, 128, 253, 254)
"""Sums of two scale exponents: both ends, and around float32's smallest numbers, 1, and its overflow."""

Gemm = Callable[..., NDArray[Any]]
Scales = tuple[int, int]


def split(total: int, lean: int) -> Scales:
    """Two scale bytes whose exponents add up to `total`, with the first as low (0) or as high (1) as can be."""
    bounds = max(-127, total - 127), min(127, total + 127)
    first = bounds[lean]
    return first + 127, total - first + 127


def gemm_bits(
    dots: Sequence[tuple[Scales, Sequence[int], Sequence[int]]],
    profile: str,
    dtype: str = "float32",
    elements: tuple[oracle.Element, oracle.Element] = (oracle.E2M1, oracle.E2M1),
) -> int:
    """The oracle's bits of one element of a GEMM: per block the scale bytes, A's codes and B's codes."""
    a = [(scales[0], codes) for scales, codes, _ in dots]
    b = [(scales[1], codes) for scales, _, codes in dots]
    if profile == "exact":
        return oracle.gemm_exact(a, b, "bfloat16" if dtype == "bfloat16" else "float32", elements=elements)
    bits = oracle.gemm_ordered(a, b, elements=elements)
    return oracle.f32_bits_to_bf16_bits(bits) if dtype == "bfloat16" else bits


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """The bit patterns of float32 or bfloat16."""
    return values.view(np.uint16 if values.dtype == ml_dtypes.bfloat16 else np.uint32)


def rows_with(places: Sequence[int], length: int = 32) -> Codes:
    """All rows with free codes at `places`, which is 16 ** len(places) rows, and zeros elsewhere."""
    rows = np.zeros((16 ** len(places), length), np.uint8)
    rows[:, list(places)] = list(product(range(16), repeat=len(places)))
    return rows


def _scales(count: int, *scales: int) -> Codes:
    return np.tile(np.array(scales, np.uint8), (count, 1))


def single_pairs(subject: str, gemm: Gemm, profile: str, dtype: str, lean: int) -> Sweep:
    """One code against one code at each of 32 places, for every sum of scale exponents."""
    all_rows = np.concatenate([rows_with([place]) for place in range(32)])
    groups = [all_rows] if profile == "ordered" else list(all_rows.reshape(32, 16, 32))

    def check(chunk: int) -> Finding | None:
        scales = split(chunk - 254, lean)
        table = np.array(
            [[gemm_bits([(scales, [p], [q])], profile, dtype) for q in range(16)] for p in range(16)]
        )
        for rows in groups:
            a, b = (array(rows, _scales(len(rows), s)) for s in scales)
            got = bits_of(gemm(a, b, profile=profile, out_dtype=dtype))
            # Codes at different places meet zeros: the dot is 0, and the sum +0.
            want = np.zeros((len(rows) // 16, 16, len(rows) // 16, 16), got.dtype)
            for place in range(len(rows) // 16):
                want[place, :, place, :] = table
            finding = compare(
                got,
                want.reshape(got.shape),
                partial(_name_place, scales, len(rows)),
            )
            if finding is not None:
                return finding
        return None

    per_sum = len(groups) * len(groups[0]) ** 2
    side = ("A's exponent as low as can be", "A's exponent as high as can be")[lean]
    domain = f"{profile} to {dtype}: 256 code pairs at 32 places, all 509 sums of exponents, {side}"
    return Sweep("e", _name(subject), domain, 509 * per_sum, 509, check, (0, 1, 104, 105, 254, 507, 508))


@cache
def _quarters() -> NDArray[np.int64]:
    """Four times the dot of the code pairs (a1, b1) and (a2, b2): [a1 a2, b1 b2], by the oracle."""
    one = [[int(4 * oracle.block_dot([p], [q])) for q in range(16)] for p in range(16)]
    first, second = np.divmod(np.arange(256), 16)
    table = np.array(one)
    quarters: NDArray[np.int64] = table[first][:, first] + table[second][:, second]
    return quarters


def two_pairs(
    subject: str,
    gemm: Gemm,
    profile: str,
    places: Sequence[tuple[int, int]],
    sums: Sequence[int],
    label: str,
) -> Sweep:
    """All 2^16 combinations of two code pairs in one block, at the given pairs of places."""
    quarters = _quarters()
    _, where, inverse = np.unique(quarters, return_index=True, return_inverse=True)
    codes = rows_with([0, 1], 2).tolist()
    cases = list(product(sums, places))

    @cache
    def table(scales: Scales) -> NDArray[np.uint32]:
        bits = [gemm_bits([(scales, codes[w // 256], codes[w % 256])], profile) for w in where.tolist()]
        return np.array(bits, np.uint32)

    def check(chunk: int) -> Finding | None:
        total, at_places = cases[chunk]
        scales = split(total, 0)
        a, b = (array(rows_with(at_places), _scales(256, s)) for s in scales)
        got = bits_of(gemm(a, b, profile=profile))
        want = table(scales)[inverse].reshape(256, 256)
        return compare(got, want, partial(_name_place, (*scales, at_places), 256))

    domain = f"{profile}: 2^16 combinations of two code pairs at {label}, {len(sums)} sums of exponents"
    return Sweep("e", _name(subject), domain, len(cases) << 16, len(cases), check)


def two_blocks(subject: str, gemm: Gemm, profile: str) -> Sweep:
    """A code pair in each of two blocks, under all pairs of the exponent sums in ENDS."""
    sums = list(product(ENDS, repeat=2))
    one = np.array([[int(4 * oracle.block_dot([p], [q])) for q in range(16)] for p in range(16)])
    distinct, where = np.unique(one, return_index=True)
    pairs = [divmod(int(w), 16) for w in where]
    index = np.searchsorted(distinct, one)
    first, second = np.divmod(np.arange(256), 16)
    rows = rows_with([5, 32 + 17], 64)

    def check(chunk: int) -> Finding | None:
        (a1, b1), (a2, b2) = (split(total, lean) for lean, total in enumerate(sums[chunk]))
        got = bits_of(
            gemm(array(rows, _scales(256, a1, a2)), array(rows, _scales(256, b1, b2)), profile=profile)
        )
        table = np.array(
            [
                [gemm_bits([((a1, b1), [p], [q]), ((a2, b2), [r], [s])], profile) for r, s in pairs]
                for p, q in pairs
            ],
            np.uint32,
        )
        want = table[index[first][:, first], index[second][:, second]]
        return compare(got, want, partial(_name_place, (a1, b1, a2, b2), 256))

    domain = f"{profile}: 2^16 combinations of a code pair in each of two blocks, {len(sums)} pairs of exponent sums"
    return Sweep("e", _name(subject), domain, len(sums) << 16, len(sums), check)


@cache
def _different_dots(
    elements: tuple[oracle.Element, oracle.Element],
) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """Code pairs, one for every product there is, and for every pair [a, b] the place of its product's pair."""
    pairs: dict[object, tuple[int, int]] = {}
    places: dict[object, int] = {}
    index = np.empty((2 * elements[0].sign, 2 * elements[1].sign), np.int64)
    for p, q in product(*map(range, index.shape)):
        dot = oracle.block_dot([p], [q], elements)
        key = "nan" if dot != dot else dot
        pairs.setdefault(key, (p, q))
        index[p, q] = places.setdefault(key, len(places))
    return list(pairs.values()), index


def all_pairs(subject: str, gemm: Gemm, profile: str, formats: tuple[BlockFormat, BlockFormat]) -> Sweep:
    """Every code of A against every code of B, NaN and infinities among them, at a place that changes."""
    elements = element_of(formats[0]), element_of(formats[1])
    distinct, index = _different_dots(elements)

    def operand(side: int, place: int, byte: int) -> mxref.MXArray:
        rows = np.zeros((index.shape[side], 32), np.uint8)
        rows[:, place] = np.arange(len(rows))
        return array(rows, _scales(len(rows), byte), formats[side])

    def check(chunk: int) -> Finding | None:
        scales = split(ENDS[chunk // 2], chunk % 2)
        place = chunk * 5 % 32
        a, b = (operand(side, place, scales[side]) for side in (0, 1))
        got = bits_of(gemm(a, b, profile=profile))
        table = [gemm_bits([(scales, [p], [q])], profile, elements=elements) for p, q in distinct]
        want = np.array(table, np.uint32)[index]
        return compare(got, want, partial(_name_place, (*scales, place), index.shape[1]))

    chunks = 2 * len(ENDS)
    domain = (
        f"{prefix(*formats)}{profile}: all {index.size} code pairs, {len(ENDS)} sums of exponents, both ways"
    )
    return Sweep("e", _name(subject), domain, chunks * index.size, chunks, check)


def _name_place(setting: object, width: int, at: int) -> str:
    return f"scales and places {setting}, element {divmod(at, width)}"


def _name(subject: str) -> str:
    return "mxref.scaled_gemm" if subject == "reference" else f"{subject}: scaled_gemm"


def sweeps(family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield all sweeps of part e."""
    if family != "mxfp4":
        yield from _pairs_of_formats(FAMILIES[family])
        return
    gemms: dict[str, Gemm] = {"reference": mxref.scaled_gemm, "numba": NUMBA.scaled_gemm}
    everywhere = list(combinations(range(32), 2))
    neighbours = [(i, (i + 1) % 32) for i in range(32)]
    for subject, gemm in gemms.items():
        profiles = ("ordered", "exact") if subject == "reference" else ("ordered",)
        for profile in profiles:
            for lean in (0, 1):
                yield single_pairs(subject, gemm, profile, "float32", lean)
            yield single_pairs(subject, gemm, profile, "bfloat16", 0)
            if profile == "ordered":
                yield two_pairs(subject, gemm, profile, everywhere, ENDS, "all 496 pairs of places")
            else:
                yield two_pairs(
                    subject, gemm, profile, neighbours, (-254, 0, 254), "32 pairs of neighbouring places"
                )
                yield two_pairs(subject, gemm, profile, [(0, 31)], ENDS, "the first and last place")
            yield two_blocks(subject, gemm, profile)


def _pairs_of_formats(formats: tuple[BlockFormat, ...]) -> Iterator[Sweep]:
    """Yield the sweeps of all pairs of these formats and MXFP4, except MXFP4 with itself."""
    for pair in product((*formats, MXFP4), repeat=2):
        if set(pair) != {MXFP4}:
            for profile in ("ordered", "exact"):
                yield all_pairs("reference", mxref.scaled_gemm, profile, pair)
            if "numba" in subjects(*pair):
                yield all_pairs("numba", NUMBA.scaled_gemm, "ordered", pair)
