"""Conformance: a backend held to the specification, clause by clause, in exactly what it declares.

Golden vectors, crafted blocks and draws go through the backend, and every answer is compared with the
reference to the bit (`bounded` GEMMs: with their tolerance). What fails is shrunk to the smallest block that
still fails. What a backend does not declare must be refused, and its checks are skipped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing

from mxref.backend import Backend
from mxref.conformance.model import (
    CLAUSES,
    Check,
    ClauseResult,
    Failure,
    Level,
    Op,
    Report,
    Subject,
    Verdict,
    by_rank,
)
from mxref.conformance.processes import Processes
from mxref.conformance.suite import Choice, checks_of, together, verdict_of
from mxref.discovery import get_backend
from mxref.errors import BackendError

__all__ = ["CLAUSES", "ClauseResult", "Failure", "Level", "Op", "Report", "check", "checks_of"]


def check(
    backend: Backend | str,
    *,
    ops: Iterable[str] | None = None,
    dialects: Iterable[str] | None = None,
    clauses: Collection[str] | None = None,
    seed: int = 0,
    level: str = Level.FULL,
    shrink: bool = True,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
) -> Report:
    """Return how a backend fares against the specification.

    Args:
        backend: the backend, or the name to load it by.
        ops: operations to check: `quantize`, `dequantize`, `hadamard`, `gemm`; default all.
        dialects: check quantization only as these dialects treat operands.
        clauses: check only these clauses.
        seed: of drawn values.
        level: `full`, or `quick` for a tenth of the time.
        shrink: whether the first failure of each clause is shrunk.
        progress: called after each check with the number done and the total.
        jobs: processes that share the checks; more than one load the backend by its name. Where one crashes,
            that is a failure of the check that it was at, and another goes on.

    Raises:
        RecipeError: as `checks_of`.
        BackendError: the name is of no backend; several processes without a name; or processes that cannot
            load the backend, or find other checks for it.
    """
    start = time.monotonic()
    loaded = get_backend(backend) if isinstance(backend, str) else backend
    choice = Choice(
        tuple(ops or (op.value for op in Op)), tuple(dialects or ()), tuple(clauses or ()), seed, level
    )
    checks = choice.checks(loaded.capabilities)
    reasons = [each.undeclared(loaded.capabilities) for each in checks]
    declared = [i for i, reason in enumerate(reasons) if reason is None]
    source: Processes | _Here
    if jobs == 1:
        source, groups = _Here(loaded, checks), [declared]
    elif isinstance(backend, str):
        source, groups = Processes(backend, choice, checks, jobs), together(checks, declared)
    else:
        raise BackendError(f"{jobs} processes load the backend by its name; give that, or jobs=1")
    verdicts: dict[int, Verdict] = {}
    with closing(source):
        for i, verdict in source.verdicts(groups):
            verdicts[i] = verdict
            if progress:
                progress(len(checks) - len(declared) + len(verdicts), len(checks))
        if shrink:  # the first failure of each clause, which is known only now
            again = dict(source.verdicts([[i] for i in _first_failures(verdicts)], shrink=True))
            verdicts |= {i: verdict for i, verdict in again.items() if verdict.failure}
    results = _results(checks, reasons, verdicts)
    return Report(
        loaded.name, Level(level), seed, choice.ops,
        tuple(results[clause] for clause in by_rank(results)), time.monotonic() - start,
    )  # fmt: skip


class _Here:
    """Answers checks in this process, as `Processes` does in others."""

    def __init__(self, backend: Backend, checks: list[Check]) -> None:
        self._subject, self._checks = Subject(backend), checks

    def verdicts(self, groups: Iterable[list[int]], shrink: bool = False) -> Iterator[tuple[int, Verdict]]:
        self._subject.shrink = shrink
        for i in (i for group in groups for i in group):
            yield i, verdict_of(self._checks[i], self._subject)

    def close(self) -> None:
        """Have nothing to end."""


def _first_failures(verdicts: dict[int, Verdict]) -> list[int]:
    """Return the number of the first check that failed each clause."""
    first: dict[str, int] = {}
    for i in sorted(verdicts):
        failure = verdicts[i].failure
        if failure:
            first.setdefault(failure.clause, i)
    return sorted(first.values())


def _results(
    checks: list[Check], reasons: list[str | None], verdicts: dict[int, Verdict]
) -> dict[str, ClauseResult]:
    """Return what came of each clause: a failure counts where the wrong bits are decided, the rest where asked."""
    results: dict[str, ClauseResult] = {}
    for i, (each, reason) in enumerate(zip(checks, reasons, strict=True)):
        result = results.setdefault(each.clause, ClauseResult(each.clause))
        if reason:
            result.skipped += 1
            result.reasons[reason] = result.reasons.get(reason, 0) + 1
            continue
        verdict = verdicts[i]
        result.compared += verdict.compared
        if verdict.failure is None:
            result.passed += 1
            continue
        failed = results.setdefault(verdict.failure.clause, ClauseResult(verdict.failure.clause))
        failed.failed += 1
        if not failed.failures:
            failed.failures.append(verdict.failure)
    return results
