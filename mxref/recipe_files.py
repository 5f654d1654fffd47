"""Recipes from TOML tables and files.

A recipe table is laid out as it is overridden: `[all]`, then a GEMM (`[fprop]`), then one operand of it
(`[fprop.x]`); the later ones win. A dialect is a named starting point. Entries of `[[layers]]` and `[[schedule]]` name
another recipe, or hold a table that is laid over the file's own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from mxref.dialects import dialect
from mxref.errors import RecipeError
from mxref.recipe import OperandSpec, Recipe, require_in_range
from mxref.recipe_plan import LayerRule, Phase, RecipePlan
from mxref.roles import OPERANDS, GemmRole
from mxref.tomlio import build, convert, hints_of, merge, nearest, read_toml, shown, to_table


def recipe_from_table(table: Mapping[str, Any], where: str = "recipe", folder: Path | None = None) -> Recipe:
    """Return the recipe of a TOML table, every layer of it applied.

    Args:
        table: keys `dialect`, `all`, `fprop`, `dgrad`, `wgrad` and the fields of `RecipePlan`; absent keys
            keep their defaults. With `layers` or a `schedule` the result is a `RecipePlan`.
        where: name of the table in error messages.
        folder: where files lie that the table names; default the current one.

    Raises:
        RecipeError: an unknown key (the nearest valid one is named), a wrong value, or operands of one
            GEMM that do not fit together; or a layer's or phase's recipe with layers or phases of its own.
        FileFormatError: a file that the table names and that cannot be read.

    Implements: recipe.overlay, recipe.unknown, recipe.layers, recipe.schedule
    """
    table = dict(table)
    layers, schedule = (_entries(table.pop(key, []), f"{where}.{key}") for key in ("layers", "schedule"))
    own = _own(table, where)
    if not layers and not schedule:
        return own
    rules = tuple(_rule(entry, table, f"{where}.layers[{i}]", folder) for i, entry in enumerate(layers))
    phases = tuple(
        _phase(entry, i, table, rules, f"{where}.schedule[{i}]", folder) for i, entry in enumerate(schedule)
    )
    with _at(where):
        return RecipePlan(**vars(own), layers=rules, schedule=phases)


def _own(table: Mapping[str, Any], where: str) -> Recipe:
    """Return the recipe of a table without `layers` and `schedule`."""
    known = {"dialect", "all", *(f.name for f in fields(Recipe))}
    for key in table:
        if key not in known:
            raise RecipeError(
                f"{where}: unknown key {shown(key)}{nearest(key, known | {'layers', 'schedule'})}"
            )
    named = dialect(table["dialect"]).spec if "dialect" in table else OperandSpec()
    base = {"format": named.format} | named.stated
    common, _ = _layer(table.get("all", {}), f"{where}.all")
    gemms = {role.value: _gemm(role, table.get(role.value, {}), base | common, where) for role in GemmRole}
    return build(
        Recipe, {key: given for key, given in table.items() if key not in ("dialect", "all")} | gemms, where
    )


def _gemm(role: GemmRole, value: Any, below: Mapping[str, Any], where: str) -> Any:
    """Return the spec of a GEMM: its table over the values `below` it, and over these the tables of its operands."""
    kind, place = hints_of(Recipe)[role.value], f"{where}.{role.value}"
    shared, own = _layer(
        value, place, sorted(hints_of(kind))
    )  # beside them: the operands, and keys of the GEMM
    for name in (operand.tensor for operand in OPERANDS[role]):
        mine, _ = _layer(own.get(name, {}), f"{place}.{name}")
        own[name] = build(OperandSpec, {**below, **shared, **mine}, f"{place}.{name}")
    return build(kind, own, place)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Begin the message of a RecipeError with a place in the file."""
    try:
        yield
    except RecipeError as err:
        raise RecipeError(f"{where}: {err}") from None


def _entries(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the tables of an array of tables."""
    if not isinstance(value, list | tuple):
        raise RecipeError(f"{where}: expected an array of tables, got {shown(value)}")
    for i, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise RecipeError(f"{where}[{i}]: expected a table, got {shown(entry)}")
    return list(value)


def _rule(entry: Mapping[str, Any], base: Mapping[str, Any], where: str, folder: Path | None) -> LayerRule:
    """Return an entry of `layers`; `base` is the file's own treatment."""
    file, table = _treatment(entry, LayerRule, where, folder)
    for key in ("layers", "schedule", *(("keep_bf16",) if file is None else ())):
        if table.get(key):
            raise RecipeError(f"{where}.recipe: a layer's recipe has no {key} of its own")
    own, table = (
        {key: value for key, value in whole.items() if key not in ("layers", "schedule", "keep_bf16")}
        for whole in (base, table)
    )
    if file:
        recipe = _own(table, file.name)
    else:
        recipe = _own(table if _is_resolved(table) else merge(own, table), f"{where}.recipe")
    return build(LayerRule, {**entry, "recipe": recipe}, where)


def _phase(
    entry: Mapping[str, Any],
    number: int,
    base: Mapping[str, Any],
    rules: tuple[LayerRule, ...],
    where: str,
    folder: Path | None,
) -> Phase:
    """Return an entry of `schedule`; `base` is the file's own treatment, `rules` its layers."""
    file, table = _treatment(entry, Phase, where, folder)
    if table.get("schedule"):
        raise RecipeError(f"{where}.recipe: the recipe of a phase has no schedule of its own")
    table = {key: value for key, value in table.items() if key != "schedule"}
    if file:
        name, recipe = file.stem, recipe_from_table(table, file.name, file.parent)
    else:
        whole = table if _is_resolved(table) else merge(base, table)
        name, recipe = f"phase {number + 1}", recipe_from_table(whole, f"{where}.recipe", folder)
        if "layers" not in table:
            recipe = RecipePlan(**vars(recipe), layers=rules)
    with _at(where):
        return Phase(**{"name": name, **entry, "recipe": recipe})


def _is_resolved(table: Mapping[str, Any]) -> bool:
    """Return whether a table states every operand in full, as `to_table` writes a recipe.

    It leaves out keys at their default, which then stand for the default and not for what lies below.
    """
    stated = to_table(OperandSpec()).keys()
    operands = [(table.get(role.value), o.tensor) for role in GemmRole for o in OPERANDS[role]]
    found = [gemm.get(name) if isinstance(gemm, Mapping) else None for gemm, name in operands]
    return all(isinstance(own, Mapping) and stated <= own.keys() for own in found)


def _treatment(
    entry: Mapping[str, Any], of: type, where: str, folder: Path | None
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file of the recipe that an entry of a class names, if it names one, and the recipe's table."""
    known = {f.name for f in fields(of)}
    for key in entry:
        if key not in known:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, known)}")
    if "recipe" not in entry:
        raise RecipeError(f"{where}: key 'recipe' is missing")
    recipe = entry["recipe"]
    if isinstance(recipe, Mapping):
        return None, recipe
    if not isinstance(recipe, str):
        raise RecipeError(f"{where}.recipe: expected a table, a shipped name or a file, got {shown(recipe)}")
    with _at(f"{where}.recipe"):
        file = _file_of(recipe, folder)
    return file, _table_of(file)


def _layer(value: Any, where: str, beside: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's values for `OperandSpec`, and what stands `beside` them: tables of operands, keys of a GEMM.

    A mistake is named where it stands, before layers are laid over each other.
    """
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where}: expected a table, got {shown(value)}")
    kinds, own = hints_of(OperandSpec), {}
    for key, given in value.items():
        if key in beside:
            continue
        if key not in kinds:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, [*kinds, *beside])}")
        try:
            own[key] = convert(kinds[key], given, key)
            require_in_range(key, own[key])
        except RecipeError as err:
            raise RecipeError(f"{where}.{err}") from None
    return own, {key: given for key, given in value.items() if key in beside}


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
        way_out = (
            "; make a recipe of it by mxref.recipe_files.recipe_from_table" if isinstance(path, dict) else ""
        )
        raise RecipeError(
            f"expected a recipe, the name of one, or the path of a TOML file, got {type(path).__name__}{way_out}"
        )
    file = _file_of(os.fspath(path), None)
    return recipe_from_table(_table_of(file), file.name, file.parent)


def _table_of(file: Path) -> dict[str, Any]:
    """Return the table of a recipe's file, which says something."""
    table = read_toml(file)
    if not table:
        raise RecipeError(f'{file} is empty: say at least one key, such as all.format = "mxfp4"')
    return table


def _file_of(text: str, folder: Path | None) -> Path:
    """Return the file of a shipped name, or of a path, relative to the folder; RecipeError if it is neither."""
    if not isinstance(text, str) or "\0" in text:
        raise RecipeError(f"expected the path of a TOML file, got {text!r}")
    file = Path(text)
    if file.suffix == ".toml" or len(file.parts) > 1:
        return folder / file if folder else file
    shipped = shipped_recipes()
    if text not in shipped:
        hint = nearest(text, shipped) if shipped else ""
        raise RecipeError(f"unknown recipe {shown(text)}{hint}; a file's name must end in .toml")
    return shipped[text]


def shipped_recipes() -> dict[str, Path]:
    """Return the recipe files of the training package by name, found without importing it."""
    found = importlib.util.find_spec("mxref_training")
    folders = (found and found.submodule_search_locations) or []
    return {file.stem: file for folder in folders for file in sorted(Path(folder, "recipes").glob("*.toml"))}
