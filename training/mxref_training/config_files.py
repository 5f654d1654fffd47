"""Training configurations from TOML: presets, files, and single keys as `--set section.key=value` gives them.

Every table goes through `mxref.tomlio`, so an unknown key names the nearest valid one, as in a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

from mxref.errors import RecipeError
from mxref.tomlio import (
    MAX_DEPTH,
    build,
    convert,
    hints_of,
    merge,
    nearest,
    parse_toml,
    read_toml,
    shown,
    suggestion,
    to_table,
)
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError
from mxref_training.huggingface.config_json import completed, require_same_shape

PRESETS = Path(__file__).parent / "presets"
RECIPES = Path(__file__).parent / "recipes"


def config_from_table(table: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Return the configuration of a TOML table; ConfigError names the table and the key."""
    try:
        return build(TrainConfig, table, where)
    except RecipeError as err:
        raise ConfigError(str(err)) from err


def recorded_config(table: Mapping[str, Any], where: str) -> TrainConfig:
    """Return the configuration that a run or a result recorded, without the keys of `data` that no longer exist.

    Neither of these keys has decided a number.
    """
    data = {key: value for key, value in table["data"].items() if key not in ("max_line_mib", "workers")}
    return config_from_table({**table, "data": data}, where)


def load_config(source: str | Path, overrides: Sequence[str | Mapping[str, Any]] = ()) -> TrainConfig:
    """Return a training configuration.

    Args:
        source: a TOML file, or the name of a preset.
        overrides: laid over it in order: `section.key=value`, whose value is TOML, or a string where it does
            not parse as TOML; or a nested table.

    Raises:
        ConfigError: an unknown preset, key or value; FileFormatError: a file that cannot be read.
        HuggingFaceError: the folder that `run.init_from` names holds no such model.
    """
    path = _find(source, PRESETS, "preset")
    table = read_toml(path)
    for override in overrides:
        table = merge(table, parse_override(override, TrainConfig) if isinstance(override, str) else override)
    config = config_from_table(completed(table), path.name)
    if config.run.init_from is not None:
        require_same_shape(to_table(config.model), Path(config.run.init_from))
    return config


def names(folder: Path) -> list[str]:
    """Return the names of the presets or recipes in a folder of the package, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def _find(source: str | Path, folder: Path, kind: str) -> Path:
    path = Path(source)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    if str(source) not in (known := names(folder)):
        hint = nearest(str(source), known)
        raise ConfigError(f"unknown {kind} {shown(str(source))}{hint}; a file's name must end in .toml")
    return folder / f"{source}.toml"


def parse_override(text: str, into: type) -> dict[str, Any]:
    """Return `section.key=value` as a nested table.

    Args:
        text: the key, `=` and the value, which is TOML, or a string where it does not parse as TOML.
        into: the configuration's dataclass.

    Raises:
        ConfigError: another form, an unknown key, or a value of another type than the key's; the message quotes the
            text and offers the nearest key.
    """
    said = f"--set {shown(text)}"
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not 2 <= len(parts) <= MAX_DEPTH or not all(parts):
        near = _elsewhere(into, parts[-1]) or ", as in run.steps=100"
        raise ConfigError(f"{said} is not of the form section.key=value{near}")
    parsed: Any = value.strip()
    with suppress(ValueError):
        found = parse_toml(f"value = {value}")
        parsed = found["value"] if len(found) == 1 else parsed  # a line break would begin another key
    for part in reversed(parts):
        parsed = {part: parsed}
    table: dict[str, Any] = parsed
    require_known(table, into, said)
    return table


def require_known(table: Mapping[str, Any], into: type, where: str) -> None:
    """Raise ConfigError, which begins with `where`, unless a table has keys and types of a configuration's dataclass.

    What values go together is not checked: other tables may be laid over this one.
    """
    try:
        _require_known(into, into, table, "")
    except (ConfigError, RecipeError) as err:
        raise ConfigError(f"{where}: {err}") from err


def _require_known(whole: type, cls: type, table: Mapping[str, Any], where: str) -> None:
    hints = hints_of(cls)
    for key, value in table.items():
        if key not in hints:
            what = f"unknown key {shown(key)} in [{where}]" if where else f"unknown section {shown(key)}"
            near = suggestion(key, hints) or _elsewhere(whole, key) or nearest(key, hints)
            raise ConfigError(what + near)
        inner, name = _dataclass(hints[key]), f"{where}.{key}".lstrip(".")
        if inner is not None and isinstance(value, Mapping):
            _require_known(whole, inner, value, name)
        else:
            convert(hints[key], value, name)


def _dataclass(hint: Any) -> type | None:
    """Return the dataclass that a field holds, also where it may be None."""
    return next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)  # type: ignore[return-value]


def _elsewhere(whole: type, key: str) -> str:
    """Return ` (did you mean 'run.steps'?)` for a key that a section has; empty if none has it."""
    found = [name for name in _keys(whole) if name.rpartition(".")[2] == key]
    return f" (did you mean {found[0]!r}?)" if found else ""


def _keys(cls: type, where: str = "") -> Iterator[str]:
    for name, hint in hints_of(cls).items():
        inner = _dataclass(hint)
        if inner is None:
            yield f"{where}{name}"
        else:
            yield from _keys(inner, f"{where}{name}.")
