"""`mxref vectors`: list the golden vectors, verify them with the reference, and write them for C."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from mxref.formats import BLOCK_FORMATS

EXIT_MISMATCH = 1
_SHOWN = 10

_DIRECTORY = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files; default spec/vectors of the checkout, else the installed copy.",
)


_FORMAT = click.option(
    "--format", "made", type=click.Choice(list(BLOCK_FORMATS)), help="Only the files of this block format."
)


@click.group()
def vectors() -> None:
    """List or verify the golden vectors, or write them for C.

    \b
    Examples:
      mxref vectors list
      mxref vectors verify
      mxref vectors c here
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow


@vectors.command("list")
@_DIRECTORY
@_FORMAT
def list_(directory: Path | None, made: str | None) -> None:
    """Show the content of each file and the sources of its results.

    \b
    Examples:
      mxref vectors list
      mxref vectors list --format mxfp8_e4m3
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from rich.table import Table
    from rich.text import Text

    from mxref.terminal import BOX, HEAD, QUIET, console
    from mxref.vectors import Source, chapters_of, load_vectors, vectors_directory

    folder = directory or vectors_directory()
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False)
    table.add_column("chapter")
    for heading in ("records", *(source.value for source in Source), "clauses", "kB"):
        table.add_column(heading, justify="right")
    for chapter in chapters_of(made):
        records = load_vectors(chapter, folder)
        sources = Counter(record.source for record in records)
        clauses = {clause for record in records for clause in record.clauses}
        size = (folder / f"{chapter}.json").stat().st_size / 1000
        counts = [str(sources[source] or "") for source in Source]
        table.add_row(chapter, str(len(records)), *counts, str(len(clauses)), f"{size:.0f}")
    out = console()
    out.print(table)
    out.print(Text(f"\nin {folder}", QUIET))


@vectors.command()
@_DIRECTORY
@_FORMAT
def verify(directory: Path | None, made: str | None) -> None:
    """Recompute every vector with the reference and compare.

    The exit code is 1 if a result differs, 2 if a file is missing or damaged.

    \b
    Examples:
      mxref vectors verify
      mxref vectors verify --format mxfp4
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.terminal import echo
    from mxref.vectors import chapters_of, vectors_directory
    from mxref.vectors.run import verify_vectors

    folder = directory or vectors_directory()
    wrong = 0
    for chapter in chapters_of(made):
        count, mismatches = verify_vectors(chapter, folder)
        wrong += len(mismatches)
        state = f"{len(mismatches)} of {count} differ" if mismatches else f"{count} agree"
        click.echo(f"{chapter:<12}{state}")
        for mismatch in mismatches[:_SHOWN]:
            echo(f"  {mismatch}")
        if len(mismatches) > _SHOWN:
            click.echo(f"  and {len(mismatches) - _SHOWN} more")
    if wrong:
        click.get_current_context().exit(EXIT_MISMATCH)


@vectors.command("c")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_DIRECTORY
def c_table(folder: Path, directory: Path | None) -> None:
    """Write mxref.h into FOLDER, with the vectors as a table in C and a program that checks.

    mxref.h has scales, elements, packing, random bits, transforms and dot products of every format, in
    integers of C99. The program, check_vectors.c, holds it to the vectors, or your own functions in its
    place; compile it in FOLDER.

    \b
    Examples:
      mxref vectors c here
      mxref vectors c here --dir spec/vectors
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.terminal import echo
    from mxref.vectors.c_table import write_c

    written, left_out = write_c(folder, directory)
    echo(
        f"{written:,} vectors, mxref.h and check_vectors.c in {folder}; {left_out:,} are left out: digests of large "
        "results, the GEMM profiles exact and bounded, orders of float32 operations, and four over six"
    )
