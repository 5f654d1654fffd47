"""The output of `mxref conform`: a line per chapter and the first failure, or every clause and all failures."""

from __future__ import annotations

from collections.abc import Iterator

from mxref.conformance.model import ClauseResult, Report

_COUNTS = ("passed", "failed", "skipped")


def show(report: Report, verbose: bool) -> None:
    """Print a report; with `verbose`, a line per clause and the failure of each clause that failed."""
    from rich.text import Text

    from mxref.conformance.outcome import failure_text, totals, verdict
    from mxref.terminal import console

    out = console()
    results = report.clauses if verbose else tuple(_chapters(report))
    _table(results, "clause" if verbose else "chapter", verbose)
    for failure in report.failures if verbose else report.failures[:1]:
        head, _, body = failure_text(failure).partition("\n")
        out.print(Text(f"\n{head}", "bold red"))
        out.print(Text(body), soft_wrap=True)
    title = (f"{report.backend} {verdict(report)}", "bold green" if report.ok else "bold red")
    out.print(Text.assemble("\n", title, f" ({report.level.value}, seed {report.seed}): {totals(report)}"))
    if report.failing:
        out.print(Text(f"broken, likely causes first: {', '.join(report.failing)}"))
    if not verbose and len(report.failures) > 1:
        out.print(Text(f"-v prints the other {len(report.failures) - 1} failures; --json writes them"))


def _chapters(report: Report) -> Iterator[ClauseResult]:
    """Yield the results of each chapter of the specification, in the order of the chapters' first clauses."""
    chapters: dict[str, ClauseResult] = {}
    for c in report.clauses:
        name = c.clause.partition(".")[0]
        total = chapters.setdefault(name, ClauseResult(name))
        for count in _COUNTS:
            setattr(total, count, getattr(total, count) + getattr(c, count))
    yield from chapters.values()


def _table(results: tuple[ClauseResult, ...], heading: str, reasons: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from mxref.conformance.report import reasons_text
    from mxref.terminal import BOX, HEAD, QUIET, console

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
    console().print(table)
