"""The checks of a backend: which are selected, which family makes them, and the run of one.

To add checks, write a module in `checks` whose function `checks` yields them for a plan, and list it in `_FAMILIES`
with the operations and clauses that they can be of: a selection of clauses then does not make all other checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Self

from mxref.arrays import described
from mxref.capabilities import Capabilities
from mxref.conformance.checking import Asked, Check, Op, Plan, Subject
from mxref.conformance.checks import (
    dequantization,
    fused,
    fused_products,
    gemms,
    golden,
    places,
    protocol,
    repeated,
    streams,
    sweep,
    transforms,
)
from mxref.conformance.clauses import CLAUSES
from mxref.conformance.outcome import CheckResult, Failure, Level
from mxref.conformance.requests.quantizing import MalformedAnswer
from mxref.conformance.watch import Copies
from mxref.errors import RecipeError, UnsupportedError
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.recipe import OperandSpec
from mxref.tomlio import shown, suggestion


def checks_of(
    capabilities: Capabilities,
    *,
    ops: Iterable[str] | None = None,
    clauses: Collection[str] | None = None,
    seed: int = 0,
    level: str = Level.FULL,
    formats: Iterable[str] | None = None,
) -> list[Check]:
    """Return the checks for a backend of these capabilities, those that will be skipped included.

    The capabilities decide the plainest treatment, on which others build. What is chosen, and the seed, are given as to
    `mxref.conformance.check`.

    Raises:
        RecipeError: an unknown operation, clause, level or format, or a negative seed.
    """
    return Choice.of(ops, clauses, seed, level, formats).checks(capabilities)


def _names(argument: str, what: str, values: Any, known: Collection[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple, None as an empty one; RecipeError for another type or an unknown name."""
    try:
        names = (values,) if isinstance(values, str) else tuple(values or ())
    except TypeError:
        raise RecipeError(f"{argument} must be a name or several, got {described(values)}") from None
    for name in names:
        if name not in known:
            every = [str(each) for each in known]
            raise RecipeError(
                f"unknown {what} {shown(name)}{suggestion(name, every)}; known: {', '.join(every)}"
            )
    return names


@dataclass(frozen=True)
class Choice:
    """The part of the suite that is asked for, as `checks_of` takes it."""

    ops: tuple[str, ...]
    clauses: tuple[str, ...]
    seed: int
    level: Level
    formats: tuple[str, ...]

    @classmethod
    def of(cls, ops: Any, clauses: Any, seed: int, level: str, formats: Any = None) -> Self:
        """Return a choice from names, one alone or several; no operation or format means all of them.

        Raises:
            RecipeError: an unknown operation, clause, level or format, or a negative seed.
        """
        if seed < 0:
            raise RecipeError(f"seed = {seed} is negative; give 0 or more")
        (amount,) = _names("level", "level", (level,), tuple(Level))
        return cls(
            _names("ops", "operation", ops, tuple(Op)) or tuple(op.value for op in Op),
            _names("clauses", "clause", clauses, CLAUSES),
            seed,
            Level(amount),
            _names("formats", "block format", formats, BLOCK_FORMATS) or tuple(BLOCK_FORMATS),
        )

    def checks(self, capabilities: Capabilities) -> list[Check]:
        """Return its checks for a backend of these capabilities."""
        chosen = frozenset(BLOCK_FORMATS[name] for name in self.formats)
        declared = capabilities.formats | {made for _, *pair in capabilities.gemms for made in pair}
        families = [family for family in _FAMILIES if family.asked(self.ops, self.clauses)]
        formats = tuple(BLOCK_FORMATS.values())
        first = next((made for made in formats if made in capabilities.formats), formats[0])
        found: list[Check] = []
        for made in formats:
            if made is not first and (made not in chosen or made not in declared):
                continue
            plan = Plan.of(self.level, self.seed, capabilities, made)
            shared = replace(plan, declared=Capabilities())
            for family in families:
                whole = _checks(family.make, plan if family.drawn else shared)
                # Checks that are the same for all formats appear once.
                found += whole if made is first else [check for check in whole if check.formats]
        for made in formats:
            if made in chosen - declared - {first}:
                found += _unmade(made)
        return [
            check
            for check in found
            if (not self.clauses or check.clause in self.clauses)
            and check.asked.op in self.ops
            and chosen.issuperset(check.formats)
        ]


def together(checks: list[Check], numbers: Iterable[int]) -> list[list[int]]:
    """Group the numbers of checks by the capabilities that they need, and so by the kernels of most backends."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in numbers:
        groups.setdefault((checks[i].asked.op, checks[i].needs), []).append(i)
    return list(groups.values())


def result_of(check: Check, subject: Subject) -> CheckResult:
    """Run a check whose needs are all declared, and return its result and its use of memory.

    A forked copy of the process that returns to this function is ended, and the check fails.
    """
    watched = subject.watched
    watched.start()
    before = watched.calls
    with Copies() as copies:
        verdict = _answered(check, subject)
    failure, misuse = verdict.failure, Failure(*watched.faults[0]) if watched.faults else None
    if copies.returned and not failure:
        failure = Failure(
            check.clause, "the backend forked the process, and the copy went on from the call as well"
        )
    failure, misuse = (
        each and replace(each, check=check.title, request=each.request or dict(check.asked.describe()))
        for each in (failure, misuse)
    )
    return replace(verdict, failure=failure, misuse=misuse, calls=watched.calls - before)


def _answered(check: Check, subject: Subject) -> CheckResult:
    try:
        return check.run(subject)
    except UnsupportedError as err:
        # What is declared was refused: the declaration is wrong, whatever the clause of the request.
        return _raised("conformance.capabilities", err)
    except MalformedAnswer as err:
        return CheckResult(0, Failure(check.clause, _one_line(err)))
    except (Exception, SystemExit) as err:  # any exception of the backend is a failed check
        return _raised(check.raised or check.clause, err)


def _raised(clause: str, err: BaseException) -> CheckResult:
    return CheckResult(0, Failure(clause, f"raised {type(err).__name__}: {_one_line(err)}"))


def _one_line(err: BaseException) -> str:
    return " ".join(str(err).split()) or "no message"


_KEPT_PLANS = 8
"""Plans whose checks are cached, with the reference's answers."""


@dataclass(frozen=True)
class _Family:
    """The checks that one function makes."""

    make: Callable[[Plan], Iterable[Check]]
    ops: frozenset[Op]
    clauses: tuple[str, ...]
    """Clauses, or beginnings of clauses."""
    drawn: bool = False
    """Whether they are drawn from what is declared and asked for; others are the same for every backend."""
    of_formats: bool = True
    """Whether the clauses are those of an undeclared format that a report names; golden vectors are of any clause."""

    def asked(self, ops: Collection[str], clauses: Collection[str]) -> bool:
        """Return whether some of the checks may be of these operations and clauses; no clause stands for all."""
        named = not clauses or any(clause.startswith(self.clauses) for clause in clauses)
        return named and any(op.value in ops for op in self.ops)


_EVERY = frozenset(Op)
_QUANTIZE, _DECODE, _TRANSFORM, _GEMM = (
    frozenset([op]) for op in (Op.QUANTIZE, Op.DEQUANTIZE, Op.HADAMARD, Op.GEMM)
)
_PLACES = ("quantize.axis", "quantize.padding", "quantize.strides")

_FAMILIES = (
    _Family(protocol.checks, _EVERY, ("conformance.", "conventions.inputs"), of_formats=False),
    _Family(
        protocol.input_checks, _QUANTIZE, ("conformance.protocol", "conventions.inputs", "scale.nonfinite")
    ),
    _Family(dequantization.checks, _DECODE, ("dequantize.", "formats.", "packing.", *_PLACES)),
    _Family(sweep.checks, _QUANTIZE, ("scale.", "rounding.", "dialect.")),
    _Family(streams.checks, _QUANTIZE, ("random.", "rounding.")),
    _Family(
        transforms.checks,
        _QUANTIZE | _TRANSFORM,
        ("hadamard.", "linear.rotation", "conventions.inputs", "quantize.strides"),
    ),
    _Family(places.checks, _QUANTIZE, ("packing.", "quantize.length", *_PLACES)),
    _Family(gemms.checks, _GEMM, ("gemm.",)),
    _Family(golden.checks, _EVERY, ("",), of_formats=False),
    _Family(fused.checks, _QUANTIZE, ("conformance.dual",), drawn=True),
    _Family(fused_products.prepared_checks, _GEMM, ("conformance.dual",)),
    _Family(fused_products.added_checks, _GEMM, ("conformance.dual",)),
    _Family(repeated.checks, _EVERY, ("conformance.dual", "conformance.protocol")),
    _Family(places.combinations, _QUANTIZE, ("quantize.order",), drawn=True),
    _Family(gemms.mixed_checks, _GEMM, ("gemm.",)),
)


@lru_cache(maxsize=_KEPT_PLANS * len(_FAMILIES))
def _checks(make: Callable[[Plan], Iterable[Check]], plan: Plan) -> tuple[Check, ...]:
    """Return checks whose titles name the format, unless it is that of a plain treatment."""
    if plan.format is OperandSpec().format:
        return tuple(make(plan))
    return tuple(
        replace(each, title=f"{each.title}, {plan.format}") if len(each.formats) == 1 else each
        for each in make(plan)
    )


@cache
def _unmade(made: BlockFormat) -> tuple[Check, ...]:
    """Return what stands for the checks of an undeclared format, which take long to make and would all be skipped.

    It is a check for each clause and operation, so that a report names the format and every clause.
    """
    pairs = {
        (clause, op): None
        for clause in CLAUSES
        for family in _FAMILIES
        if family.of_formats and clause.startswith(family.clauses)
        for op in family.ops
    }
    return tuple(
        Check(clause, f"every check of {made}", Asked(op, (("formats", made),)), _never)
        for clause, op in pairs
    )


def _never(subject: Subject) -> CheckResult:
    raise AssertionError("an undeclared format is not asked for")
