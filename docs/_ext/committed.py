"""Tables of measurements that stand in the pages themselves, so that a code host shows them as Sphinx does.

A page has a pair of comments around each table, and `make tables` writes what stands between them. A table is a part
of a study whose name ends in `.inc`. The pages of docs/reference/peers are made as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from measured import STUDIES, TABLE

DOCS = Path(__file__).resolve().parents[1]
OPENING = re.compile(r"^\.\. begin ([\w.]+), made by `make tables`\n", re.M)
"""The comment before a table. The comment after it is `.. end of NAME`."""


class RegionError(Exception):
    """A page has a table that no study has, or one that it does not close."""


def tables() -> dict[str, str]:
    """Return the tables of every study by their names."""
    parts = [import_module(study).parts() for study in STUDIES]
    return {name: text for study in parts for name, text in study.items() if name.endswith(TABLE)}


def filled(page: str, found: Mapping[str, str]) -> str:
    """Return a page with the tables that it opens; RegionError if one is not found or not closed."""
    pieces: list[str] = []
    rest = page
    while opening := OPENING.search(rest):
        name = opening[1]
        closing = f".. end of {name}\n"
        if name not in found:
            raise RegionError(f"a page has the table {name}, which no study has: {', '.join(found)}")
        if closing not in rest[opening.end() :]:
            raise RegionError(f"a page opens the table {name} and does not close it: {closing.strip()}")
        pieces += [rest[: opening.end()], "\n", found[name].rstrip("\n"), "\n\n", closing]
        rest = rest[opening.end() :].partition(closing)[2]
    return "".join(pieces) + rest


def names(page: str) -> list[str]:
    """Return the names of the tables of a page."""
    return OPENING.findall(page)


def pages() -> Iterator[Path]:
    """Yield the pages that have tables."""
    for path in sorted(DOCS.rglob("*.rst")):
        if "_build" not in path.parts and OPENING.search(path.read_text(encoding="utf-8")):
            yield path


def current() -> dict[Path, str]:
    """Return what each page with a table, and each page that is made as a whole, has to hold now."""
    from peers import pages as peers

    found = tables()
    whole = {peers.FOLDER / name: text for name, text in peers.pages().items()}
    return {path: filled(path.read_text(encoding="utf-8"), found) for path in pages()} | whole


def main() -> None:
    """Write the pages whose tables changed, and name them."""
    for path, text in current().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
