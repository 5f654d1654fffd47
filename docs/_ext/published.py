"""What makes the built pages a site to publish: links that work from any folder, and a switch between versions.

    MXREF_DOCS_VERSION  the name of this version, where the pages are built into a folder beside those of others
    MXREF_DOCS_URL      the address under which the pages are published, for the sitemap and canonical links

`versions.py` builds several versions. The switch reads `versions.js` in the folder above, so it knows versions
that were built later, and needs no server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

VERSION, URL = "MXREF_DOCS_VERSION", "MXREF_DOCS_URL"
_TAG = re.compile(r"""<(?!link rel="canonical")[a-z](?:[^"'>]|"[^"]*"|'[^']*')*>""", re.IGNORECASE)
_LINK = re.compile(r"""\s(?:href|src)=(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_ELSEWHERE = re.compile(r"(?:https?|mailto|data|javascript):", re.IGNORECASE)
_SHOWN = 10


def wrong_links(folder: Path) -> Iterator[str]:
    """Yield `page: link` for each link of the pages in a folder that leads nowhere when the folder is moved.

    A link must be relative and lead to a file in the folder: the file system shows a list in place of a folder's page.
    """
    root = folder.resolve()
    known: dict[Path, bool] = {}
    for page in sorted(root.rglob("*.html")):
        for link in dict.fromkeys(_links(page.read_text(encoding="utf-8"))):
            target = unquote(re.split(r"[?#]", link, maxsplit=1)[0])
            if _ELSEWHERE.match(link) or not target:
                continue
            file = Path(os.path.normpath(page.parent / target))
            if file not in known:
                known[file] = file.is_relative_to(root) and file.is_file()
            if re.match(r"/|[\w-]+:", target) or not known[file]:
                yield f"{page.relative_to(root)}: {link}"


def _links(html: str) -> Iterator[str]:
    for tag in _TAG.findall(html):
        yield from (double or single for double, single in _LINK.findall(tag))


def check_links(app: Sphinx, error: Exception | None) -> None:
    """Fail the build if a link would not work where the pages are copied to."""
    if error or app.builder.format != "html":
        return
    wrong = list(wrong_links(Path(app.outdir)))
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ExtensionError(
            "links that are absolute or lead to no file:\n  " + "\n  ".join(wrong[:_SHOWN]) + more
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check, and the switch where there may be other versions; ExtensionError if the address is none."""
    address = app.config.html_baseurl
    if address and not re.match(r"https?://[^/\s]+/?", address):
        raise ExtensionError(f"{URL} = {address!r} is no address of a site, as in https://example.org/mxref/")
    app.connect("build-finished", check_links, priority=900)
    if os.environ.get(VERSION):
        app.add_js_file("version-switch.js", loading_method="defer")
        app.add_css_file("version-switch.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
