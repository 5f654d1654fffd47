"""The built site: the search finds what users type, every link leads somewhere, and the sidebar is no wall.

`make docs` runs these tests on what it has built; MXREF_BUILT_DOCS is the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

FOLDER = os.environ.get("MXREF_BUILT_DOCS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make docs builds the site and runs these tests")
HTML = Path(FOLDER or ".").resolve()

MOST = 9
"""Entries of a group of the sidebar; the specification has its chapters, and the peers are one page each."""
LONG_GROUPS = {"spec/", "reference/peers/"}
LEADS = {
    "FSDP": "how-to/distributed",
    "FSDP2": "how-to/distributed",
    "multi-node": "how-to/distributed",
    "DeepSpeed": "reference/words",
    "huggingface": "how-to/transformers",
    "transformers": "how-to/transformers",
    "torchtitan": "how-to/torchtitan",
    "tensorboard": "how-to/telemetry",
    "wandb": "how-to/telemetry",
    "NVFP4": "reference/words",
    "nvfp4_style": "reference/recipes",
    "torchao": "reference/peers/torchao",
    "vLLM": "how-to/export",
    "Quark": "how-to/export",
    "gguf": "reference/peers/ggml",
    "loss spike": "reference/training",
    "resume": "tutorials/training",
    "checkpoint": "reference/durability",
    "CUDA graph": "reference/api-torch",
    "torch.compile": "how-to/torch-layer",
    "gradient accumulation": "how-to/torch-layer",
    "activation checkpointing": "reference/presets",
    "out of memory": "how-to/distributed",
    "Blackwell": "reference/words",
    "MI300": "reference/words",
    "MI355X": "how-to/mi355x",
    "H200": "explanation/performance_gpu",
    "AVX2": "explanation/performance",
    "stochastic rounding": "spec/rounding",
    "Hadamard": "spec/hadamard",
    "reproducibility": "reference/training",
    "LoRA": "reference/words",
    "--gpus-per-run": "how-to/ablation",
    "quantize": "reference/api",
    "check_quantizer": "reference/api",
    "run.capture": "reference/presets",
}
"""What a reader types, and a page that must be among the first results."""


@pytest.fixture(scope="module")
def search() -> Callable[[str], list[str]]:
    """The search of the site itself: its script and its index, without the page around them."""
    racer = pytest.importorskip("py_mini_racer").MiniRacer()
    shim = Path(__file__).with_name("search.js").read_text(encoding="utf-8")
    scripts = ("_static/searchtools.js", "_static/language_data.js", "searchindex.js")
    for text in (shim, *((HTML / name).read_text(encoding="utf-8") for name in scripts)):
        racer.eval(text)

    def found(query: str) -> list[str]:
        pages: list[str] = json.loads(racer.eval(f"JSON.stringify(found({json.dumps(query)}))"))
        return list(dict.fromkeys(pages))

    return found


@pytest.mark.parametrize(("query", "page"), LEADS.items())
def test_the_search_leads_to_the_page(search: Callable[[str], list[str]], query: str, page: str) -> None:
    assert page in search(query)[:4], search(query)[:8]


def test_nonsense_finds_nothing(search: Callable[[str], list[str]]) -> None:
    assert search("zzyzx") == []


class Page(HTMLParser):
    """The identifiers, the links and the sidebar's groups of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if (
                name in ("href", "src")
                and value
                and not (tag == "link" and "canonical" in dict(attrs).values())
            ):
                self.links.append(value)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in HTML.rglob("*.html")}


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 50
    broken = set()
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|#$|//", link):
                continue
            place, _, anchor = unquote(link).partition("#")
            target = (path.parent / place.partition("?")[0]).resolve() if place.partition("?")[0] else path
            if not target.exists() or (
                anchor
                and target in pages
                and "explorer" not in target.parts
                and anchor not in pages[target].ids
            ):
                broken.add(f"{path.relative_to(HTML)}: {link}")
    assert sorted(broken) == []


def test_links_are_relative(pages: dict[Path, Page]) -> None:
    """The site can be put into any folder."""
    assert [
        f"{path}: {link}" for path, page in pages.items() for link in page.links if link.startswith("/")
    ] == []


def test_no_words_before_a_colon_are_taken_for_a_type() -> None:
    """`Globs: these layers stay` became the text `these layers stay` with the type `Globs`."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in HTML.glob("reference/*.html")}
    assert [name for name, page in pages.items() if re.search(">(Type|Return type)<", page)] == []


def test_the_groups_of_the_sidebar_are_short(pages: dict[Path, Page]) -> None:
    text = (HTML / "index.html").read_text(encoding="utf-8")
    (tree,) = re.findall(r'<div class="sidebar-tree">(.*?)</div>', text, re.DOTALL)
    groups = Groups(tree).groups
    assert len(groups) > 8
    for group in groups:
        titles = [title for title, _ in group]
        assert max(map(len, titles)) <= 30, titles
        if not any(group[0][1].startswith(place) for place in LONG_GROUPS):
            assert len(group) <= MOST, titles


class Groups(HTMLParser):
    """The lists of a sidebar, each with the titles and links of its own entries."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.groups: list[list[tuple[str, str]]] = []
        self._open: list[list[tuple[str, str]]] = []
        self._link: str | None = None
        self._title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "ul":
            self._open.append([])
        elif tag == "a":
            self._link, self._title = dict(attrs).get("href") or "", ""

    def handle_data(self, data: str) -> None:
        if self._link is not None:
            self._title += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._link is not None:
            self._open[-1].append((self._title.strip(), self._link))
            self._link = None
        elif tag == "ul":
            self.groups.append(self._open.pop())
