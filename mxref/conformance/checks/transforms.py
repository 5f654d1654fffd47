"""Checks of the Hadamard transform, alone and on the way into a quantization.

Where a plainer transform of the same values is wrong too, `hadamard.order` is to blame, which joins the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.blame import Search, fewest_elements
from mxref.conformance.checking import Check, Needs, Op, Plan, Subject, cast, declares
from mxref.conformance.finding import quantize_check
from mxref.conformance.outcome import CheckResult, Failure
from mxref.conformance.requests.crafted import any_bits, cancelling, heavy_tailed, tame
from mxref.conformance.requests.decoding import first_place, float_bits
from mxref.conformance.requests.quantizing import LAYOUTS, Request
from mxref.plan import dtype_name
from mxref.steps.hadamard import SIZES, Rotation, SignPolicy, hadamard
from mxref.steps.random import Stream
from mxref.steps.scale import rules_of

STREAM = Stream(41, step=6, layer=2, operand=0)
_SMALL = 512
"""Elements of an input that is shown as words."""


@dataclass(frozen=True, eq=False)
class Transform:
    """Arguments of a transform."""

    op: ClassVar = Op.HADAMARD
    x: NDArray[np.generic]
    n: int
    signs: int = 0
    axis: int = -1
    layout: str = ""
    """One of `LAYOUTS`, or nothing for C order."""

    @cached_property
    def expected(self) -> NDArray[np.uint32]:
        """The reference's answer as bits."""
        rows = np.moveaxis(self.x, self.axis, -1).astype(np.float32)
        return float_bits(np.moveaxis(hadamard(rows, Rotation(self.n, self.signs)), -1, self.axis))

    def answer(self, subject: Subject) -> NDArray[np.uint32]:
        """Return the backend's answer as bits."""
        x = LAYOUTS[self.layout](self.x) if self.layout else self.x.copy()
        y = subject.backend.hadamard(subject.give(x), self.n, self.signs, axis=self.axis)
        return float_bits(subject.take(y))

    @property
    def needs(self) -> Needs:
        """The capabilities that the transform uses."""
        return ("in_dtypes", dtype_name(self.x)), ("hadamard_sizes", self.n)

    def describe(self) -> dict[str, str]:
        """Return the request in words."""
        return {
            "n": str(self.n), "signs": hex(self.signs), "axis": str(self.axis), "dtype": dtype_name(self.x),
            "shape": str(self.x.shape), **({"layout": self.layout} if self.layout else {}),
        }  # fmt: skip


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of hadamard.*."""
    rng = np.random.default_rng(plan.seed)
    for n in SIZES:
        signs = int.from_bytes(rng.bytes(32), "little") & (1 << n) - 1
        unit = np.concatenate([np.eye(n), np.roll(np.eye(n), 1, axis=1)]).astype(np.float32)  # [2n, n]
        for axis, x in ((1, plan.cast(unit)), (0, plan.cast(unit.T.copy()))):
            t, title = Transform(x, n, axis=axis), f"H{n} of unit vectors, axis {axis}"
            yield _check("hadamard.size", f"{title}: signs", t, mask=0x80000000)
            yield _check("hadamard.factor", f"{title}: magnitudes", t, mask=0x7FFFFFFF)
        for vector in (signs, 1, 1 << n - 1, (1 << n) - 1):
            x = tame(rng, (3, max(32, 2 * n)), made=plan.format)
            before = x * np.resize(Rotation(n, vector).vector(), x.shape[1])
            t, control = Transform(plan.cast(x), n, vector), Transform(plan.cast(before), n)
            yield _check("hadamard.signs", f"H{n} signs {vector:#x}", t, control=control)
        single = Transform(plan.cast(_single(rng, n)), n)
        yield _check("hadamard.factor", f"H{n} of one element a group", single, mask=0x7FFFFFFF)
        for what, draw in (
            ("cancelling", cancelling),
            ("heavy-tailed", heavy_tailed),
            ("subnormal", _subnormal),
        ):
            x = draw(rng, (64 if plan.full else 8, 4 * n))
            yield _check("hadamard.order", f"H{n} {what}", Transform(plan.cast(x), n, signs))
        for shape, axis in (((2, 2 * n, 3), 1), ((2 * n, 2, 3), 0), ((3, n, 2, 2), 1)):
            t = Transform(plan.cast(tame(rng, shape, axis, made=plan.format)), n, axis=axis)
            rows = np.ascontiguousarray(np.moveaxis(t.x, axis, -1)).reshape(-1, shape[axis])
            title = f"H{n} of shape {shape} along axis {axis}"
            yield _check("hadamard.size", title, t, control=Transform(rows, n))
        middle = Transform(plan.cast(cancelling(rng, (2, 2 * n, 3))), n, axis=1)
        yield _check("hadamard.order", f"H{n} along the middle", middle)
        in_rows = Transform(plan.cast(tame(rng, (5, max(32, 2 * n)), made=plan.format)), n)
        in_columns = replace(in_rows, layout="transposed")
        long = Transform(plan.cast(tame(rng, (3, plan.long), made=plan.format)), n, signs)
        control = Transform(long.x[:, :1024], n, signs)
        yield _check("quantize.strides", f"H{n} of length {plan.long}", long, control=control)
        yield _check("quantize.strides", f"H{n} transposed", in_columns, control=in_rows)
        special = Transform(plan.cast(_nonfinite(plan, rng, n)), n, signs)
        yield _check("hadamard.nonfinite", f"H{n} NaN, Inf, overflow", special)
        yield from _quantized(plan, rng, n)
    if plan.full:  # a result beyond a processor's caches
        large = Transform(plan.cast(rng.standard_normal((4099, 1024))), 32)
        control = Transform(large.x[:64], 32)
        yield _check("quantize.strides", "H32 of 4 Mi values", large, control=control)
    for name in ("bfloat16", "float16"):
        t = Transform(cast(rng.standard_normal((4, 64)), name), 16, 0x1234)
        yield _check("conventions.inputs", f"H16 of {name}", t, control=replace(t, x=t.x.astype(np.float32)))


def _check(
    clause: str, title: str, transform: Transform, mask: int = 0xFFFFFFFF, control: Transform | None = None
) -> Check:
    """Return a check of the bits of `mask`; if the control is declared and wrong too, `hadamard.order` is to blame."""

    def wrong(t: Transform, subject: Subject) -> NDArray[np.bool_]:
        got = t.answer(subject)
        if got.shape != t.expected.shape:
            raise ValueError(f"the result has shape {got.shape}, expected {t.expected.shape}")
        differs: NDArray[np.bool_] = ((got ^ t.expected) & mask) != 0
        return differs

    def run(subject: Subject) -> CheckResult:
        differs = wrong(transform, subject)
        if not differs.any():
            return CheckResult(differs.size)
        t = _shrunk(transform, subject, wrong) if subject.shrink else transform
        asked = control and all(declares(subject.capabilities, *need) for need in control.needs)
        right = not (control and asked) or np.array_equal(control.answer(subject), control.expected)
        bad = wrong(t, subject)
        where = first_place(bad)
        got, want = t.answer(subject), t.expected
        small = t.x.size <= _SMALL
        blamed = clause if right else "hadamard.order"
        failure = Failure(
            blamed, f"{int(differs.sum())} of {differs.size} values differ, first at {where} of what is shown",
            t.describe(), {"x": _words(float_bits(t.x))} if small else {},
            " ".join(_words(want)) if small else f"{want[where]:08x}",
            " ".join(_words(got)) if small else f"{got[where]:08x}",
            tuple(int(i) for i in np.flatnonzero(bad)[:64]),
        )  # fmt: skip
        return CheckResult(differs.size, failure)

    return Check(clause, title, transform, run)


def _words(bits: NDArray[np.uint32]) -> tuple[str, ...]:
    return tuple(f"{int(b):08x}" for b in bits.ravel())


def _shrunk(
    t: Transform, subject: Subject, wrong: Callable[[Transform, Subject], NDArray[np.bool_]]
) -> Transform:
    """Return a smaller transform that is still wrong: one group if that suffices, as few elements as possible."""

    def fault_of(candidate: Transform) -> str | None:
        return "wrong" if wrong(candidate, subject).any() else None

    search = Search(t, "wrong", fault_of, 2 * _SMALL)
    if t.axis % t.x.ndim == t.x.ndim - 1:
        *row, at = first_place(wrong(t, subject))
        group = at // t.n * t.n
        search.take(replace(t, x=t.x[tuple(row)][None, group : group + t.n].copy()))
    search.take(replace(search.case, signs=0))
    t = search.case
    if t.x.size <= _SMALL:
        fewest_elements(search, t.x, lambda x: replace(t, x=x))
    return search.case


def _single(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """Return groups of one element each, of any mantissa: every sum is exact, and only the factor rounds."""
    x = np.zeros((64, n), np.float32)
    x[np.arange(64), rng.integers(0, n, 64)] = rng.uniform(1, 2, 64) * np.exp2(rng.integers(-9, 9, 64))
    return x


def _subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.integers(1, 1 << 23, shape).astype(np.uint32).view(np.float32)


def _nonfinite(plan: Plan, rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    x = tame(rng, (6, 4 * n), made=plan.format)
    x[0, 1], x[1, n], x[2, 2 * n - 1] = np.nan, np.inf, -np.inf
    x[3, :2] = np.inf, -np.inf
    x[4] = np.finfo(np.float32).max * rng.choice([-1.0, 1.0], 4 * n)
    x[5] = any_bits(rng, (4 * n,), element=plan.element)
    return x


def _quantized(plan: Plan, rng: np.random.Generator, n: int) -> Iterator[Check]:
    """The transform inside a quantization: float32 into the scale, signs by policy and GEMM, overflow a NaN block."""
    length = max(plan.format.k, n)
    for rule in rules_of(plan.format.scale) if plan.full else (plan.base.scale_rule,):
        spec = replace(plan.base, scale_rule=rule, hadamard=n)
        x = plan.cast(rng.standard_normal((40, 2 * length)))
        yield quantize_check(
            "hadamard.float32", f"H{n} {rule.value}", Request(x, spec, rng=STREAM, amax=plan.amax)
        )
    spec = replace(plan.base, hadamard=n)
    x = tame(rng, (4, 2 * length), made=plan.format)
    x[1, 3], x[2, length] = np.inf, np.nan
    x[3] = np.finfo(np.float32).max
    request = Request(plan.cast(x), spec, rng=STREAM, amax=plan.amax)
    yield quantize_check("hadamard.nonfinite", f"H{n} quantized, NaN, Inf, overflow", request)
    x = plan.cast(tame(rng, (8, 2 * length), made=plan.format))
    for policy in SignPolicy if plan.full or n in (16, 64, 256) else (SignPolicy.PER_STEP_LAYER,):
        for stream in (Stream(3), STREAM, *(replace(STREAM, operand=o) for o in range(1, 6))):
            title = f"H{n} {policy.value}, step {stream.step}, layer {stream.layer}, operand {stream.operand}"
            request = Request(x, replace(spec, signs=policy), rng=stream, amax=plan.amax)
            yield quantize_check("hadamard.policy", title, request)
