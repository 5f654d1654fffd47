"""Sphinx extension: the clauses of a page stand in its list "On this page", below the section that they are in."""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def list_clauses(app: Sphinx, doctree: nodes.document) -> None:
    """Add the clauses of a page that was read to its contents."""
    page = app.env.docname
    places: dict[str, nodes.list_item] = {
        entry["anchorname"]: entry.parent.parent for entry in app.env.tocs[page].findall(nodes.reference)
    }
    for box in doctree.findall(nodes.container):
        if "clause" not in box["classes"]:
            continue
        section = box.parent
        while not isinstance(section, nodes.section):
            section = section.parent
        # The title of a page has no anchor: a link to it is a link to the page.
        place = places.get(f"#{section['ids'][0]}") or places[""]
        below = next((part for part in place if isinstance(part, nodes.bullet_list)), None)
        if below is None:
            place += (below := nodes.bullet_list())
        number, title = (part.astext() for part in box[0][:2])
        link = nodes.reference(
            "", f"{number} {title}", internal=True, refuri=page, anchorname=f"#{box['ids'][0]}"
        )
        below += nodes.list_item("", addnodes.compact_paragraph("", "", link))


def setup(app: Sphinx) -> dict[str, bool]:
    """Add them once Sphinx has collected the sections."""
    app.connect("doctree-read", list_clauses, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
