"""Recipes from TOML tables and files.

A recipe table is laid out as it is overridden: `[all]`, then a GEMM (`[fprop]`), then one operand of it
(`[fprop.x]`); the later ones win. A dialect is a named starting point.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from mxref.dialects import dialect
from mxref.errors import RecipeError
from mxref.recipe import OperandSpec, Recipe, require_in_range
from mxref.roles import OPERANDS, GemmRole
from mxref.tomlio import build, convert, merge, nearest, read_toml, shown, to_table


def recipe_from_table(table: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Return the recipe of a TOML table, every layer of it applied.

    Args:
        table: keys `dialect`, `all`, `fprop`, `dgrad`, `wgrad` and the fields of `Recipe`; absent keys
            keep their defaults.
        where: name of the table in error messages.

    Raises:
        RecipeError: an unknown key (the nearest valid one is named), a wrong value, or operands of one
            GEMM that do not fit together.

    Implements: recipe.overlay, recipe.unknown
    """
    known = {"dialect", "all", *(f.name for f in fields(Recipe))}
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, known)}")
    table = dict(table)
    base = dialect(table.pop("dialect")).spec if "dialect" in table else OperandSpec()
    common, _ = _layer(table.pop("all", {}), f"{where}.all")
    for role in GemmRole:
        names = [operand.tensor for operand in OPERANDS[role]]
        place = f"{where}.{role.value}"
        shared, own = _layer(table.get(role.value, {}), place, names)
        over = merge(merge(to_table(base), common), shared)
        table[role.value] = {
            name: merge(over, _layer(own.get(name, {}), f"{place}.{name}")[0]) for name in names
        }
    return build(Recipe, table, where)


def _layer(value: Any, where: str, operands: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's keys of `OperandSpec` and its tables of single operands.

    A mistake is named where it stands, before the layers are merged.
    """
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where}: expected a table, got {shown(value)}")
    kinds = get_type_hints(OperandSpec)
    for key, given in value.items():
        if key in operands:
            continue
        if key not in kinds:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, [*kinds, *operands])}")
        try:
            require_in_range(key, convert(kinds[key], given, key))
        except RecipeError as err:
            raise RecipeError(f"{where}.{err}") from None
    shared = {key: given for key, given in value.items() if key in kinds}
    return shared, {key: given for key, given in value.items() if key in operands}


def load_recipe(path: str | Path | Recipe) -> Recipe:
    """Return the recipe of a TOML file, or of the name of one that the training package ships.

    Args:
        path: a file, whose name ends in `.toml` or has a folder before it; a shipped name, as `mxfp4_h16`;
            or a recipe, which is returned as it is.

    Raises:
        RecipeError: an unknown name (the nearest is named), a wrong key or value, or no path at all.
        FileFormatError: a file that cannot be read.
    """
    if isinstance(path, Recipe):
        return path
    if not isinstance(path, str | os.PathLike):
        raise RecipeError(
            f"expected a recipe, the name of one, or the path of a TOML file, got {type(path).__name__}"
        )
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text:
        raise RecipeError(f"expected the path of a TOML file, got {text!r}")
    file = Path(text)
    if file.suffix != ".toml" and len(file.parts) < 2:
        shipped = {found.stem: found for found in _shipped_recipes()}
        if text not in shipped:
            hint = nearest(text, shipped) if shipped else "; the shipped ones come with 'mxref[training]'"
            raise RecipeError(f"unknown recipe {text!r}{hint}; a file's name must end in .toml")
        file = shipped[text]
    return recipe_from_table(read_toml(file), where=file.name)


def _shipped_recipes() -> list[Path]:
    """Return the recipe files of the training package, found without importing it."""
    found = importlib.util.find_spec("mxref_training")
    folders = (found and found.submodule_search_locations) or []
    return sorted(file for folder in folders for file in Path(folder, "recipes").glob("*.toml"))
