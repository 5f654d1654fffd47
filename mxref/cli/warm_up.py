"""`mxref warm-up`: compile every kernel of a backend, so that no later run waits for the compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from mxref.cli import known
from mxref.discovery import choose, get_backend


@click.command("warm-up")
@click.option(
    "--backend",
    "name",
    metavar="NAME",
    shell_complete=known.backends,
    help="Default: see `mxref backends`. Also module:object or path/to/file.py:object.",
)
def warm_up(name: str | None) -> None:
    """Compile every kernel of a backend ahead of its first use.

    Compiled kernels are stored on disk. Later processes reuse them until the sources, the compiler or the CPU
    change; `mxref backends` prints the folder.

    \b
    Examples:
      mxref warm-up
      mxref warm-up --backend numba
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from rich.table import Table
    from rich.text import Text

    from mxref.terminal import BOX, HEAD, console, echo

    chosen, why = choose(name)
    backend = get_backend(chosen)
    echo(f"backend {backend.name}, {why}")
    seconds = dict(_watched(backend.warm_up()))
    if not seconds:
        click.echo("it compiles nothing, so there is nothing to warm up")
        return
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False)
    table.add_column("operation")
    table.add_column("seconds", justify="right")
    for operation, taken in seconds.items():
        table.add_row(Text(operation, style="bold"), f"{taken:.2f}")
    out = console()
    out.print(table)
    out.print(f"\nready after {sum(seconds.values()):.1f} s: {backend.details()}", soft_wrap=True)


def _watched(ready: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield each finished operation; on a terminal, show the elapsed time and the last operation."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from mxref.terminal import console

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    err = console(stderr=True)
    quiet = not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=quiet) as progress:
        task = progress.add_task("compiling")
        for operation, seconds in ready:
            progress.update(task, description=f"compiling; {operation} is ready")
            yield operation, seconds
