"""The evaluations of last checkpoints: the loss of each arm less that of the reference, by recipe and by text."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from ablations.ladders import Results, reference_of
from mxref_training.lab.last_checkpoint import OWN, VALIDATION

_NAMES = {OWN: "the arm's own", "bf16": "BF16", "fp8": "FP8"}


def evaluated(results: Results) -> list[dict[str, Any]]:
    """Return the arms whose last checkpoints were evaluated, the reference among them; empty if it was not."""
    found = [arm for arm in results["arms"] if all("last" in run for run in arm["runs"])]
    return found if any(arm["role"] == "reference" for arm in found) else []


def gap(results: Results, arm: dict[str, Any], recipe: str, text: str) -> tuple[float, float, float]:
    """Return the loss of an arm less that of the reference at equal seeds: mean, lowest and highest, in nats."""
    base = {run["pair"]: run["last"]["losses"] for run in reference_of(results)["runs"]}
    found = [
        run["last"]["losses"][recipe][text] - base[run["pair"]][recipe][text]
        for run in arm["runs"]
        if run["pair"] in base
    ]
    return fmean(found), min(found), max(found)


def by_recipe(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the losses on the run's own text, evaluated with each recipe."""
    arms = evaluated(results)
    recipes = list(reference_of(results)["runs"][0]["last"]["losses"])
    yield ("stage", "arm", *(f"evaluated in {_NAMES.get(name, name)}" for name in recipes))
    for arm in arms:
        if arm["role"] == "arm":
            cells = (_said(*gap(results, arm, recipe, VALIDATION)) for recipe in recipes)
            yield (arm["stage"], arm["label"], *cells)


def by_text(results: Results, recipe: str = OWN) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the losses on each text, evaluated with one recipe."""
    arms, reference = evaluated(results), reference_of(results)
    texts = list(reference["runs"][0]["last"]["texts"])
    yield ("stage", "arm", *("C4" if name == VALIDATION else name for name in texts))
    losses = [run["last"]["losses"][recipe] for run in reference["runs"]]
    yield (
        reference["stage"],
        f"{reference['label']}, its loss",
        *(f"{fmean(loss[name] for loss in losses):.3f}" for name in texts),
    )
    for arm in arms:
        if arm["role"] == "arm":
            cells = (_said(*gap(results, arm, recipe, name)) for name in texts)
            yield (arm["stage"], arm["label"], *cells)


def _said(mean: float, low: float, high: float) -> str:
    span = f" ({low:+.3f} to {high:+.3f})" if low < high else ""
    return f"{mean:+.3f}{span}".replace("-", "−")
