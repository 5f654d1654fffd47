"""Conformance: a backend held to the specification, clause by clause, in exactly what it declares.

Golden vectors, crafted blocks and draws go through the backend, and every answer is compared with the
reference to the bit (`bounded` GEMMs: with their tolerance). What fails is shrunk to the smallest block that
still fails. What a backend does not declare must be refused, and its checks are skipped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from mxref.backend import Backend, Capabilities
from mxref.conformance import (
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
from mxref.conformance.model import (
    CLAUSES,
    Check,
    ClauseResult,
    Failure,
    Level,
    Op,
    Plan,
    Report,
    Subject,
    Verdict,
    by_rank,
)
from mxref.conformance.request import Mismatch
from mxref.errors import RecipeError, UnsupportedError
from mxref.recipe import OperandSpec, dialect
from mxref.tomlio import nearest

__all__ = ["CLAUSES", "ClauseResult", "Failure", "Level", "Op", "Report", "check", "checks_of"]


@lru_cache(maxsize=4)
def _all_checks(plan: Plan, specs: tuple[OperandSpec, ...]) -> tuple[Check, ...]:
    families = (
        protocol.checks, inputs.checks, decode.checks, sweep.checks, random.checks, hadamard.checks, layout.checks,
        gemm.checks, vectors.checks, fused.checks, prepared.checks,
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
        raise RecipeError(f"unknown {what} {value!r}{nearest(value, known)}; known: {', '.join(known)}")
    return str(value)


def _within(spec: OperandSpec, whole: OperandSpec) -> bool:
    """Return whether a treatment uses no more than another: its transform or its prescale may be left out."""
    bare = replace(spec, hadamard=whole.hadamard, signs=whole.signs, zero_scale=whole.zero_scale)
    bare = replace(bare, prescale=whole.prescale, sr_bits=whole.sr_bits, nonfinite=whole.nonfinite)
    return bare == whole and spec.hadamard in (0, whole.hadamard) and spec.prescale in (False, whole.prescale)


def check(
    backend: Backend,
    *,
    ops: Iterable[str] | None = None,
    dialects: Iterable[str] | None = None,
    clauses: Collection[str] | None = None,
    seed: int = 0,
    level: str = Level.FULL,
    shrink: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Return how a backend fares against the specification.

    Args:
        backend: the backend.
        ops: operations to check: `quantize`, `dequantize`, `hadamard`, `gemm`; default all.
        dialects: check quantization only as these dialects treat operands.
        clauses: check only these clauses.
        seed: of drawn values.
        level: `full`, or `quick` for a tenth of the time.
        shrink: whether the first failure of each clause is shrunk.
        progress: called after each check with the number done and the total.

    Raises:
        RecipeError: as `checks_of`.
    """
    start = time.monotonic()
    ops = tuple(ops or (op.value for op in Op))
    arguments = {"ops": ops, "dialects": dialects, "clauses": clauses, "seed": seed, "level": level}
    checks = checks_of(backend.capabilities, **arguments)  # type: ignore[arg-type]
    results: dict[str, ClauseResult] = {}
    subject = Subject(backend)
    for i, each in enumerate(checks):
        result = results.setdefault(each.clause, ClauseResult(each.clause))
        subject.shrink = shrink and not result.failures
        run_check(each, subject, results)
        if progress:
            progress(i + 1, len(checks))
    return Report(
        backend.name, Level(level), seed, ops,
        tuple(results[clause] for clause in by_rank(results)), time.monotonic() - start,
    )  # fmt: skip


def run_check(check: Check, subject: Subject, results: dict[str, ClauseResult]) -> Failure | None:
    """Run or skip one check and add the outcome to the result of its clause; return its failure, if any."""
    result = results.setdefault(check.clause, ClauseResult(check.clause))
    reason = check.undeclared(subject.capabilities)
    if reason:
        result.skipped += 1
        result.reasons[reason] = result.reasons.get(reason, 0) + 1
        return None
    try:
        verdict = check.run(subject)
    except UnsupportedError as err:
        # What is declared was refused: the declaration is wrong, whatever the clause of the request.
        verdict = Verdict(0, _raised("conformance.capabilities", check, err))
    except Exception as err:  # a backend may fail in any way; that is a finding, not an end
        verdict = Verdict(0, _raised(check.clause, check, err))
    result.compared += verdict.compared
    if verdict.failure is None:
        result.passed += 1
        return None
    result = results.setdefault(verdict.failure.clause, ClauseResult(verdict.failure.clause))
    result.failed += 1
    if not result.failures:
        result.failures.append(verdict.failure)
    return verdict.failure


def _raised(clause: str, check: Check, err: Exception) -> Failure:
    text = " ".join(str(err).split()) or "no message"
    message = text if isinstance(err, Mismatch) else f"raised {type(err).__name__}: {text}"
    return Failure(clause, check.title, message, check.describe())
