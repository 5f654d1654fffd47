"""`mxref conform`: check a backend against the specification, clause by clause."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from mxref.cli import known
from mxref.cli.conform_text import show
from mxref.cli.jobs import Positive, jobs_option
from mxref.conformance.checking import Op
from mxref.conformance.isolation import LEAST_TO_LOAD, TIME_LIMIT
from mxref.conformance.outcome import Failure, Level, Report
from mxref.cores import cores
from mxref.dialects import DIALECTS
from mxref.discovery import choose
from mxref.formats import BLOCK_FORMATS
from mxref.terminal import echo

_INTERVAL = 30.0
"""Seconds between two lines of progress in a log."""


@click.command()
@click.option(
    "--backend",
    "name",
    metavar="NAME",
    shell_complete=known.backends,
    help="A name, module:object or path/to/file.py:object; default as elsewhere.",
)
@click.option(
    "--op", "ops", multiple=True, type=click.Choice([op.value for op in Op]), help="Only this operation."
)
@click.option(
    "--dialect",
    "dialects",
    multiple=True,
    metavar="NAME",
    shell_complete=known.dialects,
    help=f"Only the treatment of this dialect: {', '.join(DIALECTS)}.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(list(BLOCK_FORMATS)),
    help="Only this block format, and what is the same for every format.",
)
@click.option(
    "--clause",
    "clauses",
    multiple=True,
    metavar="ID",
    shell_complete=known.clauses,
    help="Only this clause.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random values."
)
@click.option(
    "--quick/--full",
    default=False,
    help="Every clause once, or all its combinations (default).",
)
@jobs_option("Processes that share the checks; auto: one per core.")
@click.option(
    "--time-limit",
    type=Positive(),
    default=TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of a check; a check that takes longer fails. Shrinking a failure has the same limit. "
    f"Loading the backend has it too, but at least {LEAST_TO_LOAD:g} seconds.",
)
@click.option(
    "--in-process",
    is_flag=True,
    help="Run the checks in this process, for a debugger. There is no time limit, and a crash ends the command.",
)
@click.option(
    "-v",
    "--verbose",
    "--all",
    "verbose",
    is_flag=True,
    help="Print every clause, and the failure of each that failed; otherwise one screen is printed.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write the result as JUnit XML.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the failing blocks into this folder.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the operations that a training run recorded, in this process, instead of the checks.",
)
def conform(
    name: str | None,
    ops: tuple[str, ...],
    dialects: tuple[str, ...],
    formats: tuple[str, ...],
    clauses: tuple[str, ...],
    seed: int,
    quick: bool,
    jobs: int | None,
    time_limit: float,
    in_process: bool,
    verbose: bool,
    junit: Path | None,
    json_file: Path | None,
    save: Path | None,
    replay: Path | None,
) -> None:
    """Check a backend against the specification, clause by clause.

    Everything that the backend declares is compared with the reference bit for bit. Undeclared requests must be
    refused. The exit code is 0 if everything passed, 1 if something failed, 2 on bad usage. Options --op, --dialect,
    --format and --clause may be repeated. The backend runs in a separate process: if it ends this process or
    takes too long, the check fails, and the other checks continue.

    \b
    Examples:
      mxref conform --backend path/to/mine.py:backend --quick
      mxref conform --backend numba --op gemm --junit conformance.xml
      mxref conform --backend numba --format mxfp8_e4m3
      mxref conform --backend triton --jobs 16      compile kernels in parallel
      mxref conform --backend numba --replay runs/demo/shadow.npz
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.conformance import check
    from mxref.conformance.outcome import check_writable, to_json, to_junit, write

    if replay is not None:
        _replay(replay, name)
    for path in (junit, json_file, save / "x" if save and save.is_dir() else save):
        if path is not None:
            check_writable(path)
    if in_process and jobs != 1:
        raise click.UsageError("--in-process and --jobs exclude each other")
    chosen, why = choose(name)
    echo(f"backend {chosen}, {why}")
    with _progress() as progress:
        report = check(
            chosen, ops=ops or None, dialects=dialects or None, clauses=clauses or None,
            formats=formats or None, seed=seed,
            level=Level.QUICK if quick else Level.FULL, progress=progress, jobs=jobs or cores(),
            time_limit=time_limit, in_process=in_process,
        )  # fmt: skip
    if save is not None:
        report = _saved(report, save)
    if json_file is not None:
        write(json_file, to_json(report))
    if junit is not None:
        write(junit, to_junit(report))
    show(report, verbose)
    click.get_current_context().exit(0 if report.ok else 1)


def _replay(file: Path, name: str | None) -> None:
    """Repeat a recording, print what came of it, and exit: with 0 if every answer, recorded or new, is right."""
    from mxref.conformance.replay import replay

    ctx = click.get_current_context()
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name not in ("replay", "name"):
            raise click.UsageError(f"--replay and {option.opts[0]} exclude each other")
    chosen, why = choose(name)
    echo(f"backend {chosen}, {why}")
    report = replay(file, chosen)
    for line in str(report).splitlines():
        echo(line)
    ctx.exit(0 if report.ok else 1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("checks", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines() -> Callable[[int, int], None]:
    """Return a function that prints the progress at intervals, for logs: compiling backends take long."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _INTERVAL:
            last = time.monotonic()
            click.echo(f"{done:,} of {total:,} checks", err=True)

    return told


def _saved(report: Report, folder: Path) -> Report:
    """Write the failing blocks to files; return the report with commands that read tiles from these files."""
    import numpy as np

    folder.mkdir(exist_ok=True)
    clauses = []
    for c in report.clauses:
        failures: list[Failure] = []
        for f in c.failures:
            if f.array is not None:
                file = folder / f"{f.clause}.npy"
                np.save(file, f.array.astype(np.float32))
                saved = f.file_command and f.file_command.replace("FILE", shlex.quote(str(file)))
                f = replace(f, command=f.command or saved)
            failures.append(f)
        clauses.append(replace(c, failures=failures))
    return replace(report, clauses=tuple(clauses))
