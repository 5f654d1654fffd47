"""Sphinx extension: the search leads from a word of the page `reference/words` to the pages that its entry links.

The word becomes a main entry of the index on each of these pages, so that the search puts them first.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PAGE = Path(__file__).parents[1] / "reference" / "words.rst"
_ENTRY = re.compile(r"((?:^   (?! )\S.*\n)+)((?:      .*\n)+)", re.MULTILINE)
_LINK = re.compile(r":doc:`/([\w/-]+)`")


@cache
def words_of_pages() -> dict[str, list[str]]:
    """Return the words that lead to each page."""
    found: dict[str, list[str]] = {}
    _, _, wanted = PAGE.read_text(encoding="utf-8").partition("Words that you may look for")
    for terms, definition in _ENTRY.findall(wanted):
        for page in dict.fromkeys(_LINK.findall(definition)):
            found.setdefault(page, []).extend(term.strip() for term in terms.splitlines())
    return found


class SearchWords(SphinxTransform):
    """Adds the index entries of a page."""

    default_priority = 400  # before the index collects the entries

    def apply(self) -> None:
        self.env.note_dependency(str(PAGE))
        entries = [("single", word, "", "main", None) for word in words_of_pages().get(self.env.docname, [])]
        if entries:
            self.document.insert(0, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_transform(SearchWords)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
