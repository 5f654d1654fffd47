"""The links of built pages: files and places inside the site that do not exist."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.places.add(value or "")
            elif name in ("href", "src") and value:
                self.targets.add(value)


@cache
def _links(page: Path) -> _Links:
    return _Links(page.read_text(encoding="utf-8"))


def broken(page: Path) -> list[str]:
    """Return the targets of a page's links and images inside the site that do not exist."""
    found = []
    for target in sorted(_links(page).targets):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        path = path / "index.html" if path.is_dir() else path
        place = unquote(parts.fragment)
        if not path.is_file() or (
            place and path.suffix == ".html" and "=" not in place and place not in _links(path).places
        ):
            found.append(target)
    return found
