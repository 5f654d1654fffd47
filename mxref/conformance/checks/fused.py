"""Checks of the fused operations `quantize_dual` and `fake_quantize` against the separate operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.conformance.checks.places import drawn_spec
from mxref.conformance.model import Check, CheckResult, Failure, Op, Plan, Subject, cast
from mxref.conformance.requests.crafted import any_bits, heavy_tailed, tame
from mxref.conformance.requests.decoding import DTYPES, differs
from mxref.conformance.requests.encoding import Blocks, Request, all_of_it, as_numpy
from mxref.errors import NonfiniteError, ShapeError
from mxref.formats import INPUT_DTYPES, BlockShape, Nonfinite
from mxref.placement import Placement
from mxref.plan import dtype_name, plan_quantize
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

STREAM = Stream(8, step=1, layer=3, operand=2)

Pair = tuple[OperandSpec, OperandSpec]

_SHAPES: tuple[tuple[tuple[int, int], tuple[bool, bool]], ...] = (
    ((96, 160), (False, False)), ((41, 64), (False, True)), ((64, 41), (True, False)), ((70, 45), (True, True)),
    ((1, 64), (False, True)), ((64, 1), (True, False)), ((1, 1), (True, True)), ((32, 288), (True, True)),
    ((0, 64), (False, False)), ((64, 0), (False, False)), ((0, 0), (True, True)),
)  # fmt: skip
"""Shapes, and which block axes are padded; shapes that a pair of treatments cannot take are skipped."""


@dataclass(frozen=True, eq=False)
class Dual:
    """Arguments of `quantize_dual`; `view` turns a copy of `x` into the array that is passed."""

    x: NDArray[Any]
    specs: Pair
    rngs: tuple[Stream, Stream] = (STREAM, replace(STREAM, operand=4))
    origin: tuple[int, int] | None = None
    global_shape: tuple[int, int] | None = None
    pads: tuple[bool, bool] = (False, False)
    view: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    layout: str = ""
    """A description of `view`."""

    def array(self) -> NDArray[Any]:
        """Return the input: a fresh array, so that a backend that writes to it spoils no other check."""
        x = self.x.copy()
        return self.view(x) if self.view else x

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """Where the array lies, for either orientation."""
        row, column = (Placement(rng, self.origin, self.global_shape) for rng in self.rngs)
        return row, column

    @property
    def fits(self) -> bool:
        """Whether both orientations are possible."""
        shape = self.array().shape
        try:
            for axis, spec, placement, pad in zip(
                (1, 0), self.specs, self.placements, self.pads, strict=True
            ):
                plan_quantize(shape, spec, axis, placement, pad)
        except ShapeError:
            return False
        return True

    @property
    def needs(self) -> tuple[tuple[str, Any], ...]:
        """The capabilities that both orientations use, and the library that the view takes."""
        both = (need for spec in self.specs for need in Request(self.x, spec).needs)
        return (*dict.fromkeys(both), *((("arrays", "numpy"),) if self.layout == "backwards" else ()))

    def describe(self) -> dict[str, str]:
        """Return the request in words: the treatments, the array, and arguments that differ from their defaults."""
        x = self.array()
        out = {f"along axis {axis}": _words(spec) for axis, spec in zip((1, 0), self.specs, strict=True)}
        out |= {"dtype": dtype_name(x), "shape": str(x.shape), "rngs": str(self.rngs)}
        for name in ("origin", "global_shape", "layout"):
            if getattr(self, name):
                out[name] = str(getattr(self, name))
        return out | ({"pads": str(self.pads)} if any(self.pads) else {})

    def problem(self, subject: Subject) -> tuple[int, str]:
        """Return how many blocks were compared, and what is wrong with the backend's answer, if anything."""
        array, compared = self.array(), 0
        given = subject.give(array)
        before = array.tobytes()
        pair = subject.backend.quantize_dual(given, self.specs, placements=self.placements, pads=self.pads)
        if subject.take(given).tobytes() != before:
            return 0, "quantize_dual wrote to its input"
        each = zip(pair, self.specs, self.placements, self.pads, (1, 0), strict=True)
        for q, spec, placement, pad, axis in each:
            alone = subject.backend.quantize(
                subject.give(self.array()), spec, axis=axis, placement=placement, pad=pad
            )
            got, want = as_numpy(subject, q), as_numpy(subject, alone)
            if (got.shape, got.length) != (want.shape, want.length):
                return (
                    compared,
                    f"along axis {axis}: {got.shape} stored to {got.length}, not to {want.length}",
                )
            wrong, count = all_of_it(Blocks.of(got), Blocks.of(want))
            compared += count
            if wrong.any():
                row, block = (int(i) for i in np.argwhere(wrong)[0])
                return compared, (
                    f"along axis {axis}: not what quantize gives in {int(wrong.sum())} of {count} blocks, "
                    f"the first in stored row {row}, block {block}"
                )
            if got != want:
                return compared, f"along axis {axis}: the same codes under another description: {got!r}"
        return compared, ""


def checks(plan: Plan) -> Iterator[Check]:
    """Yield the checks of `quantize_dual` and `fake_quantize`."""
    rng = np.random.default_rng(plan.seed)
    for i, pair in enumerate(_pairs(plan)):
        whole = Dual(plan.cast(_values(rng, (64, 96))), pair)
        ways = {
            "": whole,
            ", transposed": replace(whole, view=np.transpose, layout="transposed"),
            ", a part": replace(whole, origin=(64, 0), global_shape=(192, 96)),
        }
        ways |= {
            f", shape {shape}": Dual(plan.cast(_values(rng, shape)), pair, pads=pads)
            for shape, pads in _SHAPES
        }
        # The level quick covers every layout with a third of the treatments.
        for j, (what, case) in enumerate(ways.items()):
            if plan.full or (i + j) % 3 == 0:
                yield from _dual(f"treatments {i}{what}", case)
    for layout, shape, view in _views():
        for rounding in (Rounding.RNE, Rounding.SR):
            specs = (replace(plan.base, rounding=rounding), replace(plan.base, rounding=rounding))
            case = Dual(plan.cast(_values(rng, shape)), specs, pads=(True, True), view=view, layout=layout)
            yield from _dual(f"{rounding.value}, {layout}", case)
    last = Dual(plan.cast(_values(rng, (41, 64))), _random(plan), origin=(64, 64), global_shape=(105, 192))
    yield from _dual("the last rows of a padded tensor", replace(last, pads=(False, True)))
    for i in range(400 if plan.full else 24):
        yield from _dual(f"drawn {i}", _drawn(rng, plan))
    for i, (spec, _) in enumerate(_pairs(plan)):
        for dtype in DTYPES if plan.full or not i else DTYPES[i % 3 :: 3]:
            yield _fake(plan, f"treatment {i}, {dtype}", spec, dtype, rng)
    yield from _raises(plan)


def _pairs(plan: Plan) -> Iterator[Pair]:
    """Yield pairs of treatments, plain first: those of a row and of a column."""
    base = plan.base
    sr, tile = replace(base, rounding=Rounding.SR), replace(base, block=BlockShape.TILE)
    turned = replace(base, hadamard=32, signs=SignPolicy.PER_STEP)
    yield base, base
    yield base, replace(base, zero_scale=127)
    yield replace(base, scale_rule=ScaleRule.EVEN), replace(base, scale_rule=ScaleRule.RCEIL)
    yield replace(base, scale_rule=ScaleRule.CEIL), replace(base, scale_rule=ScaleRule.FLOOR, prescale=True)
    yield replace(base, rounding=Rounding.RNA), replace(base, rounding=Rounding.RTZ)
    yield sr, sr
    yield sr, base
    yield base, sr
    yield replace(sr, sr_bits=8), replace(sr, sr_bits=20, prescale=True)
    yield base, turned
    yield turned, base
    yield turned, turned
    yield replace(base, hadamard=16), replace(base, hadamard=16, prescale=True)
    yield base, replace(base, hadamard=256)
    yield replace(turned, hadamard=128), replace(base, hadamard=2)
    yield replace(turned, hadamard=64), replace(base, hadamard=16, signs=SignPolicy.FIXED)
    yield replace(turned, rounding=Rounding.SR), replace(turned, rounding=Rounding.SR)
    yield tile, tile
    yield tile, base
    yield base, tile
    yield replace(tile, rounding=Rounding.SR), replace(turned, block=BlockShape.TILE)


def _words(spec: OperandSpec) -> str:
    default = OperandSpec()
    fields = {name: getattr(spec, name) for name in OperandSpec.__dataclass_fields__}
    always = ("scale_rule", "rounding")
    return ", ".join(
        f"{name}={value!s}"
        for name, value in fields.items()
        if name in always or value != getattr(default, name)
    )


def _random(plan: Plan) -> Pair:
    sr = replace(plan.base, rounding=Rounding.SR)
    return sr, sr


def _values(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return draws of many magnitudes, with a corner of zeros, and a NaN where there is room for one."""
    x: NDArray[np.float64] = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    x[:32, :32] *= 0.0 if min(shape) > 32 else 1.0
    if min(shape) > 40:
        x[40, 40] = np.nan
    return x


def _views() -> tuple[tuple[str, tuple[int, int], Callable[[NDArray[Any]], NDArray[Any]]], ...]:
    """Layouts in memory: a name, the shape of the base array, and how the input is cut out of it."""
    return (
        ("every second row and column", (80, 192), lambda x: x[::2, ::2]),
        ("rows out of the middle", (130, 96), lambda x: x[33:98]),
        ("columns out of the middle", (40, 160), lambda x: x[:, 33:98]),
        ("backwards", (33, 65), lambda x: x[::-1, ::-1]),
    )


def _drawn(rng: np.random.Generator, plan: Plan) -> Dual:
    """Return a drawn request of what is declared: treatments, type, shape, padding, placement, memory order."""
    specs = drawn_spec(rng, plan.declared, plan.format), drawn_spec(rng, plan.declared, plan.format)
    k = plan.format.k
    units = [max(k, spec.hadamard) for spec in specs[::-1]]  # of axis 0, then of axis 1
    tiles = any(spec.block is BlockShape.TILE for spec in specs)
    pads = bool(rng.integers(2)), bool(rng.integers(2))
    shape = [unit * int(rng.integers(1, 4)) for unit in units]
    for axis, pad in ((1, pads[0]), (0, pads[1])):
        if pad and not tiles:
            shape[axis] -= int(rng.integers(units[axis]))
    kinds = partial(any_bits, element=plan.element), heavy_tailed, partial(tame, made=plan.format)
    kind = kinds[int(rng.integers(3))]
    x = np.asarray(kind(rng, (shape[0], k * -(-shape[1] // k))), np.float32)[:, : shape[1]]
    declared = [name for name in INPUT_DTYPES if name in plan.declared.in_dtypes] or list(INPUT_DTYPES)
    case = Dual(cast(x, declared[int(rng.integers(len(declared)))]), specs, pads=pads)
    if rng.integers(2):
        case = replace(case, view=np.asfortranarray, layout="column after column")
    if not any(pads) and rng.integers(2):
        origin = int(rng.integers(3)) * max(units), int(rng.integers(3)) * max(units)
        total = origin[0] + shape[0], origin[1] + shape[1] + max(units)
        case = replace(case, origin=origin, global_shape=total)
    seed = Stream(int(rng.integers(1 << 62)), int(rng.integers(1 << 20)), int(rng.integers(99)), operand=2)
    return replace(case, rngs=(seed, replace(seed, operand=4)))


def _dual(title: str, case: Dual) -> Iterator[Check]:
    if not case.fits:
        return

    def run(subject: Subject) -> CheckResult:
        compared, problem = case.problem(subject)
        failure = Failure("conformance.dual", title, problem, case.describe()) if problem else None
        return CheckResult(compared, failure)

    yield Check("conformance.dual", f"quantize_dual, {title}", Op.QUANTIZE, case.needs, run, case.specs[0],
                case.describe)  # fmt: skip


def _fake(plan: Plan, title: str, spec: OperandSpec, dtype: str, rng: np.random.Generator) -> Check:
    x = plan.cast(tame(rng, (64, 64), made=plan.format) * rng.standard_normal((64, 64)))
    x[3, 5] = np.inf
    padded = spec.block is BlockShape.ROW
    needs = (*Request(x, spec).needs, ("dequantize_dtypes", dtype))

    def run(subject: Subject) -> CheckResult:
        compared = 0
        for axis, held in ((-1, x), (0, x[:41, :3] if padded else x)):
            arguments: dict[str, Any] = {"axis": axis, "placement": Placement(STREAM), "pad": padded}
            fake = subject.backend.fake_quantize(subject.give(held.copy()), spec, dtype=dtype, **arguments)
            q = subject.backend.quantize(subject.give(held.copy()), spec, **arguments)
            got, want = subject.take(fake), subject.take(subject.backend.dequantize(q, dtype))
            compared += want.size
            same = got.shape == want.shape and got.dtype == want.dtype
            wrong = differs(got, want) if same else np.ones(want.shape, np.bool_)
            if wrong.any():
                message = f"fake_quantize differs from dequantize(quantize) in {int(wrong.sum())} of {want.size} values"
                request = {"spec": _words(spec), "axis": str(axis), "shape": str(held.shape)}
                return CheckResult(compared, Failure("conformance.dual", title, message, request))
        return CheckResult(compared)

    return Check("conformance.dual", f"fake_quantize, {title}", Op.QUANTIZE, needs, run, spec)


def _raises(plan: Plan) -> Iterator[Check]:
    """A NaN under the policy that refuses it; a fused operation returns no scales that would show it."""
    x = plan.cast(_values(np.random.default_rng(3), (64, 64)))
    spec = replace(plan.base, nonfinite=Nonfinite.RAISE)
    calls: dict[str, Callable[[Subject], Any]] = {
        "quantize_dual": lambda s: s.backend.quantize_dual(
            s.give(x.copy()), (plan.base, spec), placements=(Placement(STREAM),) * 2
        ),
        "fake_quantize": lambda s: s.backend.fake_quantize(s.give(x.copy()), spec, placement=Placement(STREAM)),
    }  # fmt: skip
    for name, call in calls.items():

        def run(subject: Subject, name: str = name, call: Callable[[Subject], Any] = call) -> CheckResult:
            try:
                call(subject)
            except NonfiniteError:
                return CheckResult(1)
            message = f"{name} let a NaN pass under nonfinite = 'raise': NonfiniteError expected"
            return CheckResult(1, Failure("conformance.dual", f"{name}, nonfinite", message))

        needs = list(Request(x, spec).needs)
        if name == "fake_quantize":
            needs.append(("dequantize_dtypes", "float32"))
        yield Check("conformance.dual", f"{name}, nonfinite = 'raise'", Op.QUANTIZE, tuple(needs), run, spec)
