"""What the report of a ladder shows of a probe in the ladder's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mxref_training.probe.results import JSON, load
from mxref_training.report.probe.tables import headline, summary
from mxref_training.report.table import Table, markdown_table
from mxref_training.report.text import escaped, markdown_text


@dataclass(frozen=True)
class Section:
    """A part of the ladder's report."""

    lead: str
    table: Table


def section(folder: Path, escape: Callable[[str], str]) -> Section | None:
    """Return the section of a ladder's folder, its texts escaped; None where nothing was probed.

    Raises:
        FileFormatError: the results of the probe are damaged.
    """
    if not (folder / JSON).exists():
        return None
    results = escaped(load(folder), escape)
    moment = results["moments"][-1]
    lead = (
        f"Minutes of training cannot tell the recipes apart, but one step can be compared exactly. At {moment['name']} "
        f"of the reference, {results['batch']['name']} gave X, W and dY of every layer, and each recipe's GEMMs ran on "
        f"them. {headline(results)}"
    )
    return Section(lead, summary(results))


def probe_markdown(folder: Path) -> str:
    """Return the same as Markdown; nothing where nothing was probed."""
    found = section(folder, str)
    if found is None:
        return ""
    lines = [
        "",
        "## One step without training noise",
        "",
        markdown_text(found.lead),
        "",
        *markdown_table(found.table),
    ]
    return "\n".join(lines) + "\n"
