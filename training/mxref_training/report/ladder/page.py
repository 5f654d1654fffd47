"""The report of a ladder: a table for the terminal and a page. Nothing is measured or judged here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.tomlio import dumps
from mxref_training.report.ladder.plots import curves_svg, overheads_svg
from mxref_training.report.ladder.tables import (
    answers_table,
    exploratory_table,
    last_tables,
    recipes_table,
    results_table,
)
from mxref_training.report.ladder.words import (
    exploratory_line,
    headline,
    how_to_read,
    label_of,
    noise_line,
    provenance,
    reach_line,
    target_line,
)
from mxref_training.report.page import Page
from mxref_training.report.probe.tables import Section

if TYPE_CHECKING:
    from rich.table import Table as Screen

NAME = "report"
WIDE = 108
"""Columns of a terminal that the whole table takes."""

Results = dict[str, Any]


def screen(results: Results, width: int = WIDE) -> Screen:
    """Return the table for a terminal; below `WIDE` columns it leaves out tokens and the second gap."""
    table = results_table(results)
    table = table if width >= WIDE else table.without("tokens", "gap_high_precision")
    head = f"{results['title']}\n{noise_line(results)}"
    return table.screen(head, f"{target_line(results)}\n{reach_line(results)}\n{headline(results)}")


def ladder_page(results: Results, probe: Section | None = None) -> Page:
    """Return the page of a ladder: what decides, the table and the figures; then all that they stand on.

    Args:
        results: the content of `results.json`.
        probe: what was found at the reference's checkpoint without training.
    """
    reference = label_of(results, "reference")
    page = Page(results["title"])
    if probe:
        page.text(probe.headline, "headline")
    page.text(headline(results), "" if probe else "headline")
    page.text(noise_line(results), "strong")
    page.table(
        results_table(results),
        f"{target_line(results)} Δ: loss at equal tokens less that of the arm, in nats.",
    )
    page.heading(f"Overheads: tokens to target beyond those of {reference}")
    page.figure(
        overheads_svg(results),
        "Bars: this ladder. Thin lines: 95 % intervals, where they fit. Yellow: the paper's range. Hatched: diverged. "
        "A triangle: the target was not reached within the budget.",
    )
    page.heading("Curves")
    page.figure(
        curves_svg(results),
        "Left: validation loss; the first fall is cut off. Right, to the scale of the second half: the same less the "
        "reference's of the same seed at equal tokens; grey is the distance between runs of the reference with "
        "different seeds. Thin lines are further seeds.",
    )
    if asked := results.get("contrasts"):
        page.heading("Questions")
        page.items([f"{one['question']} {one['answer']}" for one in asked])
        page.table(answers_table(results))
    if again := exploratory_table(results):
        page.heading("Exploratory")
        page.text(f"{exploratory_line(results)} {results['rules']['exploratory']}".strip())
        page.table(again)
    if last := last_tables(results):
        page.heading("Last checkpoints, evaluated on more")
    for what, table in last:
        page.text(what)
        page.table(table)
    if probe:
        page.heading("One step without training noise")
        page.text(probe.lead)
        page.table(
            probe.table,
            "Medians over the layers; `probe.html` beside this page has every layer, the errors by cause, and how the "
            "numbers are defined.",
        )
    page.heading("How to read this")
    for text in (results["description"], reach_line(results), how_to_read(results)):
        page.text(text)
    page.items(list(results["rules"].values()))
    page.heading("Recipes")
    sources = dict.fromkeys(arm["paper"]["source"] for arm in results["arms"] if arm["paper"])
    claims = f"The paper's numbers: {'; '.join(sources)}. DNC: does not converge. " if sources else ""
    page.table(recipes_table(results), f"{claims}Every operand of every arm is in `results.json`.")
    page.heading("Provenance")
    page.terms(provenance(results))
    page.code("Training configuration", dumps(results["config"]))
    return page


def write_report(results: Results, folder: Path, probe: Section | None = None) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` into a folder, and return their paths; arguments as in `ladder_page`.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    way_out = f"the numbers are in results.json, and 'mxref report {folder}' makes the report again"
    return ladder_page(results, probe).write(folder, NAME, way_out)
