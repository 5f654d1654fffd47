"""Checks of the protocol: what is declared is answered and repeats; what is not, and wrong inputs, are refused.

A new field of `Capabilities` gets its values in `_SETS`, and in `_TREATMENT` if a treatment needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.capabilities import Capabilities, declared_words
from mxref.conformance.checking import Asked, Check, Op, Plan, Subject, cast, declares
from mxref.conformance.finding import quantize_check
from mxref.conformance.outcome import CheckResult
from mxref.conformance.requests.crafted import any_bits, crafted_tensors, tame
from mxref.conformance.requests.decoding import DTYPES, drawn_array, given
from mxref.conformance.requests.quantizing import Blocks, Request, all_of_it
from mxref.errors import DtypeError, NonfiniteError, RecipeError, UnsupportedError
from mxref.formats import BLOCK_FORMATS, INPUT_DTYPES, BlockFormat, BlockShape, Nonfinite
from mxref.gemm import OUT_DTYPES
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import GemmProfile, OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SIZES
from mxref.steps.quotient import Arithmetic
from mxref.steps.random import Stream
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import ScaleRule, rules_of

STREAM = Stream(8, step=1, layer=3, operand=4)
_FORMATS = tuple(BLOCK_FORMATS.values())
_PAIRS = tuple((a, b) for a, b in product(_FORMATS, repeat=2) if a.k == b.k)
_BLOCKS = tuple(dict.fromkeys(shape for made in _FORMATS for shape in (made.row, made.tile)))
_SETS: dict[str, tuple[tuple[Any, ...], tuple[Op, ...]]] = {
    "formats": (_FORMATS, (Op.QUANTIZE, Op.DEQUANTIZE)), "scale_rules": (tuple(ScaleRule), (Op.QUANTIZE,)),
    "roundings": (tuple(Rounding), (Op.QUANTIZE,)), "blocks": (_BLOCKS, (Op.QUANTIZE,)),
    "hadamard_sizes": (SIZES, (Op.QUANTIZE, Op.HADAMARD)), "in_dtypes": (INPUT_DTYPES, (Op.QUANTIZE, Op.HADAMARD)),
    "arithmetics": (tuple(Arithmetic), (Op.QUANTIZE,)), "four_over_six": (tuple(FourOverSix), (Op.QUANTIZE,)),
    "dequantize_dtypes": (DTYPES, (Op.DEQUANTIZE,)),
    "gemms": (tuple((profile, a, b) for profile in GemmProfile for a, b in _PAIRS), (Op.GEMM,)),
    "gemm_dtypes": (OUT_DTYPES, (Op.GEMM,)),
}  # fmt: skip
"""The sets in the capabilities: all values that each can hold, and the operations that ask for them."""
_TREATMENT = {
    "formats": "format", "scale_rules": "scale_rule", "roundings": "rounding", "blocks": "block",
    "hadamard_sizes": "hadamard", "prescale": "prescale", "arithmetics": "arithmetic", "max_sr_bits": "sr_bits",
    "four_over_six": "four_over_six",
}  # fmt: skip
"""What of a treatment needs a capability."""


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of conformance.* and of refused input types."""
    any_backend = Asked(Op.QUANTIZE)
    yield Check.that("conformance.capabilities", "values that mean something", any_backend, _capabilities)
    yield Check.that("conformance.arrays", "from_numpy and to_numpy", any_backend, partial(_arrays, plan))
    for name, op, value in _requests():
        title = f"{name} without {declared_words(value)}"
        yield Check.that("conformance.unsupported", title, Asked(op), _refusal(plan, name, op, value))
    for name in ("float64", "int32"):
        yield _refused_type(plan, name)


def _capabilities(subject: Subject) -> tuple[int, str]:
    caps, problem = subject.capabilities, ""
    if not isinstance(caps, Capabilities) or not isinstance(getattr(subject.backend, "name", None), str):
        problem = "a backend needs a name, which is a string, and capabilities, an instance of Capabilities"
    else:
        for name, (members, _) in _SETS.items():
            value = getattr(caps, name)
            # Thresholds are scale rules beside the members, and tiles may have other numbers of rows.
            if not isinstance(value, frozenset) or any(
                one not in members
                and not getattr(one, "is_threshold", False)
                and not isinstance(one, BlockShape)
                for one in value
            ):
                problem = (
                    f"{name} = {value!r} is not a frozenset of members of {', '.join(map(str, members))}"
                )
        if not 1 <= caps.max_sr_bits <= MAX_SR_BITS:
            problem = f"max_sr_bits = {caps.max_sr_bits} is outside 1 .. {MAX_SR_BITS}"
        if not 0 <= caps.bounded_max_scale <= 254 or caps.bounded_class not in ("fp32", "fp8-hopper"):
            problem = f"bounded_class = {caps.bounded_class!r}, bounded_max_scale = {caps.bounded_max_scale}"
        if caps.arrays not in ("numpy", "torch"):
            problem = f"arrays = {caps.arrays!r} is neither 'numpy' nor 'torch'"
    return len(fields(Capabilities)), problem


def _arrays(plan: Plan, subject: Subject) -> tuple[int, str]:
    x = any_bits(np.random.default_rng(4), (8, 64), element=plan.element)
    compared, problem = 0, ""
    codes = np.arange(256, dtype=np.uint8)
    for array in (codes, *(cast(x, name) for name in INPUT_DTYPES if name in subject.capabilities.in_dtypes)):
        back = subject.take(subject.give(array.copy()))
        compared += array.size
        if back.dtype != array.dtype or back.shape != array.shape or back.tobytes() != array.tobytes():
            problem = f"from_numpy and to_numpy change an array of {array.dtype}"
    return compared, problem


def _requests() -> Iterator[tuple[str, Op, Any]]:
    """Yield every value of every capability, with the operation that asks for it."""
    for name, (members, ops) in _SETS.items():
        for op in ops:
            yield from ((name, op, member) for member in members)
    yield "scale_rules", Op.QUANTIZE, ScaleRule(">1.3")
    yield "prescale", Op.QUANTIZE, True
    for bits in (17, MAX_SR_BITS):
        yield "max_sr_bits", Op.QUANTIZE, bits


def _refusal(plan: Plan, name: str, op: Op, value: Any) -> Callable[[Subject], tuple[int, str]]:
    undeclared = f"{name} does not declare {declared_words(value)}"

    def problem(subject: Subject) -> tuple[int, str]:
        caps = subject.capabilities
        if declares(caps, name, value) or not _reachable(caps, op, name):
            return 0, ""
        if op is Op.QUANTIZE and _treated(plan, caps, name, value) is None:
            return 0, ""
        try:
            _ask(subject, plan, name, op, value)
        except UnsupportedError as err:
            if name in str(err):
                return 1, ""
            return 1, f"{undeclared}, and the UnsupportedError does not name the field: {err}"
        except Exception as err:  # anything else is the wrong refusal
            return 1, f"{undeclared}: raised {type(err).__name__} instead of UnsupportedError"
        return 1, f"{undeclared}, and {op.value} did it all the same"

    return problem


def _reachable(caps: Capabilities, op: Op, name: str) -> bool:
    """Return whether the rest of a request for `name` can be declared."""
    if op is Op.GEMM:
        return bool(caps.gemms if name == "gemm_dtypes" else caps.gemm_dtypes)
    if op is Op.HADAMARD:
        return bool(caps.hadamard_sizes) or name == "hadamard_sizes"
    if op is Op.DEQUANTIZE:
        return bool(caps.formats if name == "dequantize_dtypes" else caps.dequantize_dtypes)
    return name != "max_sr_bits" or Rounding.SR in caps.roundings


def _ask(subject: Subject, plan: Plan, name: str, op: Op, value: Any) -> None:
    backend, caps = subject.backend, subject.capabilities
    dtype = value if name == "in_dtypes" else plan.dtype
    x = subject.give(cast(np.ones((32, 256), np.float32), dtype))
    if op is Op.QUANTIZE:
        treated = _treated(plan, caps, name, value)
        assert treated is not None  # else the value is not asked for
        backend.quantize(x, treated, placement=Placement(STREAM))
    elif op is Op.HADAMARD:
        backend.hadamard(x, value if name == "hadamard_sizes" else min(caps.hadamard_sizes))
    elif op is Op.DEQUANTIZE:
        made = value if name == "formats" else plan.format
        dtype = min(caps.dequantize_dtypes) if name == "formats" else value
        backend.dequantize(_stored(subject, made), dtype)
    else:
        profile, *formats = value if name == "gemms" else min(caps.gemms, key=str)
        a, b = (_stored(subject, made) for made in formats)
        out = value if name == "gemm_dtypes" else max(caps.gemm_dtypes)
        backend.scaled_gemm(a, b, profile=profile, out_dtype=out)


def _treated(plan: Plan, caps: Capabilities, name: str, value: Any) -> OperandSpec | None:
    """Return a plain treatment with one value, in the plan's format or another declared one that has such a thing."""
    changed: dict[str, Any] = {_TREATMENT[name]: value} if name in _TREATMENT else {}
    changed |= {"rounding": Rounding.SR} if name == "max_sr_bits" else {}
    plain = {"rounding": plan.base.rounding} | changed
    if name == "formats":
        return OperandSpec(**plain)
    others = [OperandSpec(made, rounding=plan.base.rounding) for made in _FORMATS if made in caps.formats]
    for base in (plan.base, *others):
        with suppress(RecipeError):  # a choice that the format does not have
            return replace(base, **changed)
    return None


def _stored(subject: Subject, made: BlockFormat) -> MXArray:
    return given(subject, drawn_array(np.random.default_rng(1), (4, 64), 1, 64, made=made))


def _refused_type(plan: Plan, name: str) -> Check:
    def call(subject: Subject) -> object:
        try:
            x = subject.give(np.ones((2, 32), name))
            return subject.backend.quantize(x, plan.base, placement=Placement(STREAM))
        except UnsupportedError as err:  # the type itself, or its arrays, are not declared
            raise DtypeError(str(err)) from err

    accepted = f"an input of {name} was narrowed silently"
    return Check.refused(
        "conventions.inputs", f"{name} refused", Asked(Op.QUANTIZE), call, DtypeError, accepted
    )


def input_checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of conventions.inputs, conformance.protocol and refused NaN."""
    for name in ("bfloat16", "float16"):
        yield from _narrow_inputs(plan, name)
    yield _raises_nonfinite(plan)
    yield from _repeats(plan)


def _narrow_inputs(plan: Plan, name: str) -> Iterator[Check]:
    """Narrow input types, if the same values in float32 give the right answer."""
    tensors = crafted_tensors(plan.format, plan.full)
    words = np.arange(0x7F80 if name == "bfloat16" else 0x7C00, dtype=np.uint16)  # every finite magnitude
    block = np.zeros((len(words), plan.format.k), np.uint16)
    block[:, :4] = words[:, None]
    block[:, 1:4] >>= np.array([1, 2, 3], np.uint16)
    every = block[:: 1 if plan.full else 61].view(cast(np.zeros(1, np.float32), name).dtype)
    for spec in (
        *(replace(plan.base, scale_rule=rule) for rule in rules_of(plan.format.scale)),
        replace(plan.base, rounding=Rounding.SR, prescale=plan.format.scale.powers),
    ):
        crafted = [(f"crafted blocks{each.where}", cast(each.x, name), each.amax) for each in tensors]
        for what, values, amax in (*crafted, ("every magnitude as amax", every, plan.amax)):
            request = Request(values, spec, rng=STREAM, amax=amax)
            yield _narrow_check(f"{name}, {spec.scale_rule.value} {spec.rounding.value}, {what}", request)


def _narrow_check(title: str, request: Request) -> Check:
    wide = replace(request, x=request.x.astype(np.float32))

    def run(subject: Subject) -> CheckResult:
        def judge(got: Blocks, want: Blocks) -> tuple[NDArray[np.bool_], int]:
            wrong, compared = all_of_it(got, want)
            # Of a simpler request, `symptom` asks the same.
            if want is request.expected_blocks and wrong.any() and wide.declared(subject.capabilities):
                wrong &= ~wide.wrong(subject)
            return wrong, compared

        return quantize_check("conventions.inputs", title, request, judge).run(subject)

    return Check("conventions.inputs", title, request, run)


def _raises_nonfinite(plan: Plan) -> Check:
    x = tame(np.random.default_rng(3), (4, 64), made=plan.format)
    x[2, 40] = np.nan
    request = Request(plan.cast(x), replace(plan.base, nonfinite=Nonfinite.RAISE), rng=STREAM, amax=plan.amax)
    title = "nonfinite = 'raise'"
    accepted = f"{title} let a NaN pass"
    return Check.refused("scale.nonfinite", title, request, request.ask, NonfiniteError, accepted)


def _repeats(plan: Plan) -> Iterator[Check]:
    x = plan.cast(any_bits(np.random.default_rng(plan.seed), (40, 128), element=plan.element))
    for rounding in Rounding:
        request = Request(x, replace(plan.base, rounding=rounding), rng=STREAM)

        def problem(subject: Subject, request: Request = request) -> tuple[int, str]:
            first, second = (request.answer(subject) for _ in range(2))
            wrong, compared = all_of_it(first, second)
            message = f"the same request gave other bits the second time, in {int(wrong.sum())} blocks"
            return compared, message if wrong.any() else ""

        yield Check.that("conformance.protocol", f"{rounding.value}, asked twice", request, problem)
