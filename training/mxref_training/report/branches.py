"""The branch design as tables: what each recipe loses within some updates, and the differences step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxref_training.report.ladder.tables import OWN
from mxref_training.report.table import Column, Table, plain

if TYPE_CHECKING:
    from rich.table import Table as Screen


def branch_tables(results: dict[str, Any]) -> list[Table]:
    """Return the differences at the end of the branches, and those of each step, from the content of `branch.json`."""
    arms = [arm | {"step": moment["step"]} for moment in results["moments"] for arm in moment["arms"]]

    def evaluated(recipe: str, key: str, title: str, form: str) -> Column:
        name = f"{recipe}_{key}" if key == "half_width" else recipe
        return Column(name, title, form, lambda arm: (arm["evaluated"].get(recipe) or {}).get(key))

    columns = [
        Column("step", "from step"),
        Column("arm", of="name", left=True),
        Column("label", "treatment", left=True),
        Column("train_last", "training", "+.4f", "train_last.mean"),
        Column("train_half_width", "±", ".4f", "train_last.half_width"),
        Column("validation_last", "validation", "+.4f", "validation_last.mean"),
        Column("validation_half_width", "±", ".4f", "validation_last.half_width"),
        Column("pairs", of="validation_last.pairs"),
        Column("diverged", of=lambda arm: sum(run["diverged"] for run in arm["runs"])),
    ]
    for name in arms[0]["evaluated"] if arms else ():
        if name != OWN:
            columns += [
                evaluated(name, "mean", f"in {name}", "+.4f"),
                evaluated(name, "half_width", "±", ".4f"),
            ]
    steps = [
        plain(
            f"branch_{kind}",
            "step arm=name at difference",
            [arm | {"at": at, "difference": value} for arm in arms for at, value in arm["difference"][kind]],
        )
        for kind in ("train", "validation")
    ]
    return [Table.of("branches", columns, arms), *steps]


def branch_screen(results: dict[str, Any]) -> Screen:
    """Return the differences at the end of the branches for a terminal."""
    design = results["design"]
    narrow = branch_tables(results)[0].without("label", "train_last", "train_half_width", "pairs")
    return narrow.screen(
        caption=f"Loss less that of {design['trunk']} after {design['updates']} updates on the same batches, in nats; "
        "±: 95 % over the seeds"
    )
