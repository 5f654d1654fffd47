"""A ladder that takes its arms from another ladder, and changes what all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxref.tomlio import build, merge, nearest, shown
from mxref_training.errors import ConfigError


@dataclass(frozen=True)
class Extension:
    """The keys by which a ladder's file extends another ladder."""

    extends: str
    """Name of a shipped ladder, or path of a file."""
    arms: tuple[str, ...] = ()
    """Names of the arms that are taken; empty takes all."""
    seeds: int | None = None
    """Repetitions of every arm that is taken; None leaves each its own."""


KEYS = ("extends", "arms", "seeds")


def extended(table: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the table of a ladder that extends another one.

    Args:
        table: the ladder's file, with `extends`.
        base: the file of the ladder that it extends.
        where: the file in error messages.

    Returns:
        The base with its arms chosen and the file's other keys laid over it. Own arms and contrasts follow those that
        are taken. A contrast is taken if both of its arms are. An exploratory one belongs to the base's runs, and is
        not taken.

    Raises:
        ConfigError: an arm that the base does not have, or a base that extends a third ladder.
        RecipeError: a key of another type.
    """
    keys = build(Extension, {key: table[key] for key in KEYS if key in table}, where)
    if "extends" in base:
        raise ConfigError(f"{where}: {keys.extends} extends another ladder itself; extend that one")
    arms = {arm.get("name"): arm for arm in base.get("arm", ())}
    for name in keys.arms:
        if name not in arms:
            raise ConfigError(
                f"{where}: arms: {shown(name)} is no arm of {keys.extends}{nearest(name, arms)}"
            )
    taken = [arm for name, arm in arms.items() if name in keys.arms or not keys.arms]
    if keys.seeds is not None:
        taken = [arm if arm.get("seed_offset") else {**arm, "seeds": keys.seeds} for arm in taken]
    names = {arm["name"] for arm in taken}
    contrasts = [c for c in base.get("contrast", ()) if {c.get("arm"), c.get("against")} <= names]
    own = {key: value for key, value in table.items() if key not in (*KEYS, "arm", "contrast")}
    shared = {key: value for key, value in base.items() if key != "exploratory"}
    return merge(shared, own) | {
        "arm": [*taken, *table.get("arm", ())],
        "contrast": [*contrasts, *table.get("contrast", ())],
    }
