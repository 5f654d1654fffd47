"""Docstrings of installed packages: their source files are parsed and never imported."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "python"
MAX_SOURCE = 2_000_000  # bytes; larger files are generated tables

_NOT_DOCUMENTATION = frozenset(
    [
        *("test", "tests", "testing", "_vendor", "_vendored", "vendored", "idlelib", "lib2to3", "turtledemo"),
        *("site-packages", "dist-packages", "__pycache__"),
    ]
)


@dataclass(frozen=True)
class Installed:
    """A distribution, or the standard library, with its source files relative to `root` in a fixed order."""

    name: str
    version: str
    root: Path
    files: tuple[str, ...]


def _is_documentation(path: str) -> bool:
    *folders, name = path.split("/")
    return (
        name.endswith(".py")
        and not name.startswith("test_")
        and _NOT_DOCUMENTATION.isdisjoint(folders)
        and ".." not in folders
    )


def find_sources(distributions: Sequence[str], pattern: str) -> tuple[list[Installed], tuple[str, ...]]:
    """Return the installed sources with their files in a fixed order, and the names of absent distributions."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(library).as_posix() for path in library.glob(pattern))
    files = tuple(name for name in names if _is_documentation(name))
    found, absent = [Installed(STANDARD_LIBRARY, platform.python_version(), library, files)], []
    for name in distributions:
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        files = tuple(sorted(p for p in map(str, dist.files or ()) if _is_documentation(p)))
        found.append(Installed(name, dist.version, Path(str(dist.locate_file(""))), files))
    return found, tuple(absent)


def _called_doc(node: ast.stmt) -> ast.expr | None:
    """Return the expression of a docstring that a call adds to an object, as in NumPy and PyTorch."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = ast.unparse(node.value.func)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
    else:
        return None
    return node.value if "doc" in name.lower() else None


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield every docstring of a parsed module in the order of the source."""
    body = getattr(tree, "body", None)
    if not isinstance(body, list):
        return
    if isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
        text := ast.get_docstring(tree, clean=False)
    ):
        yield text
    for node in body:
        if expression := _called_doc(node):
            for part in ast.walk(expression):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.value
        yield from docstrings(node)


def texts_of(path: Path) -> list[str] | None:
    """Return the docstrings of a source file; None if it cannot be read or parsed.

    Of `pydoc_data/topics.py`, the text behind `help()`, every topic is returned.
    """
    try:
        if path.stat().st_size > MAX_SOURCE:
            return []
        source = path.read_bytes()
        if b'"""' not in source and b"'''" not in source and path.name != "topics.py":
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about invalid escapes in these sources
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return list(docstrings(tree))
