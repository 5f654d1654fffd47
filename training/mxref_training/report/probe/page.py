"""The report of a probe: an HTML page in one file, and the same as Markdown without figures."""

from __future__ import annotations

from pathlib import Path

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.probe.results import Results
from mxref_training.report.probe import plots
from mxref_training.report.probe.growth import growth_svg
from mxref_training.report.probe.tables import headline, summary
from mxref_training.report.table import markdown_table
from mxref_training.report.templates import template
from mxref_training.report.text import escaped, markdown_text

HTML, MARKDOWN = "probe.html", "probe.md"

Fact = tuple[str, str]


def write_page(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write `probe.html` and `probe.md` into a folder, each in one piece, and return their paths.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    paths = folder / HTML, folder / MARKDOWN
    with explained(FileFormatError, f"write to {folder}", "free some space, or choose another --out"):
        make_folder(folder)
        for path, text in zip(paths, (html(results), markdown(results)), strict=True):
            replace_text(path, text)
    return paths


def html(results: Results) -> str:
    """Return the page."""
    shown = escaped(results, printable)
    text = template("probe/probe.html.j2").render(
        title=title(shown),
        lead=lead(shown),
        headline=headline(shown),
        summary=summary(shown),
        several=len(shown["moments"]) > 1,
        last=shown["moments"][-1]["name"],
        draws=shown["draws"],
        snr=plots.snr_svg(shown),
        bias=plots.bias_svg(shown),
        split=plots.split_svg(shown),
        mean=plots.mean_svg(shown),
        variance=plots.variance_svg(shown) if shown["variances"]["rows"] else "",
        growth=growth_svg(shown) if shown["growth"]["rows"] else "",
        recipes=shown["recipes"],
        provenance=provenance(shown),
    )
    return printable(text)


def title(results: Results) -> str:
    """Return the title."""
    names = [moment["name"] for moment in results["moments"]]
    return f"Probe of {', '.join(names)}"


def lead(results: Results) -> str:
    """Return what was measured, in a few sentences."""
    return (
        f"{len(results['recipes'])} recipes on {results['batch']['name']}. One forward and backward pass in BF16 gives "
        "X, W and dY of every linear layer. Each recipe's operands and GEMMs are compared with exact products on them. "
        "A recipe with phases is shown as it is at the step of the checkpoint. No weight is updated."
    )


def provenance(results: Results) -> list[Fact]:
    """Return the provenance of the numbers."""
    batch = results["batch"]
    lines = [
        (
            "mxref",
            f"{results['mxref']}, backend {results['backend']['name']} {results['backend']['details']}".strip(),
        ),
        (
            "Batch",
            f"{batch['sequences']} × {batch['length']} tokens, {batch['name']}; SHA-256 {batch['sha256']}",
        ),
    ]
    for moment in results["moments"]:
        trained = (
            f"trained by recipe {moment['trained_by']}" if moment["trained_by"] else "of an unnamed recipe"
        )
        lines.append(
            (
                moment["name"],
                f"{moment['checkpoint']}, after {moment['tokens']:,} tokens, {trained}, loss of the batch "
                f"{moment['loss']:.4f}; SHA-256 of the weights {moment['model_sha256']}",
            )
        )
    return lines + [
        (part.capitalize(), ", ".join(f"{key} {value}" for key, value in results[part].items()))
        for part in ("versions", "hardware")
    ]


def markdown(results: Results) -> str:
    """Return the report as Markdown."""
    lines = [f"# {markdown_text(title(results))}", "", markdown_text(lead(results)), ""]
    lines += [markdown_text(headline(results)), "", *markdown_table(summary(results))]
    lines += [
        "",
        "Medians over the layers, also over those that a recipe leaves in BF16.",
        "",
        "## Recipes",
        "",
        "| recipe | digest | Fprop | Dgrad | Wgrad |",
    ]
    lines += ["|---|---|---|---|---|"]
    for recipe in results["recipes"]:
        parts = [recipe["label"], recipe["digest"], *(text for _, text in recipe["treatment"])]
        lines.append(f"| {' | '.join(map(markdown_text, parts))} |")
    lines += ["", "## Provenance", ""]
    lines += [f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in provenance(results)]
    return "\n".join(lines) + "\n"
