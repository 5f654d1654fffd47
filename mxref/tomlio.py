"""Frozen dataclasses from TOML and back, strictly: an unknown key or a wrong type is an error.

Every configuration of the project (recipes, ladders, training presets) goes through `build`, so all
of them answer a misspelt key in the same way.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from mxref.errors import FileFormatError, RecipeError

T = TypeVar("T")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; FileFormatError names the file, and the line if it does not parse."""
    try:
        with open(path, "rb") as f:
            return tomllib.load(f)
    except OSError as err:
        raise FileFormatError(f"cannot read {path}: {err.strerror or err}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise FileFormatError(f"{path} is not valid TOML: {err}") from err


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or the list of known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(sorted(known))})"


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overlay` laid over it, table by table; neither argument is changed."""
    out = dict(base)
    for key, value in overlay.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Return the dataclass `cls` filled from `table`; `where` names the table in error messages.

    Raises RecipeError on an unknown key (naming the nearest valid one), a missing key, or a value of
    another type.

    Implements: recipe.unknown
    """
    hints = typing.get_type_hints(cls)
    names = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        if key not in names:
            raise RecipeError(f"{where}: unknown key {key!r}{nearest(key, names)}")
    values = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in table.items()}
    try:
        return cls(**values)
    except TypeError as err:
        raise RecipeError(f"{where}: {err}") from err


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        if value is None:
            return None
        return _convert(options[0], value, where)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where}: expected a table, got {value!r}")
        return build(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            known = [str(m.value) for m in hint]
            raise RecipeError(f"{where}: {value!r} is not one of {', '.join(known)}") from None
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where}: expected a list, got {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise RecipeError(f"{where}: expected {hint.__name__}, got {value!r} ({type(value).__name__})")
    return value


def to_table(obj: Any) -> Any:
    """Return a dataclass as plain TOML tables and values, every field written out; None is left out."""
    if is_dataclass(obj):
        items = ((f.name, getattr(obj, f.name)) for f in fields(obj))
        return {name: to_table(value) for name, value in items if value is not None}
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, tuple | list):
        return [to_table(v) for v in obj]
    return obj


def dumps(obj: Any) -> str:
    """Return a dataclass, or a mapping of plain values, as TOML text."""
    import tomli_w

    return tomli_w.dumps(to_table(obj) if is_dataclass(obj) else obj)
