"""The switch between versions, in a real browser and from the file system."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from explorer.browser import LOADED, Tab, executable, opened
from places import ROOT

pytestmark = pytest.mark.skipif(
    not executable(), reason="needs a browser, which MXREF_BROWSER names: make test-pages"
)

PAGE = """<!doctype html><html lang="en" data-content_root="{root}"><head><meta charset="utf-8"><title>x</title>
<script defer src="{root}_static/version-switch.js"></script></head>
<body><div class="sidebar-scroll"></div></body></html>
"""
SHOWN = "[...document.querySelectorAll('.version-switch option')].map((o) => [o.text, o.selected])"
READY = f"{LOADED} && window.mxrefVersions !== undefined"


def version(site: Path, name: str, *pages: str) -> None:
    folder = site / name
    for page in ("index.html", *pages):
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(PAGE.format(root="../" * page.count("/") or "./"))
    (folder / "_static").mkdir()
    shutil.copy(ROOT / "docs" / "_static" / "version-switch.js", folder / "_static")
    (folder / "objects.inv").touch()


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return import_module("versions")


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    (tmp_path / "browser").mkdir()
    with opened(tmp_path / "browser") as page:
        yield page


def choose(tab: Tab, folder: str, then: str) -> str:
    """Choose a version in the switch, wait until a page is shown, and return its address."""
    tab.run(f"""(() => {{ const s = document.querySelector('.version-switch select');
        s.value = '{folder}'; s.dispatchEvent(new Event('change')); }})()""")
    return arrived(tab, then)


def arrived(tab: Tab, then: str) -> str:
    """Wait until a page is shown whose address ends so, and return the address."""
    for _ in range(2000):
        with contextlib.suppress(RuntimeError):  # a page that is being left
            if tab.run(f"location.href.endsWith('{then}') && {READY}"):
                break
    return str(tab.run("location.href"))


def test_the_switch_leads_to_the_same_page_of_another_version_or_to_its_first(
    versions: ModuleType, tab: Tab, tmp_path: Path
) -> None:
    site = tmp_path / "a site"
    version(site, "main", "spec/scale.html", "spec/new.html")
    version(site, "0.1.0", "spec/scale.html")
    versions.write_list(site)
    tab.show(f"{(site / 'main/spec/scale.html').as_uri()}?x=1#part", ready=READY)
    assert tab.run(SHOWN) == [["main", True], ["0.1.0", False]]
    assert choose(tab, "0.1.0", "scale.html") == (site / "0.1.0/spec/scale.html").as_uri()
    assert tab.run(SHOWN) == [["main", False], ["0.1.0", True]]
    tab.show((site / "main/spec/new.html").as_uri(), ready=READY)
    assert choose(tab, "0.1.0", "index.html") == (site / "0.1.0/index.html").as_uri()
    assert tab.errors == []


def test_one_version_has_no_switch(versions: ModuleType, tab: Tab, tmp_path: Path) -> None:
    version(tmp_path / "site", "main")
    versions.write_list(tmp_path / "site")
    tab.show((tmp_path / "site" / "main" / "index.html").as_uri(), ready=READY)
    assert tab.run(SHOWN) == []
    assert tab.errors == []


def test_without_a_list_there_is_no_switch_and_the_page_works(tab: Tab, tmp_path: Path) -> None:
    version(tmp_path / "site", "main")
    tab.show((tmp_path / "site" / "main" / "index.html").as_uri(), ready=LOADED)
    assert tab.run(SHOWN) == []
    assert "ERR_FILE_NOT_FOUND" in "".join(tab.errors)


def test_the_first_page_of_the_site_leads_to_a_version(
    versions: ModuleType, tab: Tab, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    version(site, "main")
    versions.write_list(site)
    with contextlib.suppress(RuntimeError):
        tab.show((site / "index.html").as_uri(), ready=LOADED)
    assert arrived(tab, "main/index.html") == (site / "main" / "index.html").as_uri()
