"""`mxref conform`: check a backend against the specification, clause by clause."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from mxref.cli import known
from mxref.cli.conform_text import show
from mxref.cli.jobs import Positive, jobs_option
from mxref.conformance.checking import Op
from mxref.conformance.isolation import LEAST_TO_LOAD, TIME_LIMIT
from mxref.conformance.outcome import Level
from mxref.cores import cores
from mxref.discovery import choose
from mxref.formats import BLOCK_FORMATS
from mxref.terminal import echo


@click.command()
@click.option(
    "--backend",
    "name",
    metavar="NAME",
    shell_complete=known.backends,
    help="Default: see `mxref backends`. Also module:object or path/to/file.py:object.",
)
@click.option(
    "--op", "ops", multiple=True, type=click.Choice([op.value for op in Op]), help="Only this operation."
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
    help="Print every clause, and the failure of each that failed; otherwise the first failure.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write the result as JUnit XML.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the operations that a training run recorded, in this process, instead of the checks.",
)
def conform(
    name: str | None,
    ops: tuple[str, ...],
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
    replay: Path | None,
) -> None:
    """Check a backend against the specification, clause by clause.

    Everything that the backend declares is compared with the reference bit for bit. Undeclared requests must be
    refused. The exit code is 0 if everything passed, 1 if something failed, 2 on bad usage. Options --op, --format and
    --clause may be repeated. The backend runs in a separate process: if it ends this process or takes too long, the
    check fails, and the other checks continue.

    \b
    Examples:
      mxref conform --backend path/to/mine.py:backend --quick
      mxref conform --backend numba --op gemm --junit conformance.xml
      mxref conform --backend numba --format mxfp8_e4m3
      mxref conform --backend triton --jobs 16      compile kernels in parallel
      mxref conform --backend numba --replay runs/demo/shadow.npz
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from mxref.conformance import check
    from mxref.conformance.outcome import check_writable, to_json, to_junit, write

    if replay is not None:
        _replay(replay, name)
    for path in (junit, json_file):
        if path is not None:
            check_writable(path)
    if in_process and jobs != 1:
        raise click.UsageError("--in-process and --jobs exclude each other")
    chosen, why = choose(name)
    echo(f"backend {chosen}, {why}")
    columns, err = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()), Console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("checks", total=None)
        report = check(
            chosen, ops=ops or None, clauses=clauses or None, formats=formats or None, seed=seed,
            level=Level.QUICK if quick else Level.FULL, jobs=jobs or cores(), time_limit=time_limit,
            in_process=in_process, progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
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
