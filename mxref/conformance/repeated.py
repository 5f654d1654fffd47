"""Checks that ask twice for results of one shape, and keep the first: a call may not change it or return its memory.

Nothing is compared here: `Watched` looks at what earlier calls returned after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mxref.conformance.crafted import tame
from mxref.conformance.decode import DTYPES, drawn_array, given
from mxref.conformance.memory import CLAUSE, FUSED_CLAUSE
from mxref.conformance.model import Check, Op, Plan, Subject, Verdict
from mxref.conformance.request import Request
from mxref.gemm import OUT_DTYPES
from mxref.hadamard import SIZES
from mxref.philox import Stream
from mxref.recipe import GemmProfile

STREAM = Stream(11, step=2, layer=5, operand=1)
_SCALES = (120, 133)
Needs = tuple[tuple[str, Any], ...]


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of kept results, for each operation."""
    rng = np.random.default_rng(plan.seed)
    first, second = (plan.cast(tame(rng, (32, 256))) for _ in range(2))
    needs = Request(first, plan.base).needs

    def values(call: Callable[[Subject, Any], Any]) -> Callable[[Subject], None]:
        def run(subject: Subject) -> None:
            for x in (first, second, first):
                call(subject, subject.give(x))

        return run

    def arrays(call: Callable[[Subject, Any], Any]) -> Callable[[Subject], None]:
        drawn = [drawn_array(rng, (32, 256), 1, 256, _SCALES) for _ in range(2)]

        def run(subject: Subject) -> None:
            for q in (*drawn, drawn[0]):
                call(subject, given(subject, q))

        return run

    base, both = plan.base, (plan.base, plan.base)
    yield _check(CLAUSE, "quantize", Op.QUANTIZE, needs,
                 values(lambda s, x: s.backend.quantize(x, base, rng=STREAM)))  # fmt: skip
    yield _check(FUSED_CLAUSE, "quantize_dual", Op.QUANTIZE, needs,
                 values(lambda s, x: s.backend.quantize_dual(x, both, rngs=(STREAM, STREAM))))  # fmt: skip
    for dtype in DTYPES:
        decoded = (("dequantize_dtypes", dtype),)
        yield _check(CLAUSE, f"dequantize to {dtype}", Op.DEQUANTIZE, decoded,
                     arrays(lambda s, q, dtype=dtype: s.backend.dequantize(q, dtype)))  # fmt: skip
        yield _check(FUSED_CLAUSE, f"fake_quantize to {dtype}", Op.QUANTIZE, (*needs, *decoded),
                     values(lambda s, x, dtype=dtype: s.backend.fake_quantize(x, base, dtype=dtype, rng=STREAM)))  # fmt: skip
    for n in SIZES:
        yield _check(CLAUSE, f"hadamard of size {n}", Op.HADAMARD, (needs[0], ("hadamard_sizes", n)),
                     values(lambda s, x, n=n: s.backend.hadamard(x, n, 1)))  # fmt: skip
    for profile in GemmProfile:
        for out in OUT_DTYPES:
            yield _check(CLAUSE, f"scaled_gemm, {profile.value}, {out}", Op.GEMM,
                         (("gemm_profiles", profile), ("gemm_dtypes", out)),
                         arrays(lambda s, q, p=profile, out=out: s.backend.scaled_gemm(q, q, profile=p, out_dtype=out)))  # fmt: skip


def _check(clause: str, title: str, op: Op, needs: Needs, ask: Callable[[Subject], None]) -> Check:
    def run(subject: Subject) -> Verdict:
        ask(subject)
        return Verdict(3)

    return Check(clause, f"{title}, results kept", op, needs, run)
