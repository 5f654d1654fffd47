"""The report of a probe."""

from __future__ import annotations

from pathlib import Path

from mxref_training.probe.results import Results
from mxref_training.report.page import Page
from mxref_training.report.probe.plots import figures
from mxref_training.report.probe.tables import ROLES, headline, summary
from mxref_training.report.table import Column, Table, facts_of

NAME = "probe"


def write_page(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write `probe.html` and `probe.md` into a folder, and return their paths.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    return probe_page(results).write(folder, NAME, "free some space, or choose another --out")


def probe_page(results: Results) -> Page:
    """Return the page: what decides, the medians, the figures, and what the numbers stand on."""
    page = Page(f"Probe of {', '.join(moment['name'] for moment in results['moments'])}")
    page.add("text", headline(results), "headline")
    page.add(
        "text",
        f"{len(results['recipes'])} recipes on {results['batch']['name']}. One forward and backward pass in BF16 gives "
        "X, W and dY of every linear layer. Each recipe's operands and GEMMs are compared with exact products on them. "
        "A recipe with phases is shown as it is at the step of the checkpoint. No weight is updated.",
        "lead",
    )
    page.add(
        "table",
        summary(results),
        "Medians over the layers, also over those that a recipe leaves in BF16. SNR: energy of the exact product over "
        "that of the error. Bias: the error's projection on the exact product, over that product's own; negative means "
        "that the result shrinks.",
    )
    for name, svg in figures(results).items():
        title, caption = _FIGURES[name]
        page.add("h2", title)
        page.add("figure", svg, caption)
    page.add("h2", "Recipes")
    columns = [Column("recipe", "Recipe", of="label", left=True), Column("digest", "Digest", left=True)]
    columns += [Column(role.capitalize(), left=True) for role in ROLES]
    page.add(
        "table", Table.of("recipes", columns, [one | dict(one["treatment"]) for one in results["recipes"]])
    )
    page.add("h2", "Provenance")
    page.add("terms", _provenance(results))
    return page


_FIGURES = {
    "snr": (
        "SNR of the products",
        "A dot is a layer, the bar their median, which the number gives. More is better.",
    ),
    "bias": (
        "Bias of the gradients of the weights",
        "A dot is a layer. A bias adds up over the steps, noise averages out.",
    ),
    "split": (
        "Error of the operands by cause",
        "Means over the layers; the four parts add up to the whole error. Scale bias: what one better factor for each "
        "block would take away. Dead zone: elements that became zero. Clipping: elements above the largest magnitude. "
        "Grid noise: the rest.",
    ),
    "variance": (
        "Variance over draws of the random bits",
        "A dot is a layer: the variance of an element of the product, averaged over a corner of it. Recipes without "
        "random bits have none.",
    ),
}
"""Heading and caption of each figure."""


def _provenance(results: Results) -> list[tuple[str, str]]:
    batch, backend = results["batch"], results["backend"]
    moments = [
        (
            moment["name"],
            f"{moment['checkpoint']}, after {moment['tokens']:,} tokens, trained by recipe "
            f"{moment['trained_by'] or 'without a name'}, loss of the batch {moment['loss']:.4f}; SHA-256 of the "
            f"weights {moment['model_sha256']}",
        )
        for moment in results["moments"]
    ]
    return [
        ("mxref", f"{results['mxref']}, backend {backend['name']} {backend['details']}".strip()),
        (
            "Batch",
            f"{batch['sequences']} × {batch['length']} tokens, {batch['name']}; SHA-256 {batch['sha256']}",
        ),
        *moments,
        *((part.capitalize(), facts_of(results[part])) for part in ("versions", "hardware")),
    ]
