"""The report of a ladder: a table for the terminal and a page. Nothing is measured or judged here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.tomlio import dumps
from mxref_training.report.ladder.plots import curves_svg, overheads_svg
from mxref_training.report.ladder.tables import (
    answers_table,
    exploratory_table,
    last_table,
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
    target_line,
)
from mxref_training.report.page import Page
from mxref_training.report.probe.tables import headline as probe_headline
from mxref_training.report.probe.tables import summary

if TYPE_CHECKING:
    from rich.table import Table as Screen

NAME = "report"
WIDE = 108
"""Columns of a terminal that the whole table takes."""

Results = dict[str, Any]


def screen(results: Results, width: int = WIDE) -> Screen:
    """Return the table for a terminal; below `WIDE` columns it leaves out tokens and the second gap."""
    table = results_table(results).without(
        "reason", *([] if width >= WIDE else ["tokens", "gap_high_precision"])
    )
    head = f"{results['title']}\n{noise_line(results)}"
    return table.screen(head, f"{target_line(results)}\n{headline(results)}")


def ladder_page(results: Results, probe: Results | None = None) -> Page:
    """Return the page of a ladder: what decides, the table and the figures; then all that they stand on.

    Args:
        results: the content of `results.json`.
        probe: the content of `probe.json`, where the reference's checkpoint was probed.
    """
    page = Page(results["title"])
    if probe:
        page.add("text", probe_headline(probe), "headline")
    page.add("text", headline(results), "" if probe else "headline")
    page.add("text", noise_line(results), "strong")
    page.add(
        "table",
        results_table(results),
        f"{target_line(results)} Δ: loss at equal tokens less that of the arm, in nats.",
    )
    page.add("h2", f"Overheads: tokens to target beyond those of {label_of(results, 'reference')}")
    page.add(
        "figure",
        overheads_svg(results),
        "Bars: this ladder. Thin lines: 95 % intervals. Yellow: the paper's range. Hatched: diverged. "
        "A triangle: the target was not reached within the budget.",
    )
    page.add("h2", "Curves")
    page.add(
        "figure",
        curves_svg(results),
        "Left: validation loss; the first fall is cut off. Right, to the scale of the second half: the same less the "
        "reference's of the same seed at equal tokens; grey is the distance between runs of the reference with "
        "different seeds. Thin lines are further seeds. The names are in the order of the ends.",
    )
    if results["contrasts"]:
        page.add("h2", "Questions")
        page.add("items", [f"{one['question']} {one['answer']}" for one in results["contrasts"]])
        page.add("table", answers_table(results))
    again = exploratory_table(results)
    if again.rows:
        page.add("h2", "Exploratory")
        page.add("text", f"{exploratory_line(results)} {results['rules']['exploratory']}".strip())
        page.add("table", again)
    if last := last_table(results):
        page.add("h2", "Last checkpoints, evaluated on more")
        page.add(
            "table",
            last,
            f"Loss less that of {label_of(results, 'reference')} at equal seeds, in nats: mean (lowest to highest). "
            "First each text with the arm's own recipe, then the validation text in one recipe for all arms.",
        )
    if probe:
        page.add("h2", "One step without training noise")
        page.add(
            "text",
            f"At {probe['moments'][-1]['name']} of the reference, {probe['batch']['name']} gave X, W and dY of every "
            "layer, and each recipe's GEMMs ran on them. Short runs cannot tell the recipes apart; this step can.",
        )
        page.add(
            "table",
            summary(probe),
            "Medians over the layers; `probe.html` beside this page has every layer, the errors by cause, and how the "
            "numbers are defined.",
        )
    page.add("h2", "How to read this")
    page.add("text", results["description"])
    page.add("text", how_to_read(results))
    page.add("items", list(results["rules"].values()))
    page.add("h2", "Recipes")
    sources = dict.fromkeys(arm["paper"]["source"] for arm in results["arms"] if arm["paper"])
    claims = f"The paper's numbers: {'; '.join(sources)}. DNC: does not converge. " if sources else ""
    page.add("table", recipes_table(results), f"{claims}Every operand of every arm is in `results.json`.")
    page.add("h2", "Provenance")
    page.add("terms", provenance(results))
    page.add("code", dumps(results["config"]), "Training configuration")
    return page


def write_report(results: Results, folder: Path, probe: Results | None = None) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` into a folder, and return their paths; arguments as in `ladder_page`.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    way_out = f"the numbers are in results.json, and 'mxref report {folder}' makes the report again"
    return ladder_page(results, probe).write(folder, NAME, way_out)
