"""Checks of products of two block formats: each pair of different formats with one block length."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import permutations

import numpy as np

from mxref.conformance.checks.gemm import Question, adversarial, every_code, spanning, special, tailed
from mxref.conformance.compare import product_check
from mxref.conformance.model import Check, Level
from mxref.conformance.requests.decoding import drawn_array
from mxref.conformance.requests.product import Product
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.gemm import OUT_DTYPES
from mxref.recipe import GemmProfile


def checks(level: Level, seed: int, taken: Collection[BlockFormat]) -> Iterator[Check]:
    """Yield the checks of gemm.* for operands of different formats, both of them taken."""
    for a, b in permutations((made for made in BLOCK_FORMATS.values() if made in taken), 2):
        if a.k != b.k:
            continue
        rng = np.random.default_rng(seed)
        for profile in GemmProfile:
            for out in OUT_DTYPES if level is Level.FULL else OUT_DTYPES[:1]:
                for clause, title, left, right in _questions(rng, a, b, profile):
                    top = max(int(q.scales[q.scales < 255].max(initial=0)) for q in (left, right))
                    name = f"{profile.value}, {out}: {title}, {a} x {b}"
                    yield product_check(clause, name, Product(left, right, profile, out), top)


def _questions(
    rng: np.random.Generator, a: BlockFormat, b: BlockFormat, profile: GemmProfile
) -> Iterator[Question]:
    yield "gemm.block_dot", "every pair of codes", every_code(a), every_code(b)
    left, right = (
        drawn_array(rng, (rows, 96), 1, 96, (126, 129), made=made) for rows, made in ((5, a), (7, b))
    )
    yield "gemm.operands", "M, N, K = 5, 7, 96", left, right
    for prescaled in ((True, False), (False, True), (True, True)):
        first, second = (replace(q, prescale=p) for q, p in zip((left, right), prescaled, strict=True))
        yield "gemm.prescale", f"prescaled {prescaled}", first, second
    own = f"gemm.{profile.value}"
    yield own, "heavy tails", tailed(rng, 8, 5 * a.k, 160, a), tailed(rng, 9, 5 * b.k, 160, b)
    yield own, "adversarial scales", adversarial(rng, 6, 5, a), adversarial(rng, 7, 5, b)
    for first, second in spanning(49, a, b):
        yield "gemm.block_dot", "a unit after sums of 54 bits that cancel", first, second
    yield from special(a, b)
