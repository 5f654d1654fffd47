"""Which layers a converter's configuration chooses: names in the forms of torchtitan, and globs."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref_torch.errors import LayerError


class Conversion(Protocol):
    """What `MXLinearConverter.Config` holds."""

    recipe: Recipe | str | Path
    backend: str | None
    seed: int
    fqns: list[str]
    filter_fqns: list[str]
    steps: int | None


def chosen_names(names: Collection[str], conversion: Conversion) -> set[str]:
    """Return the names of the layers that a converter's configuration chooses.

    Raises:
        LayerError: an entry that matches no layer, or no layer left.
    """
    wanted = _matched(names, conversion.fqns, "fqns") if conversion.fqns else set(names)
    recipe = load_recipe(conversion.recipe)
    chosen = {
        name
        for name in wanted - _matched(names, conversion.filter_fqns, "filter_fqns")
        if not recipe.keeps(name)
    }
    if not chosen:
        raise LayerError(
            f"fqns, filter_fqns and keep_bf16 leave none of {len(names)} linear layers to convert"
        )
    return chosen


def _matched(names: Collection[str], entries: Collection[str], key: str) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        some = {name for name in names if _matches(name, entry)}
        if not some:
            raise LayerError(
                f"{key}: {entry!r} matches no linear layer; the first is named {next(iter(names))!r}"
            )
        found |= some
    return found


def _matches(name: str, entry: str) -> bool:
    return fnmatchcase(name, entry) if set(entry) & set("*?[") else entry in name
