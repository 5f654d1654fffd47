"""The evaluations of last checkpoints: the loss of each arm less that of the reference, by recipe and by text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from mxref_training.report.table import Column, Table

OWN, VALIDATION = "own", "validation"
"""How `mxref_training.lab.last_checkpoint` names the run's own recipe and its own text."""

Results = dict[str, Any]


def last_tables(results: Results) -> list[Table]:
    """Return the losses on the run's own text by recipe, and those with its own recipe by text; none without them.

    Each cell is the mean over the seeds of the loss less the reference's, and the lowest and highest of them.
    """
    arms = _evaluated(results)
    if not arms:
        return []
    reference = next(arm for arm in arms if arm["role"] == "reference")
    first = reference["runs"][0]["last"]
    recipes, texts = list(first["losses"]), list(first["texts"])
    head = [Column("stage", "Stage", left=True), Column("arm", "Arm", left=True)]
    others = [arm for arm in arms if arm["role"] == "arm"]
    tables = []
    if len(recipes) > 1:
        rows = [
            (arm["stage"], arm["label"], *(_said(gaps(arm, reference, name, VALIDATION)) for name in recipes))
            for arm in others
        ]
        columns = [Column(name, f"Evaluated in {_named(name)}") for name in recipes]
        tables.append(Table("last_by_recipe", [*head, *columns], rows))
    if len(texts) > 1:
        losses = [run["last"]["losses"][OWN] for run in reference["runs"]]
        known = ([loss[name] for loss in losses if loss[name] is not None] for name in texts)
        own = (f"{fmean(values):.3f}" if values else "–" for values in known)
        rows = [
            (reference["stage"], f"{reference['label']}, its loss", *own),
            *(
                (arm["stage"], arm["label"], *(_said(gaps(arm, reference, OWN, name)) for name in texts))
                for arm in others
            ),
        ]
        tables.append(Table("last_by_text", [*head, *(Column(name, name) for name in texts)], rows))
    return tables


def caption(table: Table, reference: str) -> str:
    """Return what a table of `last_tables` shows, in a sentence."""
    what = {
        "last_by_recipe": "Each run's last checkpoint on its own validation text, evaluated with several recipes",
        "last_by_text": "Each run's last checkpoint on other text too, with the arm's own recipe",
    }[table.name]
    return f"{what}: loss less that of {reference} in nats, mean over the seeds (lowest to highest)."


def _evaluated(results: Results) -> list[dict[str, Any]]:
    """Return the arms all of whose last checkpoints were evaluated; none if the reference is not among them."""
    found = [arm for arm in results["arms"] if arm["runs"] and all("last" in run for run in arm["runs"])]
    return found if any(arm["role"] == "reference" for arm in found) else []


def gaps(arm: dict[str, Any], reference: dict[str, Any], recipe: str, text: str) -> list[float]:
    """Return the losses of an arm less those of the reference at equal seeds, in nats.

    A loss that was not finite gives none.
    """
    base = {run["pair"]: run["last"]["losses"][recipe][text] for run in reference["runs"]}
    pairs = [(run["last"]["losses"][recipe][text], base.get(run["pair"])) for run in arm["runs"]]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def _named(recipe: str) -> str:
    return "the arm's own recipe" if recipe == OWN else recipe


def _said(found: Sequence[float]) -> str:
    if not found:
        return "–"
    span = f" ({min(found):+.3f} to {max(found):+.3f})" if len(found) > 1 else ""
    return f"{fmean(found):+.3f}{span}".replace("-", "−")
