"""The checks of a backend: which there are, which need the same of it, and what came of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from mxref.backend import Capabilities
from mxref.conformance import (
    added,
    decode,
    fused,
    gemm,
    hadamard,
    inputs,
    layout,
    prepared,
    protocol,
    random,
    sweep,
    vectors,
)
from mxref.conformance.model import CLAUSES, Check, Failure, Level, Op, Plan, Subject, Verdict
from mxref.conformance.request import Mismatch
from mxref.errors import RecipeError, UnsupportedError
from mxref.recipe import OperandSpec, dialect
from mxref.tomlio import suggestion


@lru_cache(maxsize=4)
def _all_checks(plan: Plan, specs: tuple[OperandSpec, ...]) -> tuple[Check, ...]:
    families = (
        protocol.checks, inputs.checks, decode.checks, sweep.checks, random.checks, hadamard.checks, layout.checks,
        gemm.checks, vectors.checks, fused.checks, prepared.checks,
        added.checks,
    )  # fmt: skip
    return (*(c for family in families for c in family(plan)), *layout.combinations(plan, specs))


def checks_of(
    capabilities: Capabilities,
    *,
    ops: Iterable[str] | None = None,
    dialects: Iterable[str] | None = None,
    clauses: Collection[str] | None = None,
    seed: int = 0,
    level: str = Level.FULL,
) -> list[Check]:
    """Return the checks for a backend of these capabilities, those that will be skipped included.

    Args:
        capabilities: what the backend declares; it decides the plainest treatment, on which others build.
        ops: operations to check, default all four.
        dialects: check quantization only as these dialects treat operands.
        clauses: check only these clauses.
        seed: of drawn values, 0 or more.
        level: `quick` or `full`.

    Raises:
        RecipeError: an unknown operation, dialect, clause or level, or a negative seed.
    """
    wanted = {_member(op, tuple(Op), "operation") for op in ops or Op}
    specs = tuple(dialect(name).spec for name in dialects or ())
    named = {_member(clause, CLAUSES, "clause") for clause in clauses or ()}
    if seed < 0:
        raise RecipeError(f"seed = {seed} is negative; give 0 or more")
    plan = Plan.of(Level(_member(level, tuple(Level), "level")), seed, capabilities)
    return [
        check
        for check in _all_checks(plan, specs)
        if check.op.value in wanted
        and (not named or check.clause in named)
        and (not specs or check.spec is None or any(_within(check.spec, spec) for spec in specs))
    ]


def _member(value: str, known: Collection[str], what: str) -> str:
    if value not in known:
        raise RecipeError(f"unknown {what} {value!r}{suggestion(value, known)}; known: {', '.join(known)}")
    return str(value)


def _within(spec: OperandSpec, whole: OperandSpec) -> bool:
    """Return whether a treatment uses no more than another: its transform or its prescale may be left out."""
    bare = replace(spec, hadamard=whole.hadamard, signs=whole.signs, zero_scale=whole.zero_scale)
    bare = replace(bare, prescale=whole.prescale, sr_bits=whole.sr_bits, nonfinite=whole.nonfinite)
    return bare == whole and spec.hadamard in (0, whole.hadamard) and spec.prescale in (False, whole.prescale)


@dataclass(frozen=True)
class Choice:
    """The part of the suite that is asked for, as `checks_of` takes it."""

    ops: tuple[str, ...]
    dialects: tuple[str, ...]
    clauses: tuple[str, ...]
    seed: int
    level: str

    def checks(self, capabilities: Capabilities) -> list[Check]:
        """Return its checks for a backend of these capabilities."""
        return checks_of(
            capabilities, ops=self.ops, dialects=self.dialects, clauses=self.clauses, seed=self.seed, level=self.level
        )  # fmt: skip


def together(checks: list[Check], numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers of checks in groups that need the same of a backend, and so the same kernels of most."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in numbers:
        groups.setdefault((checks[i].op, checks[i].needs), []).append(i)
    return list(groups.values())


def verdict_of(check: Check, subject: Subject) -> Verdict:
    """Return what came of a check whose needs are all declared."""
    try:
        return check.run(subject)
    except UnsupportedError as err:
        # What is declared was refused: the declaration is wrong, whatever the clause of the request.
        return Verdict(0, _raised("conformance.capabilities", check, err))
    except Exception as err:  # a backend may fail in any way; that is a finding, not an end
        return Verdict(0, _raised(check.clause, check, err))


def _raised(clause: str, check: Check, err: Exception) -> Failure:
    text = " ".join(str(err).split()) or "no message"
    message = text if isinstance(err, Mismatch) else f"raised {type(err).__name__}: {text}"
    return Failure(clause, check.title, message, check.describe())
