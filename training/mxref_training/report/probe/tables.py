"""The tables of a probe: medians over the layers for pages and the terminal, every number as CSV, and what decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mxref.errors import FileFormatError
from mxref.roles import OPERANDS, GemmRole
from mxref_training.durable import explained, replace_text
from mxref_training.probe.layer import Row
from mxref_training.probe.results import CSV, Results, rows
from mxref_training.report.table import Column, Table, plain

ROLES = [role.value for role in GemmRole]
SLOTS = [(role.value, operand.tensor) for role in GemmRole for operand in OPERANDS[role]]
"""Role and tensor of the six operands, in the order of all tables and figures."""
TENSORS = {"x": "X", "w": "W", "dy": "dY", "dw": "dW"}
_HEAD = ("moment", "recipe", "layer", "role")


def slot_title(role: str, tensor: str) -> str:
    """Return an operand as texts write it, as in `Wgrad dY`."""
    return f"{role.capitalize()} {TENSORS[tensor]}"


def summary(results: Results) -> Table:
    """Return for each checkpoint and recipe the medians over the layers."""
    products, operands = rows(results, "products"), rows(results, "operands")
    by = "moment", "recipe", "role"
    snr, bias, cosine = (_medians(products, key, *by) for key in ("snr", "bias", "cosine"))
    mean = _medians(operands, "dc_noise", *by, "operand")
    columns = [
        Column("moment", "Checkpoint", left=True, once=True),
        Column("recipe", "Recipe", left=True),
        *(Column(f"snr_{role}", f"SNR, dB\n{role.capitalize()}", ".1f") for role in ROLES),
        *(Column(f"bias_{role}", f"Bias, %\n{role.capitalize()}", "+.2f") for role in ROLES),
        Column("cosine_wgrad", "Cosine\nof dW", ".4f"),
        Column("mean_wgrad_x", "Wgrad X: error in\nmeans of groups, %", ".1f"),
    ]
    lines = []
    for moment in (moment["name"] for moment in results["moments"]):
        for recipe in results["recipes"]:
            at = (moment, recipe["name"])
            lines.append(
                (
                    moment,
                    recipe["label"],
                    *(snr.get((*at, role)) for role in ROLES),
                    *(_percent(bias.get((*at, role))) for role in ROLES),
                    cosine.get((*at, "wgrad")),
                    _percent(mean.get((*at, "wgrad", "x"))),
                )
            )
    table = Table("probe_summary", columns, lines)
    return table if len(results["moments"]) > 1 else table.without("moment")


def _medians(found: Sequence[Row], key: str, *by: str) -> dict[tuple[Any, ...], float]:
    """Return the median over the layers of a number, by other columns; rows without the number do not count."""
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in found:
        if row.get(key) is not None:
            values[tuple(row[name] for name in by)].append(row[key])
    return {group: median(each) for group, each in values.items()}


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def headline(results: Results) -> str:
    """Return which recipe adds and which removes most of the SNR of dW, against the first with Wgrad in MXFP4.

    Differences are medians over the layers, with their bounds there. Of several checkpoints the last counts.
    """
    last = results["moments"][-1]["name"]
    by_recipe: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows(results, "products"):
        if (row["moment"], row["role"], row["formats"]) == (last, "wgrad", "mxfp4") and row[
            "snr"
        ] is not None:
            by_recipe[row["recipe"]][row["layer"]] = row["snr"]
    labels = {one["name"]: one["label"] for one in results["recipes"] if one["name"] in by_recipe}
    if len(labels) < 2:
        return "Fewer than two recipes have Wgrad in MXFP4: there is nothing to rank."
    first, *others = labels
    apart = {
        name: [
            snr - by_recipe[first][layer]
            for layer, snr in by_recipe[name].items()
            if layer in by_recipe[first]
        ]
        for name in others
    }
    ranked = sorted((name for name in others if apart[name]), key=lambda name: median(apart[name]))
    if not ranked:
        return (
            f"No other recipe has Wgrad in MXFP4 in the layers of {labels[first]}: there is nothing to rank."
        )
    best, worst = ranked[-1], ranked[0]
    adds = (
        f"{labels[best]} adds {_decibels(apart[best])}"
        if median(apart[best]) > 0
        else "no recipe adds anything"
    )
    removes = (
        f"{labels[worst]} removes {_decibels([-value for value in apart[worst]])}"
        if median(apart[worst]) < 0
        else "no recipe removes anything"
    )
    layers = len(apart[best])
    return (
        f"In dW, against {labels[first]} ({median(by_recipe[first].values()):.1f} dB), {adds}, and {removes}: medians "
        f"and bounds over {layers} layer{'s' * (layers != 1)}, for {len(labels)} recipes with Wgrad in MXFP4. No "
        "training noise enters this comparison; whether such an error changes a loss, it does not say."
    )


def _decibels(values: Sequence[float]) -> str:
    low, high = (f"{value:.1f}".replace("-", "−") for value in (min(values), max(values)))
    return f"{median(values):.1f} dB ({low} to {high})"


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
        wide |= {key: value for key, value in drawn.get(place, {}).items() if key not in _HEAD}
        found.append(wide)
    keys = list(dict.fromkeys(key for row in found for key in row))
    return plain("probe", keys, [[row.get(key) for key in keys] for row in found])


def write_csv(results: Results, folder: Path) -> Path:
    """Write `probe.csv`; FileFormatError if it cannot be written."""
    path = folder / CSV
    with explained(FileFormatError, f"write {path}", "free some space, or choose another --out"):
        replace_text(path, all_rows(results).csv())
    return path
