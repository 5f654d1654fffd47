"""The second analysis of a ladder, and several ladders together, as tables; and the runs that are flagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxref_training.lab.exploratory import same_sign
from mxref_training.report.ladder.plots import short_names
from mxref_training.report.table import Column, Table

Results = dict[str, Any]

_COLUMNS = (
    Column("contrast", "contrast", left=True),
    Column("declared", "declared", left=True),
    Column("nats", "loss, nats", "+.4f"),
    Column("low", "95 %<br>from", "+.4f"),
    Column("high", "<br>to", "+.4f"),
    Column("corrected_p", "p,<br>corrected", ".4f"),
    Column("pairs", "pairs"),
    Column("same_sign", "of the<br>same sign"),
    Column("slope", "slope, nats<br>per e-fold", "+.4f"),
    Column("slope_low", "95 %<br>from", "+.4f"),
    Column("slope_high", "<br>to", "+.4f"),
)


def exploratory_table(results: Results) -> Table | None:
    """Return the contrasts of the second analysis; None for results of an older version, or without contrasts."""
    found = results.get("exploratory")
    if not found or not found["contrasts"]:
        return None
    return _table("exploratory", found["contrasts"], short_names(results["arms"]))


def combined_table(rows: Sequence[Mapping[str, Any]], results: Results) -> Table:
    """Return the contrasts over the pairs of several ladders; the arms have the names of `results`."""
    return _table("combined", rows, short_names(results["arms"]))


def _table(name: str, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Table:
    return Table(name, _COLUMNS, [_row(row, names) for row in rows])


def _row(row: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, ...]:
    loss, slope = row["loss"], row["slope"]
    pairs = [one[1] if isinstance(one, list) else one for one in loss["pairs"]]
    return (
        f"{names[row['arm']]} less {names[row['against']]}",
        "before the runs" if row["declared"] else "after",
        *(loss[key] for key in ("nats", "low", "high", "corrected_p")),
        len(pairs),
        same_sign(pairs),
        *(slope[key] for key in ("nats", "low", "high")),
    )


def exploratory_line(results: Results) -> str:
    """Return on which spread the second analysis stands; empty for results of an older version."""
    found = results.get("exploratory")
    if not found or not found["contrasts"] or found["pools"][0]["nats"] is None:
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
    found = results.get("flagged") or []
    if not found:
        return ""
    names = short_names(results["arms"])
    text = "; ".join(f"{names[one['arm']]}, pair {one['pair']}: {one['reason']}" for one in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    reference = "The reference itself is flagged, so nothing is compared with a run that learned. "
    return f"{reference if found[0]['reference'] else ''}Flagged: {text}{more}."
