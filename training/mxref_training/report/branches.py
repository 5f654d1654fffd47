"""The branch design as tables: what each recipe loses within some updates, and the differences step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxref_training.report.ladder.tables import OWN
from mxref_training.report.table import Column, Table, plain

if TYPE_CHECKING:
    from rich.table import Table as Screen

_ENDS = (
    Column("step", "from step"),
    Column("arm", "arm", left=True),
    Column("label", "treatment", left=True),
    Column("train_last", "training", "+.4f"),
    Column("train_half_width", "±", ".4f"),
    Column("validation_last", "validation", "+.4f"),
    Column("validation_half_width", "±", ".4f"),
    Column("pairs", "pairs"),
    Column("diverged", "diverged"),
)


def branch_tables(results: dict[str, Any]) -> list[Table]:
    """Return the differences at the end of the branches, and those of each step.

    Args:
        results: the content of `branch.json`.
    """
    rows = [(moment["step"], arm) for moment in results["moments"] for arm in moment["arms"]]
    steps = [
        plain(
            f"branch_{kind}",
            ("step", "arm", "at", "difference"),
            [(step, arm["name"], at, value) for step, arm in rows for at, value in arm["difference"][kind]],
        )
        for kind in ("train", "validation")
    ]
    recipes = [name for name in (rows[0][1]["evaluated"] if rows else ()) if name != OWN]
    further = [
        column
        for name in recipes
        for column in (Column(name, f"in {name}", "+.4f"), Column(f"{name}_half_width", "±", ".4f"))
    ]
    ends = Table("branches", [*_ENDS, *further], [_end(step, arm, recipes) for step, arm in rows])
    return [ends, *steps]


def _end(step: int, arm: dict[str, Any], recipes: list[str]) -> tuple[Any, ...]:
    train, validation = (arm[key] or {} for key in ("train_last", "validation_last"))
    return (
        step,
        arm["name"],
        arm["label"],
        *(found.get(key) for found in (train, validation) for key in ("mean", "half_width")),
        validation.get("pairs"),
        sum(run["diverged"] for run in arm["runs"]),
        *((arm["evaluated"].get(name) or {}).get(key) for name in recipes for key in ("mean", "half_width")),
    )


def branch_screen(results: dict[str, Any]) -> Screen:
    """Return the differences at the end of the branches for a terminal."""
    trunk, part = results["design"]["trunk"], results["last"]
    return branch_tables(results)[0].screen(
        caption=f"Loss less that of {trunk} after {results['design']['updates']} updates on the same batches, in nats; "
        f"training: mean of the last {part:.0%}; ±: 95 % over the seeds"
    )
