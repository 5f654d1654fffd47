"""Completion of the values of the training commands in the shell; nothing is imported but the standard library."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from click import Context, Parameter
from click.shell_completion import CompletionItem

from mxref.cli.known import one_of_or_file, several_of

_PACKAGE = Path(__file__).parents[1]
_RESULTS = ("run.json", "results.json", "probe.json")
"""Each folder of a run, a ladder or a probe has one of these files."""
_DEPTH = 2


def shipped(folder: str) -> list[str]:
    """Return the names of the package's `presets`, `recipes` or `ladders`, sorted."""
    return sorted(file.stem for file in (_PACKAGE / folder).glob("*.toml"))


def _arms(ctx: Context) -> Iterator[str]:
    """Yield the arms of the ladder that the command names; none if its file cannot be read."""
    # After an option without its value, click does not parse the arguments.
    ladder = next(iter([*filter(None, [ctx.params.get("ladder")]), *ctx.args]), "")
    file = Path(ladder) if ladder.endswith(".toml") else _PACKAGE / "ladders" / f"{ladder}.toml"
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for arm in table.get("arm", []):
        if isinstance(arm, dict) and isinstance(arm.get("name"), str):
            yield arm["name"]


def runs(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the folders of runs, ladders and probes that begin so; if there is none, the shell completes folders."""
    given = Path(incomplete)
    inside = not incomplete or incomplete.endswith("/")
    parent, start = (given, "") if inside else (given.parent, given.name)
    found = [CompletionItem(str(folder)) for folder in _runs(parent, start, _DEPTH)]
    return found or [CompletionItem(incomplete, type="dir")]


def _runs(parent: Path, start: str, depth: int) -> Iterator[Path]:
    """Yield the folders with results in the folders of a parent whose names begin so, and in these."""
    for folder in sorted(parent.glob(f"{escape(start)}*/")):
        if folder.name.startswith(".") and not start:
            continue
        if any((folder / name).is_file() for name in _RESULTS):
            yield folder
        elif depth > 1:
            yield from _runs(folder, "", depth - 1)


presets = one_of_or_file(lambda: shipped("presets"), ".toml")
ladders = one_of_or_file(lambda: shipped("ladders"), ".toml")
arms = several_of(_arms)
texts = one_of_or_file(lambda: ("builtin", "c4"), ".jsonl")
