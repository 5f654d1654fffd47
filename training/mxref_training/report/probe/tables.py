"""The tables of a probe: medians over the layers for pages and the terminal, every number as CSV, and what decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from mxref.roles import OPERANDS, GemmRole
from mxref_training.probe.results import Results, Row, rows
from mxref_training.report.table import Column, Table, middle, plain, written
from mxref_training.wording import counted

ROLES = [role.value for role in GemmRole]
SLOTS = [(role.value, operand.tensor) for role in GemmRole for operand in OPERANDS[role]]
"""Role and tensor of the six operands, in the order of all tables and figures."""
TENSORS = {"x": "X", "w": "W", "dy": "dY", "dw": "dW"}
_PLACE = ("moment", "recipe", "layer", "role")


def slot_title(role: str, tensor: str) -> str:
    """Return an operand as texts write it, as in `Wgrad dY`."""
    return f"{role.capitalize()} {TENSORS[tensor]}"


def summary(results: Results) -> Table:
    """Return for each checkpoint and recipe the medians over the layers."""
    products = rows(results, "products")

    def over(key: str, role: str, scale: float = 1) -> Callable[[Any], float | None]:
        """Return a function that takes the median of a number over the layers that have it."""
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in products:
            if row["role"] == role and row[key] is not None:
                values[row["moment"], row["recipe"]].append(scale * row[key])
        return lambda line: middle(values[line["moment"], line["name"]])

    columns = [
        Column("moment", "Checkpoint", left=True),
        Column("recipe", "Recipe", of="label", left=True),
        *(Column(f"snr_{role}", f"SNR, dB\n{role.capitalize()}", ".1f", over("snr", role)) for role in ROLES),
        *(
            Column(f"bias_{role}", f"Bias, %\n{role.capitalize()}", "+.2f", over("bias", role, 100))
            for role in ROLES
        ),
        Column("cosine_wgrad", "Cosine\nof dW", ".4f", over("cosine", "wgrad")),
    ]
    moments = [moment["name"] for moment in results["moments"]]
    lines = [recipe | {"moment": moment} for moment in moments for recipe in results["recipes"]]
    table = Table.of("probe_summary", columns, lines)
    return table if len(moments) > 1 else table.without("moment")


def headline(results: Results) -> str:
    """Return which recipe adds and which removes most of the SNR of dW, against the first with Wgrad in MXFP4.

    Differences are medians over the layers, with their bounds there. Of several checkpoints the last counts.
    """
    last = results["moments"][-1]["name"]
    snr: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows(results, "products"):
        place = row["moment"], row["role"], row["formats"]
        if place == (last, "wgrad", "mxfp4") and row["snr"] is not None:
            snr[row["recipe"]][row["layer"]] = row["snr"]
    labels = {one["name"]: one["label"] for one in results["recipes"] if one["name"] in snr}
    if len(labels) < 2:
        return "Fewer than two recipes have Wgrad in MXFP4: there is nothing to rank."
    first, *others = labels
    base = snr[first]
    apart = {
        name: [value - base[layer] for layer, value in snr[name].items() if layer in base] for name in others
    }
    ranked = sorted((name for name in others if apart[name]), key=lambda name: median(apart[name]))
    if not ranked:
        return (
            f"No other recipe has Wgrad in MXFP4 in the layers of {labels[first]}: there is nothing to rank."
        )
    worst, best = ranked[0], ranked[-1]
    adds, removes = "no recipe adds anything", "no recipe removes anything"
    if median(apart[best]) > 0:
        adds = f"{labels[best]} adds {_decibels(apart[best])}"
    if median(apart[worst]) < 0:
        removes = f"{labels[worst]} removes {_decibels([-value for value in apart[worst]])}"
    return (
        f"In dW, against {labels[first]} ({median(base.values()):.1f} dB), {adds}, and {removes}: medians and bounds "
        f"over {counted(len(apart[best]), 'layer')}, for {len(labels)} recipes with Wgrad in MXFP4. No training noise "
        "enters this comparison; whether such an error changes a loss, it does not say."
    )


def _decibels(values: Sequence[float]) -> str:
    low, high = (written(value, ".1f") for value in (min(values), max(values)))
    return f"{median(values):.1f} dB ({low} to {high})"


def phases(results: Results) -> list[str]:
    """Return for each checkpoint a line on the phases that were probed; nothing where no recipe has several."""
    return [
        f"{moment['name']}: {', '.join(f'phase {phase} of {label}' for label, phase in moment['phases'].items())}"
        for moment in results["moments"]
        if "phases" in moment
    ]


def all_rows(results: Results) -> Table:
    """Return a row for each checkpoint, recipe, layer and GEMM, with the numbers of both operands."""

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in _PLACE)

    operands = {(*place(row), row["operand"]): row for row in rows(results, "operands")}
    drawn = {place(row): row for row in rows(results, "variances")}
    digests = {recipe["name"]: recipe["digest"] for recipe in results["recipes"]}
    steps = {moment["name"]: moment["step"] for moment in results["moments"]}
    found: list[Row] = []
    for row in rows(results, "products"):
        wide: Row = {"step": steps[row["moment"]], "digest": digests[row["recipe"]]} | row
        for side, operand in zip("ab", OPERANDS[GemmRole(row["role"])], strict=True):
            own = operands[*place(row), operand.tensor]
            wide |= {f"{side}_{key}": value for key, value in own.items() if key not in _PLACE}
        found.append(wide | drawn.get(place(row), {}))
    keys = dict.fromkeys(key for row in found for key in row)
    return plain("probe", " ".join(keys), found)
