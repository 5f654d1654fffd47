"""Conformance: checks a backend against the specification, clause by clause, in exactly what it declares.

Golden vectors, crafted blocks and random blocks go through the backend. Every answer is compared with the reference
bit for bit (for `bounded` GEMMs, within their tolerance). A failure is shrunk to the smallest block that still fails.
The backend must refuse what it does not declare; the checks of that are skipped and counted.

`requests` holds what is asked, `checks` which questions belong to which clause, `finding` and `watch` how an answer is
judged, `blame` which clause is broken and by how little, `isolation` how a backend is kept apart, and `outcome` what is
reported. `function` and `dump` hold functions and arrays that are no backend, `replay` what a training run recorded,
and `stacks` what two programs multiplied. A check may be added at any time. One may only be removed or narrowed if
every backend of `tests/mutants` is still caught.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import replace

from mxref.backend import Backend
from mxref.conformance.checking import Check, Op
from mxref.conformance.clauses import CLAUSES, by_rank
from mxref.conformance.isolation import TIME_LIMIT, Here, Loaded, Processes, Source
from mxref.conformance.outcome import NOT_ASKED, CheckResult, ClauseResult, Failure, Level, Report
from mxref.conformance.suite import Choice, checks_of
from mxref.discovery import get_backend
from mxref.errors import BackendError, LoadError

__all__ = [
    "CLAUSES",
    "ClauseResult",
    "Failure",
    "Level",
    "Op",
    "Report",
    "asked_clauses",
    "check",
    "checks_of",
    "examined",
]


def check(
    backend: Backend | str,
    *,
    ops: Iterable[str] | None = None,
    clauses: Collection[str] | None = None,
    seed: int = 0,
    level: str = Level.FULL,
    formats: Iterable[str] | None = None,
    shrink: bool = True,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
    time_limit: float = TIME_LIMIT,
    in_process: bool = False,
) -> Report:
    """Return the report of a backend's checks against the specification.

    A backend that is given by its name runs in separate processes. If it ends or crashes its process, or takes too
    long, the check that was running fails, and the other checks continue in another process.

    Args:
        backend: the name to load the backend by, or the backend itself, which then runs in this process.
        ops: operations to check, one name or several: `quantize`, `dequantize`, `hadamard`, `gemm`; default all.
        clauses: check only these clauses.
        seed: of drawn values.
        level: `full`, or `quick` for a tenth of the time.
        formats: check only these block formats, by name, and the checks that are the same for every format; default
            all.
        shrink: whether the first failure of each clause is shrunk.
        progress: called after each check with the number done and the total.
        jobs: processes that share the checks.
        time_limit: seconds that a check may take in a process of its own. Shrinking its failure may take as long
            again. Loading the backend may take as long, or 60 s if that is more.
        in_process: whether a backend that is given by its name runs in this process all the same, for a debugger.

    Raises:
        RecipeError: as `checks_of`.
        BackendError: there is no backend of that name; `jobs` is above 1 for a backend that runs in this process; or a
            process cannot load it.
    """
    start = time.monotonic()
    choice = Choice.of(ops, clauses, seed, level, formats)
    here = in_process or not isinstance(backend, str)
    if here and jobs != 1:
        raise BackendError(
            f"each of {jobs} processes loads the backend by its name: give the name, or jobs=1"
        )
    source: Source
    if isinstance(backend, str) and not in_process:
        source = Processes(backend, choice, jobs, time_limit)
    else:
        found = get_backend(backend) if isinstance(backend, str) else backend
        source = Here(found, choice.checks(found.capabilities))
    with closing(source):
        try:
            name, results = source.loaded.name, _examined(source, shrink, progress)
        except LoadError as err:
            name, results = str(backend), {}
            failure = Failure("conformance.protocol", str(err), check="the backend is loaded")
            _count(results, failure)
    return Report(
        name, choice.level, seed, choice.ops,
        tuple(results[clause] for clause in by_rank(results)), time.monotonic() - start, choice.formats,
    )  # fmt: skip


def asked_clauses(backend: str, *, seed: int = 0, level: str = Level.FULL) -> list[str]:
    """Return the clauses that a backend is checked for, causes first. Clauses of undeclared capabilities are included.

    Args:
        backend: the name to load it by, in a process of its own.
        seed: of drawn values.
        level: `full` or `quick`.

    Raises:
        BackendError: there is no such backend, or it failed while it was loaded.
    """
    choice = Choice.of(None, None, seed, level)
    with closing(Processes(backend, choice)) as source:
        return by_rank(set(source.loaded.clauses))


def examined(backend: Backend, checks: list[Check], shrink: bool = True) -> dict[str, ClauseResult]:
    """Run checks of a backend in this process, and return the result of each clause.

    Args:
        backend: the backend under test.
        checks: the checks; one that needs an undeclared capability is skipped.
        shrink: whether the first failure of each clause is shrunk.
    """
    return _examined(Here(backend, checks), shrink, None)


def _examined(
    source: Source, shrink: bool, progress: Callable[[int, int], None] | None
) -> dict[str, ClauseResult]:
    """Ask all checks, then those again that were the first to fail of their clause, to shrink their failures."""
    loaded, verdicts = source.loaded, dict[int, CheckResult]()
    skipped, total = sum(reason is not None for reason in loaded.reasons), len(loaded.reasons)
    for i, verdict in source.verdicts(loaded.groups):
        verdicts[i] = verdict
        if progress:
            progress(skipped + len(verdicts), total)
    if shrink:
        first: dict[str, int] = {}
        for i in sorted(verdicts):
            if failure := verdicts[i].failure:
                first.setdefault(failure.clause, i)
        again = [[i] for i in sorted(first.values()) if i not in source.lost]
        for i, verdict in source.verdicts(again, shrink=True):
            whole, small = verdicts[i].failure, verdict.failure
            # Another failure tells of a backend that changes.
            if whole and small and small.clause == whole.clause:
                verdicts[i] = replace(verdicts[i], failure=small)
    return _results(loaded, verdicts)


def _results(loaded: Loaded, verdicts: dict[int, CheckResult]) -> dict[str, ClauseResult]:
    """Return the result of each clause; a failure counts for the clause that decides the wrong bits."""
    results: dict[str, ClauseResult] = {}
    for i, (clause, reason) in enumerate(zip(loaded.clauses, loaded.reasons, strict=True)):
        result = results.setdefault(clause, ClauseResult(clause))
        reason = reason or (NOT_ASKED if verdicts[i].unasked else None)
        if reason:
            result.skipped += 1
            result.reasons[reason] = result.reasons.get(reason, 0) + 1
            continue
        verdict = verdicts[i]
        result.compared += verdict.compared
        result.calls += verdict.calls
        if not verdict.failures:
            result.passed += 1
        for failure in verdict.failures:
            _count(results, failure)
    unasked = [verdict.unasked for verdict in verdicts.values() if verdict.unasked]
    if unasked:
        message = f"{len(unasked)} checks were {NOT_ASKED}: {unasked[0]}"
        _count(results, Failure("conformance.protocol", message, check="every check is answered"))
    return results


def _count(results: dict[str, ClauseResult], failure: Failure) -> None:
    """Count a failure for its clause, and keep it if it is the first one, or the first one that lost its process."""
    clause = results.setdefault(failure.clause, ClauseResult(failure.clause))
    clause.failed += 1
    if not clause.failures or (failure.lost and not clause.failures[0].lost):
        clause.failures = [failure]
