"""Every page of the built documentation, and every kind of report, in a real browser: wide and narrow, light and dark.

`make test-pages` builds the documentation and runs these tests; contact sheets are in runs/pages.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.browser import LOADED, Tab, executable, opened
from pages import links, reports, sheets
from places import ROOT, TESTS

pytestmark = pytest.mark.skipif(
    "MXREF_PAGES" not in os.environ,
    reason="needs a browser, and built pages, whose folder MXREF_PAGES names: make test-pages",
)

SITE = Path(os.environ.get("MXREF_PAGES", ".")).resolve()
PAGES = sorted(SITE.rglob("*.html")) if "MXREF_PAGES" in os.environ else []
SHEETS = ROOT / "runs" / "pages"
WIDTHS = {1400: (350, 6, 2), 390: (195, 10, 3)}
"""Widths of the window, and how its sheets are laid out: width of a picture, pictures across and down."""
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
CONTRAST = (TESTS / "explorer" / "contrast.js").read_text(encoding="utf-8")
CONTENTS = """(() => {
  const parts = document.querySelectorAll("article h2, article h3, article .clause").length;
  const list = document.querySelector(".toc-tree");
  return parts <= 2 || document.querySelector(".genindex-section") !== null || (list?.checkVisibility() ?? false);
})()"""
"""Whether the list of a page's sections and clauses is shown if it has more than two."""

Shots = dict[tuple[int, bool], list[tuple[str, Path]]]


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shots]:
    """Collects the screenshots, from which contact sheets are made at the end."""
    found: Shots = defaultdict(list)
    yield found
    SHEETS.mkdir(parents=True, exist_ok=True)
    for (width, dark), taken in found.items():
        sheets.write(taken, SHEETS, f"{width}-{'dark' if dark else 'light'}", *WIDTHS[width])


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert executable(), f"MXREF_BROWSER = {os.environ.get('MXREF_BROWSER')} is not installed"
    with opened(tmp_path_factory.mktemp("browser")) as page:
        yield page


def looked_at(tab: Tab, page: Path, name: str, shots: Shots, folder: Path) -> list[str]:
    """Return what is wrong with a page in any width and colour scheme."""
    wrong = []
    for width in WIDTHS:
        tab.errors.clear()
        tab.show(page.as_uri(), width, ready=LOADED)
        for dark in (False, True):
            tab.colours(dark)
            where = f"{width}, {'dark' if dark else 'light'}"
            if "_modules" not in page.parts:
                path = folder / f"{width}-{dark}.png"
                tab.screenshot(path, sheets.TALL * width)
                shots[width, dark].append((name, path))
            wrong += [f"{where}: {what}" for what in (*tab.run(LOOK), *tab.run(CONTRAST), *tab.errors)]
        if width > 1000 and not tab.run(CONTENTS):
            wrong.append("the sections of the page are not listed beside it")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(SITE).as_posix())
def test_a_page_fits_and_is_readable(tab: Tab, page: Path, shots: Shots, tmp_path: Path) -> None:
    name = page.relative_to(SITE).as_posix()
    assert looked_at(tab, page, name, shots, tmp_path) == []
    assert links.broken(page) == []


@pytest.mark.parametrize("kind", reports.KINDS)
def test_a_report_fits_and_is_readable(tab: Tab, kind: str, shots: Shots, tmp_path: Path) -> None:
    page = reports.KINDS[kind](tmp_path)
    assert looked_at(tab, page, f"report: {kind}", shots, tmp_path) == []


def test_drawings_follow_the_switch_of_the_theme(tab: Tab) -> None:
    tab.show((SITE / "explanation" / "performance.html").as_uri(), ready=LOADED)
    tab.colours(False)
    colours = [
        tab.run(
            f"document.body.dataset.theme = '{theme}';"
            "getComputedStyle(document.querySelector('.chart.wide text')).fill"
        )
        for theme in ("light", "dark", "auto")
    ]
    assert colours[0] == colours[2] != colours[1]


def test_the_explorer_is_there_within_a_second(tab: Tab) -> None:
    tab.requests.clear()
    times = []
    for _ in range(5):  # the fastest: other work of the machine delays any single one
        tab.show((SITE / "explorer" / "index.html").as_uri())
        times.append(tab.run("performance.getEntriesByName('ready')[0].startTime"))
    assert min(times) < 1000, times
    assert {address.partition(":")[0] for address in tab.requests} <= {"file", "data", "about"}
