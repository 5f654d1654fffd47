"""Sphinx extension: the pages of source code, whose links lead to something that exists."""

from __future__ import annotations

import re
import sys
from typing import Any

from sphinx.application import Sphinx


def module_of_an_alias(app: Sphinx, modname: str, attribute: str) -> str | None:
    """Keep an alias of a built-in type in the module that names it: `builtins` has no source to show."""
    value = sys.modules.get(modname)
    for name in attribute.split("."):
        value = getattr(value, name, None)
    return modname if getattr(value, "__module__", None) == "builtins" else None


def mend_links(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the links from source to documentation name the module under which an object is indexed.

    Sphinx names the module of the first object that it met, which for names that `mxref` offers is the package.
    """
    if not pagename.startswith("_modules/"):
        return
    known = app.env.domains["py"].objects  # type: ignore[attr-defined]
    module = pagename.removeprefix("_modules/").replace("/", ".")

    def mended(block: re.Match[str]) -> str:
        begin, name, page, place, text = block.groups()
        entries = [known[found] for found in (place, f"{module}.{name}") if found in known]
        places = [entry.node_id for entry in entries if page.endswith(f"{entry.docname}.html")]
        return f'{begin}<a class="viewcode-back" href="{page}#{places[0]}">{text}</a>' if places else begin

    context["body"] = re.sub(
        r'(<div class="viewcode-block" id="([^"]+)">\s*)<a class="viewcode-back" href="([^"#]*)#([^"]+)">(.*?)</a>',
        mended,
        context["body"],
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Follow the events of `sphinx.ext.viewcode`."""
    app.connect("viewcode-follow-imported", module_of_an_alias)
    app.connect("html-page-context", mend_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
