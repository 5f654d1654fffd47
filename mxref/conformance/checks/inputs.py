"""Checks of inputs: narrow types as their float32 values, refused NaN, unchanged inputs, repeatable answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.conformance.compare import quantize_check
from mxref.conformance.model import Check, CheckResult, Failure, Op, Plan, Subject
from mxref.conformance.requests.crafted import any_bits, crafted_blocks, tame
from mxref.conformance.requests.encoding import Blocks, Request, all_of_it
from mxref.errors import NonfiniteError
from mxref.formats import Nonfinite
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

STREAM = Stream(2027, step=1, layer=2, operand=3)
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of conventions.inputs, conformance.protocol and refused NaN."""
    for name in NARROW:
        yield from _narrow_inputs(plan, name)
    yield _raises_nonfinite(plan)
    yield _leaves_input_alone(plan)
    yield from _repeats(plan)


def _narrow_inputs(plan: Plan, name: str) -> Iterator[Check]:
    """Narrow input types, if the same values in float32 give the right answer."""
    dtype = NARROW[name]
    crafted = crafted_blocks(plan.format, plan.full).x
    with np.errstate(over="ignore", invalid="ignore"):
        x = crafted.astype(dtype)
    words = np.arange(0x7F80 if name == "bfloat16" else 0x7C00, dtype=np.uint16)  # every finite magnitude
    block = np.zeros((len(words), plan.format.k), np.uint16)
    block[:, :4] = words[:, None]
    block[:, 1:4] >>= np.array([1, 2, 3], np.uint16)
    every = block[:: 1 if plan.full else 61].view(dtype)
    for spec in (
        *(replace(plan.base, scale_rule=rule) for rule in ScaleRule),
        replace(plan.base, rounding=Rounding.SR, prescale=True),
    ):
        for what, values in (("crafted blocks", x), ("every magnitude as amax", every)):
            request = Request(values, spec, rng=STREAM)
            yield _narrow_check(f"{name}, {spec.scale_rule.value} {spec.rounding.value}, {what}", request)


def _narrow_check(title: str, request: Request) -> Check:
    wide = replace(request, x=request.x.astype(np.float32))

    def run(subject: Subject) -> CheckResult:
        def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
            wrong = all_of_it(got, want)[0]
            if wrong.any() and "float32" in subject.capabilities.in_dtypes:
                wrong &= ~all_of_it(Blocks.of(wide.answer(subject)), want)[0]
            return wrong, wrong.size

        return quantize_check("conventions.inputs", title, request, judge).run(subject)

    return Check("conventions.inputs", title, Op.QUANTIZE, request.needs, run, request.spec, request.describe)


def _raises_nonfinite(plan: Plan) -> Check:
    x = tame(np.random.default_rng(3), (4, 64), made=plan.format)
    x[2, 40] = np.nan
    request = Request(plan.cast(x), replace(plan.base, nonfinite=Nonfinite.RAISE), rng=STREAM)

    def run(subject: Subject) -> CheckResult:
        try:
            subject.backend.quantize(subject.give(request.array()), request.spec, **request.arguments)
        except NonfiniteError:
            return CheckResult(1)
        message = "nonfinite = 'raise' let a NaN pass: NonfiniteError expected"
        return CheckResult(1, Failure("scale.nonfinite", "nonfinite = 'raise'", message, request.describe()))

    return Check("scale.nonfinite", "nonfinite = 'raise'", Op.QUANTIZE, request.needs, run, request.spec,
                 request.describe)  # fmt: skip


def _leaves_input_alone(plan: Plan) -> Check:
    x = plan.cast(crafted_blocks(plan.format, False).x)
    request = Request(x, plan.base, rng=STREAM)

    def run(subject: Subject) -> CheckResult:
        array = request.array()
        given = subject.give(array)
        subject.backend.quantize(given, request.spec, **request.arguments)
        if request.x.tobytes() == subject.take(given).tobytes() == array.tobytes():
            return CheckResult(len(x))
        message = "quantize wrote to its input"
        return CheckResult(
            len(x), Failure("conformance.protocol", "input left alone", message, request.describe())
        )

    return Check("conformance.protocol", "input left alone", Op.QUANTIZE, request.needs, run, request.spec,
                 request.describe)  # fmt: skip


def _repeats(plan: Plan) -> Iterator[Check]:
    x = plan.cast(any_bits(np.random.default_rng(plan.seed), (40, 128), element=plan.element))
    for rounding in Rounding:
        request = Request(x, replace(plan.base, rounding=rounding), rng=STREAM)

        def run(subject: Subject, request: Request = request) -> CheckResult:
            first, second = (Blocks.of(request.answer(subject)) for _ in range(2))
            wrong, compared = all_of_it(first, second)
            if not wrong.any():
                return CheckResult(compared)
            message = f"the same request gave other bits the second time, in {int(wrong.sum())} blocks"
            return CheckResult(
                compared, Failure("conformance.protocol", "asked twice", message, request.describe())
            )

        title = f"{rounding.value}, asked twice"
        yield Check(
            "conformance.protocol", title, Op.QUANTIZE, request.needs, run, request.spec, request.describe
        )
