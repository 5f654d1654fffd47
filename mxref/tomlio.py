"""Strict conversion between TOML and frozen dataclasses: an unknown key or a wrong type is an error.

Every configuration of the project (recipes, ladders, training presets) uses `build`, so all of them report a
misspelt key in the same way.
"""

from __future__ import annotations

import difflib
import math
import numbers
import reprlib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mxref.errors import FileFormatError, RecipeError
from mxref.formats import BlockShape, OperandFormat

T = TypeVar("T")


MAX_DEPTH = 32
"""Largest nesting depth of tables and lists in a file."""

_INTEGER_BITS = 64  # a seed uses all of them
_SHOWN = 80


class _Short(reprlib.Repr):
    """Values in error messages, shortened to one line."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert integers of more than 4,300 digits to text.
        return repr(x) if x.bit_length() <= 2 * _INTEGER_BITS else f"an integer of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = _SHOWN


def shown(value: object) -> str:
    """Return the text for a value in an error message: a short `repr`."""
    return _short.repr(value)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        FileFormatError: the file cannot be read or parsed, or nests tables or lists deeper than `MAX_DEPTH`. The
            message names the file, and the line of a syntax error.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as err:
        raise FileFormatError(f"cannot read {shorter(path)}: {err.strerror or err}") from err
    except ValueError as err:  # a null byte in the path, or a file that is not UTF-8
        raise FileFormatError(f"{shorter(path)} is not valid TOML: {err}") from err
    if text.startswith("\ufeff"):
        raise FileFormatError(
            f"{shorter(path)} begins with a byte order mark, which TOML does not have: save it as UTF-8 without BOM"
        )
    try:
        return parse_toml(text)
    except ValueError as err:
        raise FileFormatError(f"{shorter(path)} is not valid TOML: {err}") from err


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML text; ValueError if it does not parse or is nested deeper than `MAX_DEPTH`."""
    too_deep = f"tables or lists are nested more than {MAX_DEPTH} deep"
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if any(depth > MAX_DEPTH for depth in _depths(table)):
        raise ValueError(too_deep)
    return table


def _depths(table: dict[str, Any]) -> Iterator[int]:
    waiting: list[tuple[Any, int]] = [(table, 0)]
    while waiting:
        value, depth = waiting.pop()
        yield depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(one, depth + 1) for one in inner]


def shorter(text: str | Path) -> str:
    """Return text for an error message, without its middle if it is very long."""
    full = str(text)
    return full if len(full) <= 3 * _SHOWN else f"{full[:_SHOWN]}...{full[-_SHOWN:]}"


def suggestion(word: object, known: typing.Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or an empty text if none is near."""
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(shorter(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(word: object, known: typing.Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or the list of known words."""
    known = list(known)
    return suggestion(word, known) or f" (known: {', '.join(sorted(known))})"


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `overlay`, merged table by table; neither argument is changed."""
    out = dict(base)
    for key, value in overlay.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Return the dataclass `cls` filled from `table`; `where` names the table in error messages.

    Raises:
        RecipeError: an unknown key (the message names the nearest valid one), a missing key, or a value of
            another type.

    Implements: recipe.unknown
    """
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise RecipeError(f"{where}: unknown key {shown(key)}{nearest(key, known)}")
    hints = hints_of(cls)  # type: ignore[arg-type]  # mypy takes no class for hashable
    values = {key: convert(hints[key], value, f"{where}.{key}") for key, value in table.items()}
    for key, f in known.items():
        if key not in values and f.default is MISSING and f.default_factory is MISSING:
            raise RecipeError(f"{where}: key {key!r} is missing")
    try:
        return cls(**values)
    except RecipeError as err:
        raise RecipeError(f"{where}: {err}") from err


def normalize(obj: Any, where: str = "") -> None:
    """Convert the fields of a frozen dataclass to their declared types; for use in `__post_init__`.

    Values from Python then follow the same rules as values from a file.

    Raises:
        RecipeError: a value of another type; `where` and the field's name begin the message.
    """
    for name, hint in hints_of(type(obj)).items():  # type: ignore[arg-type]
        object.__setattr__(obj, name, convert(hint, getattr(obj, name), where + name))


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, which are strings in its source."""
    return typing.get_type_hints(cls)


def convert(hint: Any, value: Any, where: str) -> Any:
    """Return a value converted to the type of a field; RecipeError, beginning with `where`, if this is impossible."""
    if type(value) is hint:
        if isinstance(value, Enum | bool | OperandFormat | BlockShape):
            return value
        if hint is int:
            return _integer(value, where)
        if hint is float:
            return _finite(value, where)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else convert(options[0], value, where)
    if isinstance(hint, type) and issubclass(hint, OperandFormat):
        known_formats = hint.by_name()
        if isinstance(value, hint):
            return value
        if not isinstance(value, str) or value not in known_formats:
            raise RecipeError(f"{where} = {shown(value)} is not one of {', '.join(known_formats)}")
        return known_formats[value]
    if hint is BlockShape:
        try:
            return BlockShape(value)
        except RecipeError as err:
            raise RecipeError(f"{where}: {err}") from None
    if is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where}: expected a table, got {shown(value)}")
        return build(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value if isinstance(value, str) else None)
        except RecipeError as err:
            raise RecipeError(f"{where}: {err}") from None
        except ValueError:
            raise RecipeError(
                f"{where} = {shown(value)} is not one of {', '.join(m.value for m in hint)}"
            ) from None
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where}: expected a list, got {shown(value)}")
        item = typing.get_args(hint)[0]
        return tuple(convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return _integer(int(value), where)
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _finite(value, where)
    if type(value) is not hint:
        raise RecipeError(f"{where}: expected {hint.__name__}, got {shown(value)} ({type(value).__name__})")
    if hint is str:
        _require_text(value, where)
    return value


def _integer(value: int, where: str) -> int:
    if value.bit_length() > _INTEGER_BITS:
        raise RecipeError(f"{where} = {shown(value)} has more than {_INTEGER_BITS} bits")
    return value


def _finite(value: Any, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise RecipeError(f"{where} = {shown(value)} is beyond the range of a float64") from None
    if not math.isfinite(number):
        raise RecipeError(f"{where} = {number} is not a finite number")
    return number


def _require_text(value: str, where: str) -> None:
    """Raise RecipeError if the text is not valid Unicode or contains a null character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{where} = {shown(value)} is not valid Unicode") from None
    if "\0" in value:
        raise RecipeError(f"{where} = {shown(value)} holds a null character")


OMITTED = {"omitted": True}
"""Metadata of a field that `to_table` leaves out at its default: a newer key keeps the digests of older files."""

_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_table(obj: Any) -> Any:
    """Return a dataclass as plain TOML tables and values.

    Left out are fields that are None, and those that are `OMITTED` and have their default.
    """
    if type(obj) in _PLAIN:  # most are, and the questions below take longer
        return obj
    if isinstance(obj, OperandFormat):
        return obj.name
    if isinstance(obj, BlockShape):
        return str(obj)
    if is_dataclass(obj):
        items = ((f, getattr(obj, f.name)) for f in fields(obj))
        return {
            f.name: to_table(value)
            for f, value in items
            if value is not None and not (f.metadata == OMITTED and value == f.default)
        }
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, tuple | list):
        return [to_table(v) for v in obj]
    return obj


def dumps(obj: Any) -> str:
    """Return a dataclass, or a mapping of plain values, as TOML text."""
    import tomli_w

    return tomli_w.dumps(to_table(obj) if is_dataclass(obj) else obj)
