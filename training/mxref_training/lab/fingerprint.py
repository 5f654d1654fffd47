"""Everything that a run's result depends on, so that a finished run is kept and a changed one is trained again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.identity import identity

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

DESIGN = "design"
"""A part of a fingerprint beside those of `fingerprint`: where a run starts and ends, if it is not a whole one."""


def fingerprint(
    config: TrainConfig, recipe: Recipe, backend: Backend, corpus: Any, code: str
) -> dict[str, Any]:
    """Return everything that an arm's result depends on, by part, so that a change can be named."""
    parts = identity(config, recipe, backend, corpus)
    return parts | {"run": parts["run"] | {"steps": config.run.steps}, "code": code}


def is_longer(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether the new fingerprint differs only in a larger number of steps, so that the old run can continue."""
    before, now = old["run"].get("steps", 0), new["run"]["steps"]
    return before < now and old | {"run": old["run"] | {"steps": now}} == new


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what differs between two fingerprints, in words."""
    found = []
    for part, value in new.items():
        before = old.get(part)
        if isinstance(value, dict) and isinstance(before, dict):
            keys = differences(before, value)
            if keys:
                found.append(f"{part} {', '.join(keys[:3])}{' and more' * (len(keys) > 3)} changed")
        elif value != before:
            found.append(f"the {part} changed")
    return found or ["its fingerprint changed"]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the keys in which two tables differ, each with the keys of the tables around it."""
    keys = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(prefix + key)
    return keys
