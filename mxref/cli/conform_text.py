"""The output of `mxref conform`: the first failure, or every clause and the failure of each that failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxref.conformance.outcome import ClauseResult, Failure, Report, reasons_text
from mxref.terminal import BOX, HEAD, QUIET, console

_COUNTS = ("passed", "failed", "skipped")
_FEW_CLAUSES = 6
"""Clauses that failed, named in the last lines."""
_MOST_LINES, _MOST_CHARACTERS = 12, 450
"""The longest failure that is shown whole, and the longest line of another: a command for 32 numbers fits."""


def show(report: Report, verbose: bool) -> None:
    """Print the first failure and the verdict; with `verbose`, a line per clause and the failure of each."""
    out, failures = console(), report.failures
    if verbose:
        _table(out, report.clauses, "clause", True)
    elif not failures:
        _table(out, _chapters(report), "chapter", False)
    for text in map(str, failures) if verbose else map(_brief, failures[:1]):
        head, _, body = text.partition("\n")
        out.print(Text(f"\n{head}", "bold red"), soft_wrap=True)
        out.print(Text(body), soft_wrap=True)
    lines = list(map(Text, report.last_lines(None if verbose else _FEW_CLAUSES)))
    lines[0].stylize("bold green" if report.ok else "bold red", 0, len(report.verdict))
    if not verbose and (more := len(failures) - 1) > 0:
        lines.append(Text(f"and {more} more failures: --all prints them, --json FILE writes them"))
    out.print()
    for line in lines:
        out.print(line)


def _brief(failure: Failure) -> str:
    """Return a failure, without its inputs if they are many; long lines are cut."""
    if str(failure).count("\n") >= _MOST_LINES:
        failure = replace(failure, inputs={}, differing=())
    cut = "... (--all prints the rest)"
    return "\n".join(
        line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - len(cut)] + cut
        for line in str(failure).split("\n")
    )


def _chapters(report: Report) -> Iterable[ClauseResult]:
    """Return the results of each chapter of the specification, in the order of the chapters' first clauses."""
    chapters: dict[str, ClauseResult] = {}
    for c in report.clauses:
        name = c.clause.partition(".")[0]
        total = chapters.setdefault(name, ClauseResult(name))
        for count in _COUNTS:
            setattr(total, count, getattr(total, count) + getattr(c, count))
    return chapters.values()


def _table(out: Console, results: Iterable[ClauseResult], heading: str, reasons: bool) -> None:
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True)
    for count in _COUNTS:
        table.add_column(count, justify="right", no_wrap=True)
    if reasons:
        table.add_column("not declared, or not asked", overflow="fold", style=QUIET)
    styles = {"passed": "green", "failed": "bold red", "skipped": QUIET}
    for c in results:
        outcome = Text("FAILED" if c.failed else c.outcome, styles[c.outcome])
        counts = (str(n) if n else "" for n in (c.passed, c.failed, c.skipped))
        last = [Text(reasons_text(c))] if reasons else []
        table.add_row(Text(c.clause, "bold red" if c.failed else ""), outcome, *counts, *last)
    out.print(table)
