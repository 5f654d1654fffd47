"""The identity of a backend's code, so that different code under the same name is noticed."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mxref
import mxref_torch
from mxref.backend import Backend

_CORE = "mxref"
# Packages of this project that only show, check or compare results. Their code changes no result.
READERS = frozenset({"cli", "conformance", "explain", "lab", "probe", "pytest_plugin", "report", "vectors"})


def backend_identity(backend: Backend) -> dict[str, Any]:
    """Return name and code digest of a backend.

    The code is every file of the packages in which its class and the base classes are defined. A backend that is one
    file counts with the files beside it that it imports, directly or through others.
    """
    return {"name": backend.name, "code": digest(_all_files(_packages(type(backend))))}


def digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return 12 hex digits of the SHA-256 over names and contents."""
    found = hashlib.sha256()
    for name, path in files:
        data = path.read_bytes()
        found.update(f"{name}\0{len(data)}\0".encode() + data)
    return found.hexdigest()[:12]


def code_digest() -> str:
    """Return 12 hex digits of the SHA-256 over the sources of this project that a run's result depends on."""
    packages = Path(mxref.__file__).parent, Path(mxref_torch.__file__).parent, Path(__file__).parent
    return digest(pair for package in packages for pair in own_sources(package))


def own_sources(package: Path) -> list[tuple[str, Path]]:
    """Return the sources of one of this project's packages, without those in `READERS`."""
    start = len(package.parts)
    found = (
        Path(folder, name).parts
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py")
    )
    return [
        ("/".join(parts[start:]), Path(*parts))
        for parts in sorted(found)
        if parts[start].removesuffix(".py") not in READERS
    ]


def _packages(kind: type[Backend]) -> list[ModuleType]:
    """Return the top-level modules of a backend's classes; mxref itself only for its own backends."""
    names = dict.fromkeys(_top(cls.__module__) for cls in kind.__mro__ if issubclass(cls, Backend))
    own = [name for name in names if name != _CORE] or [_CORE]
    return [sys.modules[name] for name in own if name in sys.modules] or [sys.modules[_CORE]]


def _top(module: str) -> str:
    """Return the outermost package with an `__init__`. A namespace package is skipped: other projects may share it."""
    words = module.split(".")
    for count in range(1, len(words)):
        name = ".".join(words[:count])
        if getattr(sys.modules.get(name), "__file__", None):
            return name
    return module


def _all_files(tops: Iterable[ModuleType]) -> Iterator[tuple[str, Path]]:
    for top in tops:
        if not getattr(top, "__file__", None):
            continue  # typed into an interpreter: there is no code to read
        file = Path(str(top.__file__))
        if top.__name__ == _CORE:
            yield from own_sources(Path(mxref.__file__).parent)
        elif hasattr(top, "__path__"):
            for path in sorted(file.parent.rglob("*")):
                name = path.relative_to(file.parent)
                if path.is_file() and "__pycache__" not in name.parts and path.suffix != ".pyc":
                    yield f"{top.__name__}/{name.as_posix()}", path
        else:
            for path in sorted(_with_siblings(file.resolve())):
                yield path.relative_to(file.resolve().parent).as_posix(), path


def _with_siblings(file: Path) -> set[Path]:
    """Return a file and the modules of its folder that it imports, directly or through others."""
    found, waiting = {file}, [file]
    while waiting:
        for name in _imports(waiting.pop()):
            package = file.parent / name
            module = package.with_suffix(".py")
            new = {module} if module.is_file() else {*package.rglob("*.py")} if package.is_dir() else set()
            waiting += new - found
            found |= new
    return found


def _imports(file: Path) -> set[str]:
    """Return the first words of what a file imports, wherever in the file."""
    found: set[str] = set()
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError:
        return found  # it cannot be imported either
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found
