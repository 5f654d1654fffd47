"""Completion of values in the shell: the names that an option or argument takes, without loading what they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path

from click import Context, Parameter
from click.shell_completion import CompletionItem

from mxref.dialects import DIALECTS
from mxref.discovery import ENTRY_POINT_GROUP
from mxref.recipe_files import shipped_recipes
from mxref.steps.scale import ScaleRule

Completer = Callable[[Context, Parameter, str], list[CompletionItem[str]]]
"""Returns the values that begin as the word before the cursor does; click calls it."""


def one_of(names: Callable[[], Iterable[str]]) -> Completer:
    """Return a completer of names."""

    def complete(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return _beginning(names(), incomplete)

    return complete


def one_of_or_file(names: Callable[[], Iterable[str]], suffix: str = "") -> Completer:
    """Return a completer of names and of the current folder's files with a suffix; without any, of paths."""

    def complete(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem[str]]:
        files = sorted(file.name for file in Path().glob(f"*{suffix}") if file.is_file()) if suffix else []
        return _beginning([*names(), *files], incomplete) or [CompletionItem(incomplete, type="file")]

    return complete


def several_of(names: Callable[[Context], Iterable[str]]) -> Completer:
    """Return a completer of the last name of a comma-separated list, without the names that stand before it."""

    def complete(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem[str]]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [
            CompletionItem(f"{before}{comma}{name}")
            for name in names(ctx)
            if name.startswith(last) and name not in given
        ]

    return complete


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _backends() -> list[str]:
    """Return the names of the backends, none of which is loaded."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def _clauses() -> Iterable[str]:
    from mxref.conformance import CLAUSES

    return CLAUSES


def _layouts(ctx: Context) -> Iterable[str]:
    from mxref.layouts.conventions import CONVENTIONS, OWN
    from mxref.layouts.foreign import LAYOUTS

    return OWN, *CONVENTIONS, *LAYOUTS


backends = one_of_or_file(_backends, ".py")
dialects = one_of(lambda: DIALECTS)
scale_rules = one_of(lambda: ScaleRule)
recipes = one_of(shipped_recipes)
recipes_or_files = one_of_or_file(shipped_recipes, ".toml")
clauses = one_of(_clauses)
layouts = several_of(_layouts)
files = one_of_or_file(tuple)
