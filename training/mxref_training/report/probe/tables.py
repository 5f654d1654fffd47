"""The tables of a probe: medians over the layers for the page and the terminal, and every number as CSV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.roles import OPERANDS, GemmRole
from mxref_training.durable import explained, replace_text
from mxref_training.probe.layer import Row
from mxref_training.probe.results import CSV, Results, rows
from mxref_training.report.table import Column, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ROLES = [role.value for role in GemmRole]
SLOTS = [(role.value, operand.tensor) for role in GemmRole for operand in OPERANDS[role]]
"""Role and tensor of the six operands, in the order of all tables and figures."""
_HEAD = ("moment", "recipe", "layer", "role")


def medians(found: Sequence[Row], key: str, *by: str) -> dict[tuple[Any, ...], float]:
    """Return the median over the layers of a number, by other columns; rows without the number do not count."""
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in found:
        if row.get(key) is not None:
            values[tuple(row[name] for name in by)].append(row[key])
    return {group: median(each) for group, each in values.items()}


def summary(results: Results) -> Table:
    """Return for each checkpoint and recipe the medians over the layers."""
    products, operands = rows(results, "products"), rows(results, "operands")
    by = "moment", "recipe", "role"
    snr, bias, cosine = (medians(products, key, *by) for key in ("snr", "bias", "cosine"))
    mean = medians(operands, "dc_noise", *by, "operand")
    several = len(results["moments"]) > 1
    columns = [
        *([Column("moment", "Checkpoint", left=True)] if several else []),
        Column("recipe", "Recipe", left=True),
        *(Column(f"snr_{role}", f"SNR, dB<br>{role.capitalize()}", ".1f") for role in ROLES),
        *(Column(f"bias_{role}", f"Bias, %<br>{role.capitalize()}", "+.2f") for role in ROLES),
        Column("cosine_wgrad", "Cosine<br>of dW", ".4f"),
        Column("mean_wgrad_x", "Wgrad X: error in<br>means of groups, %", ".1f"),
    ]
    lines = []
    for moment in (moment["name"] for moment in results["moments"]):
        for recipe in results["recipes"]:
            at = (moment, recipe["name"])
            share = mean.get((*at, "wgrad", "x"))
            lines.append(
                (
                    *((moment,) if several else ()),
                    recipe["label"],
                    *(snr.get((*at, role)) for role in ROLES),
                    *(_percent(bias.get((*at, role))) for role in ROLES),
                    cosine.get((*at, "wgrad")),
                    _percent(share),
                )
            )
    return Table("probe_summary", columns, lines)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def headline(results: Results) -> str:
    """Return which of the recipes with Wgrad in MXFP4 has the best and the worst gradients of weights, in sentences.

    Of several checkpoints the last counts.
    """
    last = results["moments"][-1]["name"]
    found = [
        row for row in rows(results, "products")
        if (row["moment"], row["role"], row["formats"]) == (last, "wgrad", "mxfp4") and row["snr"] is not None
    ]  # fmt: skip
    by_recipe: dict[str, dict[str, float]] = defaultdict(dict)
    for row in found:
        by_recipe[row["recipe"]][row["layer"]] = row["snr"]
    if len(by_recipe) < 2:
        return "Fewer than two recipes have Wgrad in MXFP4: there is nothing to rank."
    labels = {recipe["name"]: recipe["label"] for recipe in results["recipes"]}
    ranked = sorted(by_recipe, key=lambda name: median(by_recipe[name].values()))
    best, worst = ranked[-1], ranked[0]
    high, low = (median(by_recipe[name].values()) for name in (best, worst))
    both = by_recipe[best].keys() & by_recipe[worst].keys()
    above = sum(by_recipe[best][layer] > by_recipe[worst][layer] for layer in both)
    return (
        f"Of {len(ranked)} recipes with Wgrad in MXFP4, {labels[best]} has the least error of dW ({high:.1f} dB) and "
        f"{labels[worst]} the most ({low:.1f} dB), in {above} of {len(both)} layers. No training noise enters this "
        "comparison; whether such an error changes a loss, it does not say."
    )


def terminal_table(results: Results) -> RichTable:
    """Return the summary for a terminal."""
    from rich.table import Table as Grid
    from rich.text import Text

    from mxref.terminal import BOX, HEAD

    table = summary(results).without("mean_wgrad_x", "bias_fprop", "bias_dgrad")
    found = Grid(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    found.title = f"Medians over the layers: {results['batch']['name']}"
    for column in table.columns:
        title = column.title.replace("<br>", "\n")
        found.add_column(title, justify="left" if column.left else "right", no_wrap=True)
    for row in table.shown():
        found.add_row(*map(Text, row))
    return found


def all_rows(results: Results) -> Table:
    """Return a row for each checkpoint, recipe, layer and GEMM, with the numbers of both operands."""
    operands: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows(results, "operands"):
        operands[tuple(row[key] for key in _HEAD)][row["operand"]] = row
    drawn = {tuple(row[key] for key in _HEAD): row for row in rows(results, "variances")}
    digests = {recipe["name"]: recipe["digest"] for recipe in results["recipes"]}
    steps = {moment["name"]: moment["step"] for moment in results["moments"]}
    found: list[Row] = []
    for row in rows(results, "products"):
        place = tuple(row[key] for key in _HEAD)
        wide: Row = {"step": steps[row["moment"]], "digest": digests[row["recipe"]]} | row
        for which, operand in enumerate(OPERANDS[GemmRole(row["role"])]):
            own = operands[place][operand.tensor]
            wide |= {f"{'ab'[which]}_{key}": value for key, value in own.items() if key not in _HEAD}
        spread = drawn.get(place, {})
        wide |= {key: value for key, value in spread.items() if key not in _HEAD}
        found.append(wide)
    keys = list(dict.fromkeys(key for row in found for key in row))
    return Table(
        "probe", [Column(key, key) for key in keys], [[row.get(key) for key in keys] for row in found]
    )


def write_csv(results: Results, folder: Path) -> Path:
    """Write `probe.csv`; FileFormatError if it cannot be written."""
    path = folder / CSV
    with explained(FileFormatError, f"write {path}", "free some space, or choose another --out"):
        replace_text(path, all_rows(results).csv())
    return path
