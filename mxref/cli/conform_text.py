"""The output of `mxref conform`: one screen, or every clause and the failure of each that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxref.conformance.outcome import ClauseResult, Failure, Report, reasons_text
from mxref.terminal import BOX, HEAD, QUIET, console

_COUNTS = ("passed", "failed", "skipped")
SCREEN = 24
"""Most lines that a report takes on a terminal of 80 columns, unless the user asks for everything."""
_INTRODUCTION = 2
"""Lines of `SCREEN` for the name of the backend, which the command prints before the checks."""
_HEADER = 2
"""Lines of a table before its first row."""
_FEW_CLAUSES = 6
"""Clauses that failed, named in the last lines."""
_BRIEF, _COMMAND = 150, 450
"""Most characters of a line of a brief failure, and of its command: one for 32 numbers fits."""


def show(report: Report, verbose: bool) -> None:
    """Print a report on one screen; with `verbose`, a line per clause and the failure of each clause that failed."""
    out = console()
    if verbose:
        _table(out, report.clauses, "clause", True)
        _failures(out, list(map(str, report.failures)))
        _end(out, report)
    elif report.failures:
        _failing(out, report)
    else:
        _table(out, tuple(_chapters(report)), "chapter", False)
        _end(out, report)


def _failing(out: Console, report: Report) -> None:
    """Print the chapters that failed and the first failures, as far as a screen has room.

    The first failure is always shown. A single one is shown whole if it fits.
    """
    shown = [str(report.failures[0])]
    room = SCREEN - _INTRODUCTION - _height(out, _ends(report, len(report.failures)))
    if len(report.failures) > 1 or _height(out, shown) > room:
        shown = [_brief(report.failures[0])]
    room -= _height(out, shown)
    chapters = [c for c in _chapters(report) if c.failed][: max(0, room - _HEADER)]
    room -= len(chapters) + _HEADER
    for failure in report.failures[1:]:
        text = _brief(failure)
        if (needed := _height(out, [text])) > room:
            break
        shown.append(text)
        room -= needed
    if chapters:
        _table(out, tuple(chapters), "chapter", False)
    _failures(out, shown)
    _end(out, report, len(report.failures) - len(shown))


def _brief(failure: Failure) -> str:
    """Return a failure as few lines: clause and check, what differs, both answers, and the command or the request."""
    command = failure.command
    told = replace(failure, inputs={}, differing=(), request={} if command else failure.request, command=None)
    lines = [line if len(line) <= _BRIEF else f"{line[:_BRIEF]}..." for line in str(told).split("\n")]
    if command and len(command) <= _COMMAND:
        lines.append(f"  explain   {command}")
    elif command:
        lines.append(f"  explain   by a command of {len(command):,} characters, which --all prints")
    return "\n".join(lines)


def _failures(out: Console, texts: list[str]) -> None:
    for text in texts:
        head, _, body = text.partition("\n")
        out.print(Text(f"\n{head}", "bold red"), soft_wrap=True)
        out.print(Text(body), soft_wrap=True)


def _end(out: Console, report: Report, more: int = 0) -> None:
    out.print(Text())
    for line in _ends(report, more):
        out.print(line)


def _ends(report: Report, more: int) -> list[Text]:
    """Return the last lines: the verdict, the clauses that failed, and how to see the failures that are not shown."""
    lines = list(map(Text, report.last_lines(_FEW_CLAUSES)))
    lines[0].stylize("bold green" if report.ok else "bold red", 0, len(report.verdict))
    if more:
        failures = "failure" if more == 1 else "failures"
        lines.append(Text(f"and {more} more {failures}: --all prints them, --json FILE writes them"))
    return lines


def _height(out: Console, parts: list[Text] | list[str]) -> int:
    """Return the lines that failures take, each after an empty one, or last lines, which are wrapped at words."""
    lines = 0
    for part in parts:
        if isinstance(part, Text):
            lines += len(part.wrap(out, out.width))
        else:
            lines += 1 + sum(max(1, -(-cell_len(line) // out.width)) for line in part.split("\n"))
    return lines + any(isinstance(part, Text) for part in parts)


def _chapters(report: Report) -> Iterator[ClauseResult]:
    """Yield the results of each chapter of the specification, in the order of the chapters' first clauses."""
    chapters: dict[str, ClauseResult] = {}
    for c in report.clauses:
        name = c.clause.partition(".")[0]
        total = chapters.setdefault(name, ClauseResult(name))
        for count in _COUNTS:
            setattr(total, count, getattr(total, count) + getattr(c, count))
    yield from chapters.values()


def _table(out: Console, results: tuple[ClauseResult, ...], heading: str, reasons: bool) -> None:
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
