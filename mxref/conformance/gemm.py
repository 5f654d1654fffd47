"""Checks of the scaled GEMM, in every declared profile and output type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations

import numpy as np

from mxref.conformance.decode import LAYOUTS, drawn_array, given
from mxref.conformance.model import Check, Failure, Op, Plan, Subject, Verdict
from mxref.conformance.product import Product, product_check
from mxref.errors import ShapeError
from mxref.formats import E2M1, MXFP4
from mxref.gemm import OUT_DTYPES
from mxref.hadamard import Rotation
from mxref.mxarray import MXArray
from mxref.packing import pack
from mxref.recipe import GemmProfile

_ONE, _SIX, _HALF, _MINUS = 2, 7, 1, 8
_EDGES = (0, 1, 2, 63, 126, 127, 128, 190, 251, 252, 253, 254)

Row = list[tuple[int, list[int]]]
"""Blocks of a row: a scale code, and the first element codes; the rest are zero."""


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of gemm.*."""
    rng = np.random.default_rng(plan.seed)
    for profile in (GemmProfile.ORDERED, GemmProfile.EXACT, GemmProfile.BOUNDED):
        for title, a, b in _narrowed(rng):
            # `exact` rounds the real sum once, to either type: it narrows nothing.
            clause = "gemm.exact" if profile is GemmProfile.EXACT else "gemm.output"
            yield product_check(clause, f"{profile.value}: {title}", Product(a, b, profile, "bfloat16"), 130)
        if plan.full and profile is not GemmProfile.EXACT:  # beyond 8 MiB, and beyond 512 rows of both
            a, b = (drawn_array(rng, (rows, 64), 1, 64, (126, 129)) for rows in (1543, 1447))
            yield product_check(
                "gemm.operands", f"{profile.value}: 8 MiB of results", Product(a, b, profile), 130
            )
        for out in OUT_DTYPES:
            for clause, title, a, b in [*_structure(rng, plan.full), *_hostile(rng, plan.full)]:
                top = max((int(q.scales[q.scales < 255].max(initial=0)) for q in (a, b)), default=0)
                if clause in ("gemm.exact", "gemm.ordered") and clause != f"gemm.{profile.value}":
                    clause = f"gemm.{profile.value}"
                name = f"{profile.value}, {out}: {title}"
                layout = title if title in LAYOUTS else ""
                yield product_check(clause, name, Product(a, b, profile, out, layout), top)
    for out in OUT_DTYPES:
        for top, k, prescale in combinations((252, 254), (512, 4096), (False, True)):
            a, b = (replace(_tailed(rng, rows, k, top), prescale=prescale) for rows in (9, 11))
            name = f"bounded, {out}: heavy tails, K = {k}, scales to {top}{', prescaled' if prescale else ''}"
            yield product_check("gemm.bounded", name, Product(a, b, GemmProfile.BOUNDED, out), top)
    yield from _refused()


def matrix(rows: list[Row], prescale: bool = False) -> MXArray:
    """Return the MXArray [len(rows), 32 * blocks] of rows of blocks."""
    codes = np.array([[code for _, c in row for code in (c + [0] * 32)[:32]] for row in rows], np.uint8)
    scales = np.array([[scale for scale, _ in row] for row in rows], np.uint8)
    shape = (len(rows), 32 * len(rows[0]))
    return MXArray(
        pack(codes.reshape(shape), E2M1), scales.reshape(len(rows), -1), shape, 1, prescale=prescale
    )


def _structure(rng: np.random.Generator, full: bool) -> Iterator[tuple[str, str, MXArray, MXArray]]:
    """Which numbers meet: shapes, axes, padding, strides; every pair of codes; NaN blocks."""

    def operand(shape: tuple[int, int], axis: int, length: int) -> MXArray:
        return drawn_array(rng, shape, axis, length, (126, 129))

    sizes = (
        ((1, 1, 32), (3, 5, 64), (33, 17, 96), (130, 65, 32), (2, 300, 160), (1030, 3, 64), (3, 1030, 64))
        if full
        else ((1, 1, 32), (3, 5, 64), (33, 17, 96))
    )
    for m, n, k in sizes:
        yield "gemm.operands", f"M, N, K = {m}, {n}, {k}", operand((m, k), 1, k), operand((n, k), 1, k)
    yield "gemm.operands", "both along axis 0", operand((64, 5), 0, 64), operand((64, 3), 0, 64)
    yield "gemm.operands", "along axis 0 and axis 1", operand((64, 5), 0, 64), operand((3, 64), 1, 64)
    yield "gemm.operands", "padded", operand((4, 40), 1, 64), operand((40, 6), 0, 64)
    for layout in LAYOUTS:
        yield "gemm.operands", layout, operand((8, 64), 1, 64), operand((6, 64), 1, 64)
    for shape in ((0, 3), (3, 0), (0, 0)):
        a, b = (operand((rows, 64), 1, 64) for rows in shape)
        yield "gemm.operands", f"empty {shape}", a, b
    yield "gemm.operands", "K = 0", operand((2, 0), 1, 0), operand((3, 0), 1, 0)
    pairs = matrix([[(127, [code] * 32)] for code in range(16)])
    yield "gemm.block_dot", "every pair of codes", pairs, pairs
    rows = matrix([[(scale, [_SIX])] for scale in _EDGES])
    yield "gemm.block_dot", "every pair of extreme scales", rows, matrix([[(s, [_SIX, 9])] for s in _EDGES])
    one = [_ONE] * 32
    spoiled = matrix([[(127, one), (255, [0])], [(127, one), (127, one)], [(255, one), (127, one)]])
    plain = matrix([[(127, one), (127, one)], [(127, [0]), (0, [0])], [(255, [0]), (127, one)]])
    yield "gemm.nan", "NaN blocks in A and B, zeros against them", spoiled, plain
    huge = matrix([[(255, [0]), (254, [_SIX] * 32)], [(254, [_SIX] * 32), (127, [_ONE])]])
    yield "gemm.nan", "NaN block before an overflow", huge, matrix([[(254, [_SIX] * 32)] * 2])


def _narrowed(rng: np.random.Generator) -> Iterator[tuple[str, MXArray, MXArray]]:
    """Sums that float32 holds and bfloat16 does not: 257 and 259 are ties."""
    unit = [(127, [_ONE])] * 2
    yield "257 and 259", matrix([[(127, [_ONE]), (135, [_ONE])], [(128, [3]), (135, [_ONE])]]), matrix([unit])
    a, b = (drawn_array(rng, (rows, 96), 1, 96, (126, 129)) for rows in (33, 17))
    yield "drawn sums", a, b


def _hostile(rng: np.random.Generator, full: bool) -> Iterator[tuple[str, str, MXArray, MXArray]]:
    """Sums that show how they were rounded; clauses gemm.exact and gemm.ordered stand for the profile's own."""
    unit = [(127, [_ONE])]

    def times_one(*blocks: tuple[int, list[int]]) -> tuple[MXArray, MXArray]:
        return matrix([list(blocks)]), matrix([unit * len(blocks)])

    big, minus, small = (157, [_ONE]), (157, [10]), (117, [_ONE])
    yield "gemm.ordered", "2^30 - 2^30 + 2^-10", *times_one(big, minus, small)
    yield "gemm.ordered", "2^30 + 2^-10 - 2^30", *times_one(big, small, minus)
    yield "gemm.ordered", "2^-10 + 2^30 - 2^30", *times_one(small, big, minus)
    half_ulp = (103, [_ONE])
    yield "gemm.ordered", "1 and sixteen half ulps", *times_one((127, [_ONE]), *[half_ulp] * 16)
    yield (
        "gemm.ordered",
        "3 half ulps and 1, both ways",
        *times_one(*[half_ulp] * 3, (127, [_ONE]), (127, [10])),
    )
    yield "gemm.exact", "double rounding: 257 + 2^-40", *times_one((135, [_ONE]), (127, [_ONE]), (87, [_ONE]))
    yield (
        "gemm.exact",
        "double rounding: 2^24 + 1 + 2^-40",
        *times_one((151, [_ONE]), (127, [_ONE]), (87, [_ONE])),
    )
    top, bottom = (254, [_SIX] * 32), (254, [15] * 32)
    yield (
        "gemm.ordered",
        "overflow stays Inf",
        matrix([[top, bottom, bottom], [top, top, bottom]]),
        matrix([[top] * 3]),
    )
    yield "gemm.ordered", "negative underflow", matrix([[(0, [9])]]), matrix([[(0, [_HALF])]])
    yield (
        "gemm.ordered",
        "zero after a negative underflow",
        matrix([[(0, [9]), (127, [_MINUS] * 32)]]),
        matrix([[(0, [_HALF]), (127, [_ONE] * 32)]]),
    )
    yield (
        "gemm.ordered",
        "subnormal sums",
        matrix([[(0, [_HALF, 9, 3])] * 3]),
        matrix([[(0, [_SIX]), (1, [_SIX]), (2, [5])]]),
    )
    for name, lowest in (("float32", -149), ("bfloat16", -133)):
        # Half units of the last place and a little more or less: rounded to the precision of normal numbers first,
        # each is a tie. B's scale is 2^-75.
        low = lowest - 1 + 127 + 75
        for half, codes, little in ((1, [_ONE], _ONE), (3, [5], _MINUS | _ONE), (5, [6, _ONE], _ONE)):
            a, b = matrix([[(low, codes), (low - 30, [little])]]), matrix([[(52, [_ONE] * 2)] * 2])
            yield "gemm.exact", f"double rounding: {half} halves of {name}'s least, and a little", a, b
    for prescaled in ((True, False), (False, True), (True, True)):
        a, b = (
            replace(_tailed(rng, rows, 256, 140), prescale=p)
            for rows, p in zip((7, 6), prescaled, strict=True)
        )
        yield "gemm.prescale", f"prescaled {prescaled}", a, b
        exact = matrix([[(127, [_ONE, 3])], [(127, [5])], [(254, [_SIX] * 32)]], prescaled[0])
        yield (
            "gemm.prescale",
            f"prescaled {prescaled}, short sums",
            exact,
            matrix([unit, [(128, [5])]], prescaled[1]),
        )
    for i in range(6 if full else 2):
        a, b = (_tailed(rng, rows, 32 * (3 + 5 * i), 160) for rows in (8, 9))
        yield "gemm.ordered", f"heavy tails {i}", a, b
        a, b = (adversarial(rng, rows, 4 + i) for rows in (6, 7))
        yield "gemm.ordered", f"adversarial scales {i}", a, b


def _tailed(rng: np.random.Generator, rows: int, k: int, top: int) -> MXArray:
    """Return drawn codes under scales whose logarithms have heavy tails, none above `top`."""
    codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
    scales = np.clip(120 + rng.standard_t(2, (rows, k // 32)) * 4, 0, min(top, 160))
    scales[rng.random(scales.shape) < 0.02] = top
    return MXArray(codes, scales.astype(np.uint8), (rows, k), 1)


def adversarial(rng: np.random.Generator, rows: int, blocks: int) -> MXArray:
    """Return drawn codes under extreme scales, a twentieth of them NaN."""
    codes = rng.integers(0, 256, (rows, 16 * blocks), np.uint8)
    scales = rng.choice(_EDGES, (rows, blocks)).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.05] = 255
    return MXArray(codes, scales, (rows, 32 * blocks), 1)


def _refused() -> Iterator[Check]:
    row, other = matrix([[(127, [_ONE])]]), matrix([[(127, [_ONE])] * 2])
    turned = replace(row, rotation=Rotation(16))
    cases = {"contraction lengths 32 and 64": (row, other), "different Hadamard transforms": (row, turned)}
    for title, (a, b) in cases.items():

        def run(subject: Subject, title: str = title, a: MXArray = a, b: MXArray = b) -> Verdict:
            operands = [given(subject, q) for q in (a, b)]
            for profile in subject.capabilities.profiles(MXFP4, MXFP4):
                try:
                    subject.backend.scaled_gemm(*operands, profile=profile, out_dtype=out_dtype(subject))
                except ShapeError:
                    continue
                message = f"{title}: accepted under {profile.value}; ShapeError expected"
                return Verdict(1, Failure("gemm.operands", title, message))
            return Verdict(1)

        yield Check("gemm.operands", title, Op.GEMM, (), run)


def out_dtype(subject: Subject) -> str:
    """Return an output type that the backend declares."""
    return next((out for out in OUT_DTYPES if out in subject.capabilities.gemm_dtypes), OUT_DTYPES[0])
