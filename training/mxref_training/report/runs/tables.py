"""The tables of a report of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from mxref.recipe import Recipe
from mxref.recipe_plan import RecipePlan
from mxref.roles import GemmRole
from mxref.tomlio import to_table
from mxref_training.report.probe.tables import SLOTS, slot_title
from mxref_training.report.runs.read import GRADIENT_NUMBERS, OPERAND_NUMBERS, Line, Run
from mxref_training.report.table import Column, Table, plain
from mxref_training.treatment import describe


def overview(runs: Sequence[Run]) -> Table:
    """Return the result of each run, one row for each."""
    columns = [
        Column("run", "Run", left=True),
        Column("recipe_digest", "Recipe", left=True),
        Column("backend", "Backend", left=True),
        Column("steps", "Steps"),
        Column("tokens", "Tokens"),
        Column("train_loss", "Training\nloss", ".4f"),
        Column("val_loss", "Validation\nloss", ".4f"),
        Column("val_difference", "Difference\nfrom first", "+.4f"),
        Column("best_val_loss", "Best", ".4f"),
        Column("tokens_per_second", "Tokens/s", ",.0f"),
        Column("skipped", "Skipped\nsteps"),
        Column("widened", "Widened\nsteps"),
        Column("telemetry_steps", "Measured\nsteps"),
    ]
    rows = []
    first = final_loss(runs[0])
    for run in runs:
        losses = [line["val_loss"] for line in run.evaluations if line["val_loss"] is not None]
        own = final_loss(run)
        rows.append(
            (
                run.name,
                run.record.get("recipe_digest"),
                run.record.get("backend"),
                last(run.steps, "step"),
                last(run.steps, "tokens"),
                last(run.steps, "loss"),
                own,
                None if own is None or first is None or run is runs[0] else own - first,
                min(losses, default=None),
                rate(run),
                sum("skipped" in line for line in run.steps),
                sum("widened" in line for line in run.steps),
                len(run.measured),
            )
        )
    return Table("runs", columns, rows)


def final_loss(run: Run) -> float | None:
    """Return the last validation loss; None before the first evaluation, and where it is not finite."""
    value: float | None = last(run.evaluations, "val_loss")
    return value


def last(lines: Sequence[Line], key: str) -> Any:
    """Return a value of the last line; None where there is no line."""
    return lines[-1].get(key) if lines else None


def rate(run: Run) -> float | None:
    """Return the median of the tokens per second, which a slow first step does not move."""
    rates = [line["tokens_per_second"] for line in run.timing if line.get("tokens_per_second")]
    return median(rates) if rates else None


def recipes(runs: Sequence[Run]) -> Table:
    """Return the treatment of the three GEMMs of each run."""
    columns = [
        Column("run", "Run", left=True),
        Column("recipe_digest", "Digest", left=True),
        *(Column(role.value, role.value.capitalize(), left=True) for role in GemmRole),
        Column("gemm", "Profile", left=True),
        Column("keep_bf16", "In BF16", left=True),
    ]
    rows = [
        (
            run.name,
            run.record.get("recipe_digest"),
            *(text for _, text in describe(run.recipe)),
            str(run.recipe.gemm.value),
            ", ".join(run.recipe.keep_bf16),
        )
        for run in runs
    ]
    return Table("recipes", columns, rows)


def census(runs: Sequence[Run]) -> Table:
    """Return the GEMMs that ran in each run's last measured step."""
    rows = [
        (run.name, run.censuses[-1]["step"], gemm, count)
        for run in runs
        if run.censuses
        for gemm, count in run.censuses[-1]["census"].items()
    ]
    columns = [Column("run", "Run", left=True), Column("step", "Step"), Column("gemm", "GEMM", left=True)]
    return Table("census", [*columns, Column("count", "Ran")], rows)


def curves(runs: Sequence[Run]) -> list[Table]:
    """Return the validation curve and the training steps of all runs, one row for each point."""
    seconds = {run.name: {line["step"]: line for line in run.timing} for run in runs}
    evaluations = [
        (run.name, line["step"], line["tokens"], line["val_loss"], line.get("val_perplexity"))
        for run in runs
        for line in run.evaluations
    ]
    steps = [
        (
            run.name,
            *(line.get(key) for key in ("step", "tokens", "loss", "lr", "grad_norm")),
            seconds[run.name].get(line["step"], {}).get("seconds"),
            seconds[run.name].get(line["step"], {}).get("tokens_per_second"),
            line.get("skipped", ""),
            line.get("widened", False),
            line.get("phase", ""),
        )
        for run in runs
        for line in run.steps
    ]
    keys = (
        "step",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "seconds",
        "tokens_per_second",
        "skipped",
        "widened",
        "phase",
    )
    return [
        plain("validation", ("run", "step", "tokens", "val_loss", "val_perplexity"), evaluations),
        plain("training", ("run", *keys), steps),
    ]


def telemetry(runs: Sequence[Run]) -> list[Table]:
    """Return all lines of telemetry: of operands, and of gradients."""
    head = ("step", "layer", "role", "operand", "format")
    found = []
    for name, numbers, lines in (
        ("telemetry", OPERAND_NUMBERS, {run.name: run.operands for run in runs}),
        ("gradients", GRADIENT_NUMBERS, {run.name: run.gradients for run in runs}),
    ):
        rows = [
            (run, *(line[key] for key in (*head, *numbers))) for run, all_ in lines.items() for line in all_
        ]
        found.append(plain(name, ("run", *head, *numbers), rows))
    return found


def summary(runs: Sequence[Run]) -> Table:
    """Return for each operand the middle and the worst layer in each run's last measured step."""
    columns = [
        Column("run", "Run", left=True),
        Column("step", "Step"),
        Column("operand", "Operand", left=True),
        Column("format", "Format", left=True),
        Column("snr_median", "SNR, dB\nmedian", ".1f"),
        Column("snr_worst", "lowest", ".1f"),
        Column("snr_layer", "in", left=True),
        Column("clipped_median", "Clipped, %\nmedian", ".3f"),
        Column("clipped_worst", "highest", ".3f"),
        Column("zeroed_median", "Zeroed, %\nmedian", ".2f"),
        Column("zeroed_worst", "highest", ".2f"),
        Column("bias_median", "Bias, %\nmedian", "+.2f"),
        Column("bias_worst", "largest", "+.2f"),
        Column("scale_min", "Scales\nlowest", ".4g"),
        Column("scale_max", "highest", ".4g"),
    ]
    rows = []
    for run in runs:
        step = run.measured[-1] if run.measured else None
        now = [line for line in run.operands if line["step"] == step]
        by_slot = {slot: [x for x in now if (x["role"], x["operand"]) == slot] for slot in SLOTS}
        rows += [
            (run.name, step, slot_title(*slot), lines[0]["format"], *_middle_and_worst(lines))
            for slot, lines in by_slot.items()
            if lines
        ]
    order = [slot_title(*slot) for slot in SLOTS]
    rows.sort(key=lambda row: order.index(row[2]))  # rows of one operand stand together for all runs
    return Table("telemetry_summary", columns, rows)


def _middle_and_worst(lines: Sequence[Line]) -> tuple[Any, ...]:
    def values(key: str) -> list[float]:
        return [line[key] for line in lines if line[key] is not None]

    snr = [(line["snr"], line["layer"]) for line in lines if line["snr"] is not None]
    low = min(snr, default=(None, ""))
    bias = [100 * value for value in values("bias")]
    return (
        _median(values("snr")),
        *low,
        _median(values("clipped")),
        max(values("clipped"), default=None),
        _median(values("zeroed")),
        max(values("zeroed"), default=None),
        _median(bias),
        max(bias, key=abs, default=None),
        min(values("scale_min"), default=None),
        max(values("scale_max"), default=None),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def alignment(runs: Sequence[Run], rows: int = 5) -> Table:
    """Return each run's median cosine in its last measured step, and the layers below all others."""
    columns = [
        Column("run", "Run", left=True),
        Column("step", "Step"),
        Column("layer", "Layer", left=True),
        Column("cosine", "Cosine of dW", ".4f"),
        Column("norm_ratio", "Norm ratio", ".4f"),
    ]
    found: list[tuple[Any, ...]] = []
    for run in runs:
        step = last(run.gradients, "step")
        now = [x for x in run.gradients if x["step"] == step and x["cosine"] is not None]
        if now:
            middle = _median([x["cosine"] for x in now])
            ratio = _median([x["norm_ratio"] for x in now if x["norm_ratio"] is not None])
            found.append((run.name, step, "median of all", middle, ratio))
        worst = sorted(now, key=lambda x: x["cosine"])[:rows]
        found += [(run.name, step, x["layer"], x["cosine"], x["norm_ratio"]) for x in worst]
    return Table("alignment", columns, found)


def settings(runs: Sequence[Run]) -> list[Table]:
    """Return configuration, recipe and environment of all runs, one column for each run."""
    found = []
    for name, tables in (
        ("config", [run.config for run in runs]),
        ("recipe", [_recipe(run.recipe) for run in runs]),
        ("environment", [_environment(run) for run in runs]),
    ):
        flat = [_flat(table) for table in tables]
        keys = list(dict.fromkeys(key for each in flat for key in each))
        rows = [(key, *(each.get(key) for each in flat)) for key in keys]
        columns = [Column("key", "Key", left=True), *(Column(run.name, run.name, left=True) for run in runs)]
        found.append(Table(name, columns, rows))
    return found


def differing(table: Table) -> Table:
    """Return the rows whose values differ between the runs."""
    return Table(
        f"{table.name}_differences", table.columns, [row for row in table.rows if len(set(row[1:])) > 1]
    )


def _recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's keys; of each layer entry and phase where it holds, its digest, and its treatment in words."""
    table: dict[str, Any] = to_table(recipe)
    if isinstance(recipe, RecipePlan):
        for name in ("layers", "schedule"):
            for i, (entry, held) in enumerate(zip(table.pop(name, []), getattr(recipe, name), strict=True)):
                own = held.recipe
                where = {key: value for key, value in entry.items() if key != "recipe"}
                words = {role.lower(): text for role, text in describe(own)}
                table[f"{name}[{i}]"] = where | {"digest": own.digest} | words
    return table


def _environment(run: Run) -> dict[str, Any]:
    kept = {key: run.record.get(key) for key in ("versions", "hardware", "platform", "started", "backend")}
    data = run.record.get("data") or {}
    return kept | {"data": {key: value for key, value in data.items() if key != "report"}}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found


def all_tables(runs: Sequence[Run]) -> list[Table]:
    """Return every table of a report, as `--csv` writes them."""
    return [
        overview(runs),
        recipes(runs),
        census(runs),
        *curves(runs),
        summary(runs),
        alignment(runs, rows=1 << 30),
        *telemetry(runs),
        *settings(runs),
    ]
