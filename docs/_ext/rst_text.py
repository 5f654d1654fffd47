"""What the generated pages share: text that is parsed, tables, and the docstrings of attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class Text(SphinxDirective):
    """A directive whose result is reStructuredText, sections included."""

    def lines(self) -> Iterable[str]:
        """Return the text."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(self.lines()), allow_section_headings=True)


def list_table(head: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return a table as lines; empty without rows."""
    cells = [list(row) for row in rows]
    if not cells:
        return []
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {' '.join(map(str, widths))}", ""]
    for row in [list(head), *cells]:
        lines += [f"   {'* -' if i == 0 else '  -'} {cell}".rstrip() for i, cell in enumerate(row)]
    return [*lines, ""]


def attribute_docs(table: type) -> dict[str, str]:
    """Return the docstrings beside the attributes of a class and of its bases, each as one line."""
    found: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if kind.__module__.startswith("mxref"):
            docs = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
            found |= {
                name: " ".join(" ".join(text).split())
                for (owner, name), text in docs.items()
                if owner == kind.__name__
            }
    return found
