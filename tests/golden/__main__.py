"""Write the golden vectors into spec/vectors: `make vectors`."""

from __future__ import annotations

import click

from golden.make import write_vectors
from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS
from mxref.vectors import chapters_of
from places import ROOT


@click.command()
@click.option(
    "--format", "made", type=click.Choice(list(BLOCK_FORMATS)), help="Only the files of this block format."
)
def main(made: str | None) -> None:
    """Write the golden vectors into spec/vectors. The reference must agree with every result of the oracle."""
    try:
        for path, changed in write_vectors(ROOT / "spec" / "vectors", chapters_of(made)):
            click.echo(f"{path}  {'written' if changed else 'unchanged'}")
    except FileFormatError as err:
        raise click.ClickException(str(err)) from err


if __name__ == "__main__":
    main()
