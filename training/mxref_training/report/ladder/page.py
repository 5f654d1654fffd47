"""The report of a ladder: a table for the terminal, a page and its sentences. Nothing is measured or judged here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mxref.tomlio import dumps
from mxref_training.report.ladder.plots import curves_svg, overheads_svg
from mxref_training.report.ladder.tables import (
    Results,
    answers_table,
    exploratory_table,
    label_of,
    last_table,
    provenance,
    recipes_table,
    results_table,
    runs_behind_claims,
    short_names,
)
from mxref_training.report.page import Page
from mxref_training.report.probe.tables import headline as probe_headline
from mxref_training.report.probe.tables import summary
from mxref_training.wording import counted

if TYPE_CHECKING:
    from rich.table import Table as Screen

NAME = "report"
WIDE = 108
"""Columns of a terminal that the whole table takes."""


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
    """Write `report.html` and `report.md` into a folder, as `Page.write` does; arguments as in `ladder_page`."""
    way_out = f"the numbers are in results.json, and 'mxref report {folder}' makes the report again"
    return ladder_page(results, probe).write(folder, NAME, way_out)


# ---- the sentences: what it found, how large the noise is, and what such a ladder can show ----


def noise(results: Results) -> float | None:
    """Return the 95 % half-width of an overhead in percent; None if it is unknown.

    It comes from the spread that is pooled over the arms with two or more seeds, else from the reference's repetitions
    with other seeds. An arm that left the pool has an interval of its own.
    """
    outside = results["spread"]["tokens"]["outside"]
    widths = [
        arm["overhead"]["half_width"]
        for arm in results["arms"]
        if arm["overhead"] and arm["overhead"]["reach"] == "crossed" and arm["name"] not in outside
    ]
    alone: float | None = results["noise"]["half_width"]
    return max((width for width in widths if width is not None), default=alone)


def noise_line(results: Results) -> str:
    """Return how large the noise is, and what a ladder of this length and these seeds cannot show."""
    width = noise(results)
    if width is None:
        return (
            "Noise unknown: one seed can show that every recipe trains, and not which is better, because nobody knows "
            "what another seed alone does."
        )
    claims = [arm["paper"]["range"] for arm in results["arms"] if arm["paper"] and arm["paper"]["range"]]
    least = min((low for low, _ in claims), default=width)
    return (
        f"Noise ± {width:.1f} % in tokens to the target: this ladder shows no smaller difference"
        + (f", such as the least that is claimed, {least:g} %" if least < width else "")
        + ". Arms whose intervals overlap are not ranked."
    )


def headline(results: Results) -> str:
    """Return the outcome in a few sentences."""
    counts = results["verdicts"]
    total, runs, least = sum(counts.values()), runs_behind_claims(results), results["min_runs"]
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    parts = [f"Of {counted(total, 'claim')}: {said}." if total else "No arm carries a claim."]
    if total and runs < least:
        parts = [
            f"No claim is judged: a verdict needs {least} runs of an arm (--seeds {least}), and there "
            f"{'is' if runs == 1 else 'are'} at most {runs}."
        ]
    parts.append(counts_line(results))
    of = results["runs"]
    if of["finished"] < of["planned"]:
        parts.append(f"Not final: {of['finished']} of {of['planned']} planned runs have ended.")
    if results["unfinished"]:
        parts.append(f"Not run yet: {', '.join(results['unfinished'])}.")
    parts.append(flag_line(results))
    return " ".join(part for part in parts if part)


def counts_line(results: Results) -> str:
    """Return how many contrasts have which outcome, and what their seeds can find; empty without contrasts."""
    rows = results["contrasts"]
    if not rows:
        return ""
    outcomes = [row["outcome"] for row in rows]
    said = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    text = f"Of {counted(len(rows), 'contrast')}: {said}."
    power = results["power"]
    smallest = [value for value in power["smallest_nats"].values() if value is not None]
    if smallest and power["spread"] is not None:
        low, high = min(smallest), max(smallest)
        span = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
        source = f", from a pilot of {power['runs']} runs" if power["source"] == "pilot" else ""
        text += (
            f" The planned seeds find a difference of {span} nats in 80 % of cases (spread of a pair "
            f"{power['spread']:.4f} nats{source})."
        )
    return text


def target_line(results: Results) -> str:
    """Return the target in one sentence."""
    target = results["target"]
    losses = [loss for loss in target["losses"].values() if loss is not None]
    if not losses:
        return "There is no target: the reference diverged, or was not evaluated around it."
    said = " / ".join(f"{loss:.4f}" for loss in losses)
    if "loss" in target:
        return f"Target: validation loss {said}."
    fraction = f"{100 * target['fraction']:.0f} %"
    return f"Target: validation loss {said}, that of {label_of(results, 'reference')} at {fraction} of its tokens."


def exploratory_line(results: Results) -> str:
    """Return on which spread the second analysis stands; empty if it stands on none."""
    found = results["exploratory"]
    if found["pools"][0]["nats"] is None:
        return ""
    pools = found["pools"]
    spreads = [f"{pool['nats']:.4f} nats ({pool['freedom']:g} degrees of freedom)" for pool in pools]
    p = "" if found["noisy_p"] is None else f" (F test, p = {found['noisy_p']:.2g})"
    if len(pools) == 1:
        return f"Spread of a paired difference: {spreads[0]}, of all arms{p and f', one pool{p}'}."
    arms = ", ".join(short_names(results["arms"])[name] for name in found["noisy"])
    own = f"{spreads[1]} for {arms}, which have a pool of their own{p}"
    return f"Spread of a paired difference: {spreads[0]}, and {own}."


def flag_line(results: Results) -> str:
    """Return the runs that are flagged, the reference's first; empty if none is."""
    found = results["flagged"]
    if not found:
        return ""
    names = short_names(results["arms"])
    text = "; ".join(f"{names[one['arm']]}, pair {one['pair']}: {one['reason']}" for one in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    reference = "The reference itself is flagged, so nothing is compared with a run that learned. "
    return f"{reference if found[0]['reference'] else ''}Flagged: {text}{more}."


def how_to_read(results: Results) -> str:
    """Return the paragraph about what such a comparison can and cannot show."""
    return (
        f"Every arm starts from the same weights as {label_of(results, 'reference')} and sees the same data in the "
        "same order, so what differs is the arithmetic. Another seed alone moves the tokens to target by several per "
        "cent in published runs of the full size. A difference within that noise is no finding, in either direction. "
        "An underpowered arm has neither failed nor succeeded: it takes more seeds, more evaluations or more tokens to "
        "tell. A verdict is about this model, these data and this budget, not about the paper's own runs."
    )
