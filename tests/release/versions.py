"""The versions of mxref and of its specification, which several files state."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from release.errors import ReleaseError

_HEADING = re.compile(r"^## \[?(?P<version>[^\]\s]+)\]?(?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def stated(checkout: Path) -> dict[str, str]:
    """Return the version that each file states; CHANGELOG.md only once it has the heading of a release.

    Raises:
        ReleaseError: a file states none.
    """
    found = {
        "pyproject.toml": tomllib.loads(_text(checkout, "pyproject.toml"))["project"]["version"],
        "mxref/_version.py": _matched(checkout, "mxref/_version.py", r'^__version__ = "(.+)"$'),
        "CITATION.cff": _matched(checkout, "CITATION.cff", r'^version: "?([^"\n]+)"?$'),
    }
    released = [version for version, _ in _headings(checkout) if version != "Unreleased"]
    return found | ({"CHANGELOG.md": released[0]} if released else {})


def specification(checkout: Path) -> dict[str, str]:
    """Return the version of the specification that each file states; of spec/released.lock only once there is one.

    Raises:
        ReleaseError: a file states none.
    """
    found = {
        "mxref/_version.py": _matched(checkout, "mxref/_version.py", r'^SPECIFICATION = "(.+)"$'),
        "the reference in CITATION.cff": _matched(checkout, "CITATION.cff", r'^    version: "?([^"\n]+)"?$'),
    }
    if (checkout / "spec/released.lock").exists():
        found["spec/released.lock"] = _matched(checkout, "spec/released.lock", r'^version = "(.+)"$')
    return found


def require_one(versions: dict[str, str]) -> str:
    """Return the version that all state; ReleaseError if two differ."""
    if len(set(versions.values())) != 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise ReleaseError(f"the versions differ: {listed}")
    return next(iter(versions.values()))


def unreleased(checkout: Path) -> bool:
    """Return whether the topmost section of CHANGELOG.md is that of changes without a release."""
    return _headings(checkout)[:1] == [("Unreleased", "")]


def require_released(checkout: Path, version: str) -> None:
    """Raise ReleaseError unless the changelog begins with the dated section of a version, and all files state it."""
    top = _headings(checkout)[:1]
    if not top or top[0][0] != version or not top[0][1]:
        raise ReleaseError(f"CHANGELOG.md must begin with the section '## {version} - YYYY-MM-DD'")
    stands = require_one(stated(checkout))
    if stands != version:
        raise ReleaseError(f"the files state version {stands}, not {version}")
    stated_specification = specification(checkout)
    require_one(stated_specification)
    if "spec/released.lock" not in stated_specification or _clauses(checkout, "released") != _clauses(
        checkout, "clauses"
    ):
        raise ReleaseError("spec/released.lock does not hold the clauses of this release: run `make freeze`")


def _clauses(checkout: Path, name: str) -> dict[str, str]:
    clauses: dict[str, str] = tomllib.loads(_text(checkout, f"spec/{name}.lock"))["clauses"]
    return clauses


def _headings(checkout: Path) -> list[tuple[str, str]]:
    return [(m["version"], m["date"] or "") for m in _HEADING.finditer(_text(checkout, "CHANGELOG.md"))]


def _matched(checkout: Path, name: str, pattern: str) -> str:
    found = re.search(pattern, _text(checkout, name), re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{name} states no version")
    return found[1].strip()


def _text(checkout: Path, name: str) -> str:
    return (checkout / name).read_text(encoding="utf-8")
