"""Checks that ask twice for results of one shape, and keep the first: a call may not change it or return its memory.

Nothing is compared here: `Watched` looks at what earlier calls returned after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from mxref.backend import Backend
from mxref.conformance.model import Check, CheckResult, Op, Plan, Subject
from mxref.conformance.requests.crafted import tame
from mxref.conformance.requests.decoding import DTYPES, drawn_array, given
from mxref.conformance.requests.quantization import Request
from mxref.conformance.watch.memory import CLAUSE, FUSED_CLAUSE
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import SIZES
from mxref.steps.random import Stream

STREAM = Stream(11, step=2, layer=5, operand=1)
_SCALES = (120, 133)
Needs = tuple[tuple[str, Any], ...]


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of kept results, for each operation."""
    rng = np.random.default_rng(plan.seed)
    first, second = (plan.cast(tame(rng, (32, 256), made=plan.format)) for _ in range(2))
    needs = Request(first, plan.base).needs

    drawn = tuple(drawn_array(rng, (32, 256), 1, 256, _SCALES, made=plan.format) for _ in range(2))
    base, both = plan.base, (plan.base, plan.base)

    def values(clause: str, title: str, op: Op, needed: Needs, call: Callable[[Backend, Any], Any]) -> Check:
        def run(subject: Subject) -> CheckResult:
            for x in (first, second, first):
                call(subject.backend, subject.give(x))
            return CheckResult(3)

        return Check(clause, f"{title}, results kept", op, needed, run)

    def arrays(title: str, op: Op, needed: Needs, call: Callable[[Backend, MXArray], Any]) -> Check:
        def run(subject: Subject) -> CheckResult:
            for q in (*drawn, drawn[0]):
                call(subject.backend, given(subject, q))
            return CheckResult(3)

        return Check(CLAUSE, f"{title}, results kept", op, needed, run)

    def dual(backend: Backend, x: Any) -> Any:
        return backend.quantize_dual(x, both, placements=(Placement(STREAM), Placement(STREAM)))

    yield values(
        CLAUSE, "quantize", Op.QUANTIZE, needs, lambda b, x: b.quantize(x, base, placement=Placement(STREAM))
    )
    yield values(FUSED_CLAUSE, "quantize_dual", Op.QUANTIZE, needs, dual)
    for dtype in DTYPES:
        decoded = (("dequantize_dtypes", dtype),)
        stored = (("formats", plan.format), *decoded)
        yield arrays(f"dequantize to {dtype}", Op.DEQUANTIZE, stored, partial(_dequantize, dtype))
        fake = partial(_fake_quantize, base, dtype)
        yield values(FUSED_CLAUSE, f"fake_quantize to {dtype}", Op.QUANTIZE, (*needs, *decoded), fake)
    for n in SIZES:
        needed = (("in_dtypes", plan.dtype), ("hadamard_sizes", n))
        yield values(CLAUSE, f"hadamard of size {n}", Op.HADAMARD, needed, partial(_hadamard, n))
    for profile, out in product(GemmProfile, OUT_DTYPES):
        kind: Needs = (("gemms", (profile, plan.format, plan.format)), ("gemm_dtypes", out))
        title = f"scaled_gemm, {profile.value}, {out}"
        yield arrays(title, Op.GEMM, kind, partial(_scaled_gemm, profile, out))


def _dequantize(dtype: str, backend: Backend, q: MXArray) -> Any:
    return backend.dequantize(q, dtype)


def _fake_quantize(spec: OperandSpec, dtype: str, backend: Backend, x: Any) -> Any:
    return backend.fake_quantize(x, spec, dtype=dtype, placement=Placement(STREAM))


def _hadamard(n: int, backend: Backend, x: Any) -> Any:
    return backend.hadamard(x, n, 1)


def _scaled_gemm(profile: GemmProfile, out: str, backend: Backend, q: MXArray) -> Any:
    return backend.scaled_gemm(q, q, profile=profile, out_dtype=out)
