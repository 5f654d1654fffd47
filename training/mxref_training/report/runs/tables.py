"""What the runs of a report have written, and its tables; nothing is changed in their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError, MxrefError
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.recipe_plan import RecipePlan
from mxref.roles import GemmRole
from mxref.tomlio import read_toml, to_table
from mxref_training.log_files import read_lines
from mxref_training.report.probe.tables import SLOTS, slot_title
from mxref_training.report.table import Column, Table, middle, plain
from mxref_training.run_folder import read_record
from mxref_training.treatment import describe

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The content of a run's files."""

    name: str
    """A short name that no other run of the report has."""
    record: dict[str, Any]
    """`run.json`."""
    config: dict[str, Any]
    """`config.toml`."""
    recipe: Recipe
    steps: list[Line]
    """Lines of `metrics.jsonl` about training steps."""
    evaluations: list[Line]
    """Lines of `metrics.jsonl` about evaluations."""
    timing: list[Line]
    operands: list[Line]
    """Lines of `telemetry.jsonl` about operands."""
    gradients: list[Line]
    """Lines of `telemetry.jsonl` about gradients of weights."""

    @property
    def measured(self) -> list[int]:
        """The steps with telemetry of operands."""
        return sorted({line["step"] for line in self.operands})

    @property
    def latest(self) -> list[Line]:
        """The lines of `telemetry.jsonl` of the last measured step, but for the census."""
        lines = (*self.operands, *self.gradients)
        return [line for line in lines if line["step"] == self.measured[-1]]

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        run = self.config["run"]
        return int(run["batch"] * run["seq_len"])


def is_run(folder: Path) -> bool:
    """Return whether a folder has the file that makes it a run."""
    return (folder / "run.json").exists()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs of some folders, named by the shortest ends of the paths that tell them apart.

    Raises:
        FileFormatError: a folder that is no run, a run of another version, or a damaged file.
    """
    parts = [folder.resolve().parts for folder in folders]
    longest = max(len(each) for each in parts)
    for length in range(1, longest + 1):
        names = [os.sep.join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [
        _read(folder, f"{name} ({i})" if names.count(name) > 1 else name)  # equal paths are numbered
        for i, (folder, name) in enumerate(zip(folders, names, strict=True), 1)
    ]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise FileFormatError(
            f"{folder} is not a folder; name the --out of an `mxref train` or `mxref ablate`"
        )
    record = read_record(folder)
    if record is None:
        raise FileFormatError(
            f"{folder} is no run: it has no run.json, nor the results.json of a ladder; "
            "name the --out of an `mxref train` or `mxref ablate`"
        )
    try:
        config, recipe = read_toml(folder / "config.toml"), load_recipe(folder / "recipe.toml")
    except (MxrefError, OSError, ValueError) as err:
        raise FileFormatError(
            f"{folder}: config.toml and recipe.toml are not both readable ({err}); the command that trained the run "
            "writes them again"
        ) from err
    metrics, timing, telemetry = (
        list(read_lines(folder / f"{name}.jsonl")) for name in ("metrics", "timing", "telemetry")
    )
    return Run(
        name,
        record,
        config,
        recipe,
        steps=[line for line in metrics if "lr" in line],
        evaluations=[line for line in metrics if "val_loss" in line],
        timing=[line for line in timing if "seconds" in line],
        operands=[line for line in telemetry if "snr" in line],
        gradients=[line for line in telemetry if "cosine" in line],
    )


# ---- the tables ----


def overview(runs: Sequence[Run]) -> Table:
    """Return the result of each run, one row for each."""
    first = final_loss(runs[0])

    def difference(run: Run) -> float | None:
        own = final_loss(run)
        return None if own is None or first is None or run is runs[0] else own - first

    columns = [
        Column("run", "Run", of=lambda run: run.name, left=True),
        Column("recipe_digest", "Recipe", of=lambda run: run.record.get("recipe_digest"), left=True),
        Column("backend", "Backend", of=lambda run: run.record.get("backend"), left=True),
        Column("steps", "Steps", of=lambda run: last(run.steps, "step")),
        Column("tokens", "Tokens", of=lambda run: last(run.steps, "tokens")),
        Column("train_loss", "Training\nloss", ".4f", lambda run: last(run.steps, "loss")),
        Column("val_loss", "Validation\nloss", ".4f", final_loss),
        Column("val_difference", "Difference\nfrom first", "+.4f", difference),
        Column(
            "best_val_loss", "Best", ".4f", lambda run: min(_known(run.evaluations, "val_loss"), default=None)
        ),
        Column("tokens_per_second", "Tokens/s", ",.0f", rate),
        Column("skipped", "Skipped\nsteps", of=lambda run: sum("skipped" in line for line in run.steps)),
        Column("widened", "Widened\nsteps", of=lambda run: sum("widened" in line for line in run.steps)),
        Column("telemetry_steps", "Measured\nsteps", of=lambda run: len(run.measured)),
    ]
    return Table.of("runs", columns, runs)


def final_loss(run: Run) -> float | None:
    """Return the last validation loss; None before the first evaluation, and where it is not finite."""
    value: float | None = last(run.evaluations, "val_loss")
    return value


def last(lines: Sequence[Line], key: str) -> Any:
    """Return a value of the last line; None where there is no line."""
    return lines[-1].get(key) if lines else None


def rate(run: Run) -> float | None:
    """Return the median of the tokens per second, which a slow first step does not move."""
    return middle(line.get("tokens_per_second") or None for line in run.timing)


def recipes(runs: Sequence[Run]) -> Table:
    """Return the treatment of the three GEMMs of each run."""

    def treatment(role: GemmRole) -> Column:
        name = role.value.capitalize()
        return Column(role.value, name, of=lambda run: dict(describe(run.recipe))[name], left=True)

    columns = [
        Column("run", "Run", of=lambda run: run.name, left=True),
        Column("recipe_digest", "Digest", of=lambda run: run.record.get("recipe_digest"), left=True),
        *map(treatment, GemmRole),
        Column("gemm", "Profile", of=lambda run: str(run.recipe.gemm.value), left=True),
        Column("keep_bf16", "In BF16", of=lambda run: ", ".join(run.recipe.keep_bf16), left=True),
    ]
    return Table.of("recipes", columns, runs)


def summary(runs: Sequence[Run]) -> Table:
    """Return for each operand the middle and the worst layer in each run's last measured step."""
    columns = [
        Column("run", "Run", left=True),
        Column("step", "Step"),
        Column("operand", "Operand", left=True),
        Column("format", "Format", left=True),
        Column("snr_median", "SNR, dB\nmedian", ".1f", _over("snr", middle)),
        Column("snr_worst", "lowest", ".1f", _over("snr", min)),
        Column("snr_layer", "in", left=True, of=lambda row: _lowest(row["lines"])),
        Column("clipped_median", "Clipped, %\nmedian", ".3f", _over("clipped", middle)),
        Column("clipped_worst", "highest", ".3f", _over("clipped", max)),
        Column("zeroed_median", "Zeroed, %\nmedian", ".2f", _over("zeroed", middle)),
        Column("zeroed_worst", "highest", ".2f", _over("zeroed", max)),
        Column("bias_median", "Bias, %\nmedian", "+.2f", _over("bias", middle, 100)),
        Column("bias_worst", "largest", "+.2f", _over("bias", lambda values: max(values, key=abs), 100)),
        Column("scale_min", "Scales\nlowest", ".4g", _over("scale_min", min)),
        Column("scale_max", "highest", ".4g", _over("scale_max", max)),
    ]
    rows = []
    for role, operand in SLOTS:  # rows of one operand stand together for all runs
        for run in runs:
            now = [line for line in run.latest if (line["role"], line["operand"]) == (role, operand)]
            if now:
                own = {"run": run.name, "operand": slot_title(role, operand), "lines": now}
                rows.append(now[0] | own)
    return Table.of("telemetry_summary", columns, rows)


def _over(key: str, of: Callable[[list[float]], Any], scale: float = 1) -> Callable[[Any], Any]:
    """Return a function that takes a number over the layers of a row, where one of them has it."""

    def value(row: dict[str, Any]) -> Any:
        values = [scale * value for value in _known(row["lines"], key)]
        return of(values) if values else None

    return value


def _lowest(lines: Sequence[Line]) -> str:
    return min(((line["snr"], line["layer"]) for line in lines if line["snr"] is not None), default=(0, ""))[
        1
    ]


def _known(lines: Sequence[Line], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


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
        columns = [Column("key", "Key", left=True), *(Column(run.name, left=True) for run in runs)]
        found.append(Table(name, columns, rows))
    return found


def differing(table: Table) -> Table:
    """Return the rows whose values differ between the runs."""
    rows = [row for row in table.rows if len(set(row[1:])) > 1]
    return Table(f"{table.name}_differences", table.columns, rows)


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
    """Return every table of a report, as `--csv` writes them: also each point of the curves and line of telemetry."""
    seconds = {(run.name, line["step"]): line for run in runs for line in run.timing}
    lines = {
        kind: [
            {"widened": False} | seconds.get((run.name, line["step"]), {}) | line | {"run": run.name}
            for run in runs
            for line in getattr(run, kind)
        ]
        for kind in ("steps", "evaluations", "operands", "gradients")
    }
    where = "run step layer role operand format"
    return [
        overview(runs),
        recipes(runs),
        plain("validation", "run step tokens val_loss val_perplexity", lines["evaluations"]),
        plain(
            "training",
            "run step tokens loss lr grad_norm seconds tokens_per_second skipped widened phase",
            lines["steps"],
        ),
        summary(runs),
        plain(
            "telemetry",
            f"{where} elements nonzero clipped zeroed snr bias scale_min scale_max scale_low scale_high nonfinite",
            lines["operands"],
        ),
        plain("gradients", f"{where} cosine norm_ratio", lines["gradients"]),
        *settings(runs),
    ]
