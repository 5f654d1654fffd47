"""Sphinx extension: how the API pages show names that are imported from a package but defined in a module of it.

- A public name is documented once, under the name by which users import it. References to the module that defines it
  lead there, so that a clause may name its code.
- An enumeration is a table of its members.
- What an attribute's docstring says before a colon is not its type.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from rst_text import attribute_docs, list_table
from sphinx import addnodes
from sphinx.application import Sphinx

PAGES = ("reference/api.rst", "reference/api-torch.rst")
PRIVATE_PAGE = "reference/modules"
"""The page that leaves out what the others document."""
_DOCUMENTED = re.compile(r"^\.\. auto(?:function|class|exception):: ([\w.]+)$", re.MULTILINE)


@cache
def public_names() -> dict[str, str]:
    """Return the documented name of each class and function of the API pages by the name of its definition."""
    found: dict[str, str] = {}
    for page in PAGES:
        for name in _DOCUMENTED.findall((Path(__file__).parents[1] / page).read_text(encoding="utf-8")):
            package, _, last = name.rpartition(".")
            thing = getattr(import_module(package), last)
            found[f"{thing.__module__}.{thing.__qualname__}"] = name
    return found


def document_members(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Append the table of its members to the docstring of an enumeration."""
    if what == "class" and isinstance(obj, type) and issubclass(obj, Enum):
        docs = attribute_docs(obj)
        rows = [[f"`{m.name}`", f"`{m.value}`", docs.get(m.name, "")] for m in obj]
        columns, widths = ["member", "value", "meaning"], [22, 22, 56]
        if not any(row[2] for row in rows):
            rows, columns, widths = [row[:2] for row in rows], columns[:2], [50, 50]
        lines += ["", *list_table(columns, rows, widths)]


def keep_colon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Break an attribute's first line at its colon: Napoleon would take what stands before it for a type."""
    if what in ("attribute", "data", "property") and lines:
        head, colon, rest = lines[0].partition(": ")
        if colon:
            lines[:1] = [f"{head}:", rest]


def signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, None] | None:
    """Return the fields of a dataclass, whose types and defaults stand below it, and nothing for an enumeration."""
    if what != "class" or not isinstance(obj, type):
        return None
    if issubclass(obj, Enum):
        return "", None
    if not is_dataclass(obj):
        return None
    shown = [
        f"{f.name}{'' if f.default is f.default_factory is MISSING else '=...'}"
        for f in fields(obj)
        if f.init
    ]
    return f"({', '.join(shown)})", None


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out members of enumerations, and on the page of modules everything that is public."""
    if isinstance(obj, Enum):
        return True
    definition = f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}"
    if app.env.docname == PRIVATE_PAGE and definition in public_names():
        return True
    return None


def resolve(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Return the link of a reference to a public name by the module that defines it."""
    if node.get("refdomain") != "py":
        return None
    head, _, last = node["reftarget"].rpartition(".")
    for definition, rest in ((node["reftarget"], ""), (head, f".{last}")):
        if definition in public_names():
            target = public_names()[definition] + rest
            return env.domains["py"].resolve_xref(
                env, node["refdoc"], app.builder, "obj", target, node, content
            )
    return None


def add_targets(app: Sphinx, doctree: nodes.document) -> None:
    """Let links by the defining module, or by a package above it, arrive too: pages of sources link in these ways."""
    definitions = {name: definition for definition, name in public_names().items()}
    taken = set(doctree.ids)
    for signature in doctree.findall(addnodes.desc_signature):
        if not signature.get("module"):
            continue
        first, _, rest = signature["fullname"].partition(".")
        name = f"{signature['module']}.{first}"
        module, _, last = definitions.get(name, name).rpartition(".")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            other = ".".join([*parts[:end], last, *filter(None, [rest])])
            if other not in taken:
                taken.add(other)
                signature["ids"].append(other)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the handlers."""
    app.connect(
        "autodoc-process-docstring", keep_colon, priority=400
    )  # before Napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", document_members)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    app.connect("doctree-read", add_targets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
