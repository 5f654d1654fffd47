"""The report of a probe."""

from __future__ import annotations

from pathlib import Path

from mxref_training.probe.results import Results
from mxref_training.report.page import Page
from mxref_training.report.probe.plots import figures
from mxref_training.report.probe.tables import ROLES, headline, summary
from mxref_training.report.table import Column, Table

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
    page.text(headline(results), "headline")
    page.text(
        f"{len(results['recipes'])} recipes on {results['batch']['name']}. One forward and backward pass in BF16 gives "
        "X, W and dY of every linear layer. Each recipe's operands and GEMMs are compared with exact products on them. "
        "A recipe with phases is shown as it is at the step of the checkpoint. No weight is updated.",
        "lead",
    )
    page.table(
        summary(results),
        "Medians over the layers, also over those that a recipe leaves in BF16. SNR: energy of the exact product over "
        "that of the error. Bias: the error's projection on the exact product, over that product's own; negative means "
        "that the result shrinks. The last column: how much of the error of Wgrad's X is the same for all elements of "
        "a Hadamard group.",
    )
    last = results["moments"][-1]["name"]
    for name, svg in figures(results).items():
        title, caption = _FIGURES[name]
        page.heading(title.format(draws=results["draws"], last=last))
        page.figure(svg, caption)
    page.heading("Recipes")
    columns = [Column("recipe", "Recipe", of="label", left=True), Column("digest", "Digest", left=True)]
    columns += [Column(role.capitalize(), left=True) for role in ROLES]
    page.table(Table.of("recipes", columns, [one | dict(one["treatment"]) for one in results["recipes"]]))
    page.heading("Provenance")
    page.terms(_provenance(results))
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
    "mean": (
        "Means of groups",
        "Medians over the layers. Hollow: how much of the operand's energy is the mean of its group; the groups are "
        "those of the recipe's Hadamard transform, or of 16 elements. Filled: the same of the error, rotated back.",
    ),
    "variance": (
        "Variance over {draws} draws of the random bits",
        "A dot is a layer: the variance of an element of the product, averaged over a corner of it. Recipes without "
        "random bits have none.",
    ),
    "growth": (
        "Variance by contraction length, {last}",
        "MXFP4 with stochastic rounding, FLOOR and the prescale of 3/4, without and with random Hadamard transforms of "
        "64 elements. Lines: medians over the layers of the block in the middle, relative to the variance of SR at the "
        "length 64. Dashed: the bounds, in the form of theorem 3.2 of Tseng et al. (arXiv 2502.20586) with their "
        "constants.",
    ),
}
"""Heading and caption of each figure."""


def _provenance(results: Results) -> list[tuple[str, str]]:
    batch, backend = results["batch"], results["backend"]
    lines = [
        ("mxref", f"{results['mxref']}, backend {backend['name']} {backend['details']}".strip()),
        (
            "Batch",
            f"{batch['sequences']} × {batch['length']} tokens, {batch['name']}; SHA-256 {batch['sha256']}",
        ),
    ]
    for moment in results["moments"]:
        by = moment["trained_by"]
        lines.append(
            (
                moment["name"],
                f"{moment['checkpoint']}, after {moment['tokens']:,} tokens, "
                f"{f'trained by recipe {by}' if by else 'of an unnamed recipe'}, loss of the batch "
                f"{moment['loss']:.4f}; SHA-256 of the weights {moment['model_sha256']}",
            )
        )
    return lines + [
        (part.capitalize(), ", ".join(f"{key} {value}" for key, value in results[part].items()))
        for part in ("versions", "hardware")
    ]
