"""Checks that ask several times for results of one shape: a call may not change what another one gives.

First every result is kept: `Watched` looks at what earlier calls returned after every call. Then the same requests come
from other threads, from one alone and from four at once, and each answer must be that of the main thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from mxref.backend import Backend
from mxref.conformance.model import Check, CheckResult, Failure, Op, Plan, Subject
from mxref.conformance.requests.crafted import tame
from mxref.conformance.requests.decoding import DTYPES, drawn_array, given
from mxref.conformance.requests.encoding import Request
from mxref.conformance.requests.product import Product
from mxref.conformance.watch import CLAUSE, FUSED_CLAUSE, arrays_of
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.hadamard import SIZES
from mxref.steps.random import Stream

STREAM = Stream(11, step=2, layer=5, operand=1)
_SCALES = (120, 133)
_SHAPE, _FEWER = (32, 256), 12
"""The shape of inputs, and the rows of operands of a product."""
_THREADS, _ROUNDS = 4, 6
_SWITCH = 1e-5
"""Seconds after which Python gives another thread its turn: its usual 5 ms are as long as several calls."""
Needs = tuple[tuple[str, Any], ...]
Call = Callable[[Backend, Any], Any]


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of each operation."""
    rng = np.random.default_rng(plan.seed)
    inputs = [plan.cast(tame(rng, _SHAPE, made=plan.format)) for _ in range(_THREADS)]
    drawn = [drawn_array(rng, _SHAPE, 1, _SHAPE[1], _SCALES, made=plan.format) for _ in range(_THREADS)]
    few = [drawn_array(rng, (_FEWER, _SHAPE[1]), 1, _SHAPE[1], _SCALES, made=plan.format) for _ in drawn]
    needs = Request(inputs[0], plan.base).needs
    base, both = plan.base, (plan.base, plan.base)

    def values(clause: str, title: str, op: Op, needed: Needs, call: Call) -> Iterator[Check]:
        return _asked(clause, title, op, needed, lambda s: [s.give(x) for x in inputs], call)

    def dual(backend: Backend, x: Any) -> Any:
        return backend.quantize_dual(x, both, placements=(Placement(STREAM), Placement(STREAM)))

    yield from values(
        CLAUSE, "quantize", Op.QUANTIZE, needs, lambda b, x: b.quantize(x, base, placement=Placement(STREAM))
    )
    yield from values(FUSED_CLAUSE, "quantize_dual", Op.QUANTIZE, needs, dual)
    for dtype in DTYPES:
        decoded = (("dequantize_dtypes", dtype),)
        stored = (("formats", plan.format), *decoded)
        title = f"dequantize to {dtype}"
        yield from _asked(
            CLAUSE, title, Op.DEQUANTIZE, stored, partial(_given, drawn), partial(_dequantize, dtype)
        )
        fake = partial(_fake_quantize, base, dtype)
        yield from values(FUSED_CLAUSE, f"fake_quantize to {dtype}", Op.QUANTIZE, (*needs, *decoded), fake)
    for n in SIZES:
        needed = (("in_dtypes", plan.dtype), ("hadamard_sizes", n))
        yield from values(CLAUSE, f"hadamard of size {n}", Op.HADAMARD, needed, partial(_hadamard, n))
    for profile, out in product(GemmProfile, OUT_DTYPES):
        kind: Needs = (("gemms", (profile, plan.format, plan.format)), ("gemm_dtypes", out))
        products = [Product(q, q, profile, out) for q in few]
        # Under `bounded` two calls may differ.
        allowed = partial(_allowed, products) if profile is GemmProfile.BOUNDED else None
        title = f"scaled_gemm, {profile.value}, {out}"
        call = partial(_scaled_gemm, profile, out)
        yield from _asked(CLAUSE, title, Op.GEMM, kind, partial(_given, few), call, allowed)


Right = Callable[[Subject, int, Any], bool]
"""Whether the result of the request of a number is right."""


def _given(arrays: list[MXArray], subject: Subject) -> list[Any]:
    return [given(subject, q) for q in arrays]


def _allowed(products: Sequence[Product], subject: Subject, number: int, result: Any) -> bool:
    return not products[number].misses(subject.take(result)).any()


def _asked(
    clause: str,
    title: str,
    op: Op,
    needs: Needs,
    give: Callable[[Subject], list[Any]],
    call: Call,
    right: Right | None = None,
) -> Iterator[Check]:
    """Yield two checks of an operation: its results are kept, and calls from threads give what the main thread got."""

    def kept(subject: Subject) -> CheckResult:
        operands = give(subject)
        for operand in (*operands, operands[0]):
            call(subject.backend, operand)
        return CheckResult(len(operands) + 1)

    def in_threads(subject: Subject) -> CheckResult:
        operands, backend = give(subject), subject.watched.backend
        main = [call(subject.backend, operand) for operand in operands]
        if right and not all(right(subject, i, result) for i, result in enumerate(main)):
            return CheckResult(0)  # other checks name the fault
        want = [_bits(subject, result) for result in main]
        calls = [partial(call, backend, operand) for operand in operands]
        compared = 0
        for threads, how in (
            (1, "another thread than the main one"),
            (_THREADS, f"{_THREADS} threads at once"),
        ):
            found = _from_threads(threads, calls * (_ROUNDS if threads > 1 else 1))
            subject.watched.look(clause, f"{title}, called from {how},")
            wrong = sum(
                not right(subject, i % _THREADS, result)
                if right
                else _bits(subject, result) != want[i % _THREADS]
                for i, result in found
            )
            compared += len(found)
            if wrong:
                message = f"{wrong} of {len(found)} results of calls from {how} differ from those of the main thread"
                return CheckResult(compared, Failure(clause, f"{title}, in threads", message))
        return CheckResult(compared)

    yield Check(clause, f"{title}, results kept", op, needs, kept)
    yield Check(clause, f"{title}, in threads", op, needs, in_threads)


def _bits(subject: Subject, result: Any) -> list[bytes]:
    return [subject.take(array).tobytes() for array in arrays_of(result)]


def _from_threads(threads: int, calls: Sequence[Callable[[], Any]]) -> list[tuple[int, Any]]:
    """Return the results of calls that some threads share, with the numbers of the calls.

    The threads wait for each other before every call. A thread that is started late would otherwise find that the
    first one has answered all of its calls alone.
    """
    together = threading.Barrier(threads)

    def work(first: int) -> list[tuple[int, Any]]:
        found = []
        for i in range(first, len(calls), threads):
            with suppress(threading.BrokenBarrierError):  # a call of another thread has failed
                together.wait()
            try:
                found.append((i, calls[i]()))
            except BaseException:
                together.abort()
                raise
        return found

    with _switching_often(), ThreadPoolExecutor(threads) as pool:
        return [each for found in pool.map(work, range(threads)) for each in found]


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _dequantize(dtype: str, backend: Backend, q: MXArray) -> Any:
    return backend.dequantize(q, dtype)


def _fake_quantize(spec: OperandSpec, dtype: str, backend: Backend, x: Any) -> Any:
    return backend.fake_quantize(x, spec, dtype=dtype, placement=Placement(STREAM))


def _hadamard(n: int, backend: Backend, x: Any) -> Any:
    return backend.hadamard(x, n, 1)


def _scaled_gemm(profile: GemmProfile, out: str, backend: Backend, q: MXArray) -> Any:
    return backend.scaled_gemm(q, q, profile=profile, out_dtype=out)
