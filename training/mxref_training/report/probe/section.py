"""What the report of a ladder shows of a probe in the ladder's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mxref_training.probe.results import JSON, load
from mxref_training.report.probe.tables import headline, summary
from mxref_training.report.table import Table


@dataclass(frozen=True)
class Section:
    """A part of the ladder's report."""

    headline: str
    lead: str
    table: Table


def section(folder: Path) -> Section | None:
    """Return the section of a ladder's folder; None where nothing was probed.

    Raises:
        FileFormatError: the results of the probe are damaged.
    """
    if not (folder / JSON).exists():
        return None
    results = load(folder)
    lead = (
        f"At {results['moments'][-1]['name']} of the reference, {results['batch']['name']} gave X, W and dY of every "
        "layer, and each recipe's GEMMs ran on them. Short runs cannot tell the recipes apart; this step can."
    )
    return Section(headline(results), lead, summary(results))
