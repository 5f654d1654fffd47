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
from numpy.typing import NDArray

from mxref.backend import Backend
from mxref.conformance.checking import Asked, Check, Needs, Op, Plan, Subject
from mxref.conformance.requests.crafted import tame
from mxref.conformance.requests.decoding import DTYPES, drawn_array, given
from mxref.conformance.requests.multiplying import Product
from mxref.conformance.requests.quantizing import Request
from mxref.conformance.watch import CLAUSE, FUSED_CLAUSE, arrays_of
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile
from mxref.steps.hadamard import SIZES
from mxref.steps.random import Stream

STREAM = Stream(11, step=2, layer=5, operand=1)
_SCALES = (-7, 6)
_SHAPE, _FEWER = (32, 256), 12
"""The shape of inputs, and the rows of operands of a product."""
_THREADS, _ROUNDS = 4, 6
_SWITCH = 1e-5
"""Seconds after which Python gives another thread its turn: its usual 5 ms are as long as several calls."""
Call = Callable[[Backend, Any], Any]


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of each operation."""
    rng = np.random.default_rng(plan.seed)
    inputs = [plan.cast(tame(rng, _SHAPE, made=plan.format)) for _ in range(_THREADS)]
    drawn = [drawn_array(rng, _SHAPE, 1, _SHAPE[1], _SCALES, made=plan.format) for _ in range(_THREADS)]
    few = [drawn_array(rng, (_FEWER, _SHAPE[1]), 1, _SHAPE[1], _SCALES, made=plan.format) for _ in drawn]
    needs = Request(inputs[0], plan.base).needs
    base = plan.base

    at = Placement(STREAM)
    call = _call("quantize", base, placement=at)
    yield _repeated(CLAUSE, "quantize", Op.QUANTIZE, needs, inputs, call)
    call = _call("quantize_dual", (base, base), placements=(at, at))
    yield _repeated(FUSED_CLAUSE, "quantize_dual", Op.QUANTIZE, needs, inputs, call)
    for dtype in DTYPES:
        decoded = ("dequantize_dtypes", dtype)
        needed: Needs = (("formats", plan.format), decoded)
        call = _call("dequantize", dtype)
        yield _repeated(CLAUSE, f"dequantize to {dtype}", Op.DEQUANTIZE, needed, drawn, call)
        call, title = _call("fake_quantize", base, dtype=dtype, placement=at), f"fake_quantize to {dtype}"
        yield _repeated(FUSED_CLAUSE, title, Op.QUANTIZE, (*needs, decoded), inputs, call)
    for n in SIZES:
        needed = (("in_dtypes", plan.dtype), ("hadamard_sizes", n))
        title = f"hadamard of size {n}"
        yield _repeated(CLAUSE, title, Op.HADAMARD, needed, inputs, _call("hadamard", n, 1))
    for profile, out in product(GemmProfile, OUT_DTYPES):
        needed = (("gemms", (profile, plan.format, plan.format)), ("gemm_dtypes", out))
        products = [Product(q, q, profile, out) for q in few]
        # Under `bounded` two calls may differ.
        allowed = partial(_allowed, products) if profile is GemmProfile.BOUNDED else None
        title = f"scaled_gemm, {profile.value}, {out}"
        yield _repeated(
            CLAUSE, title, Op.GEMM, needed, few, partial(_squared, profile, out), allowed
        )  # fmt: skip


def _call(operation: str, *arguments: Any, **named: Any) -> Call:
    return lambda backend, x: getattr(backend, operation)(x, *arguments, **named)


def _squared(profile: GemmProfile, out: str, backend: Backend, q: MXArray) -> Any:
    return backend.scaled_gemm(q, q, profile=profile, out_dtype=out)


Right = Callable[[Subject, int, Any], bool]
"""Whether the result of the request of a number is right."""


def _allowed(products: Sequence[Product], subject: Subject, number: int, result: Any) -> bool:
    return not products[number].misses(subject.take(result)).any()


def _repeated(
    clause: str,
    title: str,
    op: Op,
    needs: Needs,
    arrays: Sequence[MXArray | NDArray[Any]],
    call: Call,
    right: Right | None = None,
) -> Check:
    """Return the check that results of an operation are kept, and that threads get what the main thread got."""

    def problem(subject: Subject) -> tuple[int, str]:
        operands = [given(subject, x) if isinstance(x, MXArray) else subject.give(x) for x in arrays]
        backend = subject.watched.backend
        main = [call(subject.backend, operand) for operand in (*operands, operands[0])]
        if subject.watched.faults:
            return len(main), ""  # threads would show the misuse again, and not what it is
        if right and not all(right(subject, i % _THREADS, result) for i, result in enumerate(main)):
            return 0, ""  # other checks name the fault
        want = [_bits(subject, result) for result in main]
        calls = [partial(call, backend, operand) for operand in operands]
        compared = len(main)
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
                return (
                    compared,
                    f"{wrong} of {len(found)} results of calls from {how} differ from those of the main thread",
                )
        return compared, ""

    return Check.that(clause, f"{title}, again and in threads", Asked(op, needs), problem)


def _bits(subject: Subject, result: Any) -> list[bytes]:
    return [subject.take(array).tobytes() for _, array in arrays_of(result)]


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
