"""`PYTHONPATH=tests python -m projection`: project MXFP4 training on an MI355X from compiled counts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from mxref.errors import MxrefError
from mxref_training.config_files import load_config
from projection import counted
from projection.assumptions import Assumptions, Machine
from projection.compare import Projection, bounds, compare
from projection.published import CARDS
from projection.step import ARMS, Workload
from projection.tables import Table, of_a_card, tables, totals

PRESET, LARGER = "llama31_8b", ("llama31_70b", 64)
_DIGITS = 6
"""Significant digits of a result in JSON: its last bits depend on the machine."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--counts", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="JSON of `python -m aot --json` or of this command; without it, training's kernels are compiled.",
)  # fmt: skip
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write counts and results there.",
)
@click.option("--cards", type=click.IntRange(1), default=CARDS, show_default=True, help="Cards of the node.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Compilers at a time.")
def main(counts: Path | None, json_path: Path | None, cards: int, jobs: int) -> None:
    """Compute what MXFP4 training would take on an MI355X.

    Nothing is measured: every time is computed, from counted instructions, peaks and assumptions.
    """
    try:
        document = counted.document(counts, jobs)
        projection = projection_of(document, cards)
        shown = [*tables(projection), of_a_card({"8B": projection, "70B": larger_projection(document)})]
        written = results(projection)
    except MxrefError as err:
        raise click.ClickException(str(err)) from None
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    console.print(
        f"Computed, not measured. Counts of {document['date']}, Triton {document['triton']}, gfx950.\n"
    )
    for table in shown:
        if table.rows:
            console.print(_rich(table))
    if json_path:
        json_path.write_text(json.dumps(document | {"results": written}, indent=1) + "\n", encoding="utf-8")


def projection_of(document: Mapping[str, Any], cards: int = CARDS) -> Projection:
    """Return the projection of Llama 3.1 8B from a document of counts."""
    work = Workload.of(load_config(PRESET), cards)
    return Projection(work, document["records"], Machine(), Assumptions())


def larger_projection(document: Mapping[str, Any]) -> Projection:
    """Return the projection of Llama 3.1 70B on eight nodes."""
    preset, cards = LARGER
    work = replace(Workload.of(load_config(preset), 1), cards=cards, micro_batch=2)
    return Projection(work, document["records"], Machine(), Assumptions())


def results(projection: Projection) -> dict[str, Any]:
    """Return what comes out, as JSON holds it: seconds per part and arm, and the comparisons."""
    return {
        "seconds": {
            arm.key: {k: _rounded(v) for k, v in totals(projection.times(arm)).items()} for arm in ARMS
        },
        "quantities": {k: _rounded(v) for k, v in projection.quantities().items()},
        "over_fp8": {
            arm: [_rounded(v) for v in bounds(projection, f"{arm} over fp8")] for arm in ("h16", "mx64")
        },
        "published": [
            asdict(c.published)
            | {"low": _rounded(c.low), "computed": _rounded(c.nominal), "high": _rounded(c.high)}
            for c in compare(projection)
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rich(table: Table) -> RichTable:
    out = RichTable(
        title=table.title,
        caption=_plain(table.note),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for i, heading in enumerate(table.headings):
        is_text = i < table.text_columns or heading in ("source", "verdict", "binds")
        out.add_column(heading, justify="left" if is_text else "right")
    for row in table.rows:
        out.add_row(*map(_plain, row))
    return out


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")


if __name__ == "__main__":
    main()
