"""The pages work wherever they are copied to, and know the versions beside them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from places import ROOT


@pytest.fixture
def published(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return import_module("published")


@pytest.fixture
def versions(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return import_module("versions")


def page(folder: Path, name: str, body: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"<html><head></head><body>{body}</body></html>")
    return file


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("a/b.html", False), ("a/b.html#part", False), ("a/b.html?x=1#part", False), ("#part", False), ("", False),
        ("a%20b.html", False), ("https://example.org/x", False), ("mailto:x", False), ("data:image/png,x", False),
        ("/a/b.html", True), ("/", True), ("file:///a/b.html", True), ("FILE:a/b.html", True), ("../out.html", True),
        ("a/", True), ("a", True), ("absent.html", True), ("//example.org/x", True), ("C:/x.html", True),
    ],
)  # fmt: skip
def test_a_link_is_relative_and_leads_to_a_file(link, wrong, published, tmp_path):
    site = tmp_path / "site"
    page(site, "a/b.html", '<a href="../index.html">up</a>')
    page(site, "a b.html", "")
    page(tmp_path, "out.html", "")
    for tag in ('<a class="x" href="{}">', '<img alt="x > y" src="{}">', '<script defer="defer"\nsrc="{}">'):
        page(site, "index.html", tag.format(link))
        assert list(published.wrong_links(site)) == ([f"index.html: {link}"] if wrong else [])


def test_code_that_is_shown_is_no_link(published, tmp_path):
    page(
        tmp_path, "index.html", '<pre>&lt;a href="/x"&gt; and href="/y"</pre><link rel="canonical" href="/z">'
    )
    assert list(published.wrong_links(tmp_path)) == []


def test_the_list_of_versions_begins_with_branches_and_the_newest_release(versions, tmp_path):
    for name in ("main", "0.9.0", "0.10.0", "0.10.0rc1", "next"):
        page(tmp_path, f"{name}/index.html", "")
        page(tmp_path, f"{name}/spec/scale.html", "")
        page(tmp_path, f"{name}/_modules/x.html", "")
        (tmp_path / name / "objects.inv").touch()
    (tmp_path / "no-version").mkdir()
    names = versions.write_list(tmp_path)
    assert names[:2] == ["main", "next"]
    assert names.index("0.10.0") < names.index("0.9.0")
    table = json.loads((tmp_path / "versions.json").read_text())
    assert [v["folder"] for v in table["versions"]] == names
    assert table["versions"][0]["pages"] == ["index.html", "spec/scale.html"]
    script = (tmp_path / "versions.js").read_text()
    assert json.loads(re.fullmatch(r"window\.mxrefVersions = (.*);\n", script)[1]) == table
    assert "url=0.10.0" in (tmp_path / "index.html").read_text()


def test_a_release_comes_before_its_candidates(versions, tmp_path):
    for name in ("1.0.0", "1.0.0rc1", "0.9"):
        page(tmp_path, f"{name}/index.html", "")
        (tmp_path / name / "objects.inv").touch()
    assert versions.write_list(tmp_path) == ["1.0.0", "1.0.0rc1", "0.9"]


@pytest.mark.parametrize(
    ("ref", "folder"), [("main", "main"), ("v0.1.0", "0.1.0"), ("a/b", "a-b"), ("vnext", "vnext")]
)
def test_the_folder_of_a_version(ref, folder, versions):
    assert versions.folder_of(ref) == folder


CONF = """
extensions = ["published"]
html_theme = "basic"
html_static_path = [{static!r}]
"""


def test_a_wrong_link_fails_the_build(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text(CONF.format(static=str(ROOT / "docs" / "_static")))
    (source / "index.rst").write_text("Title\n=====\n\n.. raw:: html\n\n   <a href='/x'>x</a>\n")
    monkeypatch.setenv("MXREF_DOCS_VERSION", "main")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "docs" / "_ext"))
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "-b", "html", source, tmp_path / "site"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "index.html: /x\n" in done.stderr
    assert 'src="_static/version-switch.js' in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize("version", ["", "main"])
def test_pages_have_the_switch_where_they_stand_beside_others(version, published, monkeypatch):
    added = []

    class App:
        config = SimpleNamespace(html_baseurl="https://example.org/mxref")

        def connect(self, *args, **options):
            pass

        def add_js_file(self, name, **options):
            added.append(name)

        add_css_file = add_js_file

    monkeypatch.setenv("MXREF_DOCS_VERSION", version)
    published.setup(App())
    assert added == (["version-switch.js", "version-switch.css"] if version else [])
    assert all((ROOT / "docs" / "_static" / name).is_file() for name in added)


@pytest.mark.parametrize("address", ["example.org", "/mxref/", "file:///site/", "https://", "https:// /"])
def test_an_address_that_is_none_is_refused(address, published):
    with pytest.raises(Exception, match="MXREF_DOCS_URL = .* is no address of a site") as caught:
        published.setup(SimpleNamespace(config=SimpleNamespace(html_baseurl=address)))
    assert type(caught.value).__name__ == "ExtensionError"


def test_a_version_that_git_does_not_know_is_refused(versions, tmp_path, monkeypatch, capsys):
    assert versions.is_commit("HEAD")
    monkeypatch.setattr(sys, "argv", ["versions.py", str(tmp_path), "no-such-branch"])
    with pytest.raises(SystemExit):
        versions.main()
    assert "no-such-branch is no branch or tag" in capsys.readouterr().err


def test_the_sitemap_lists_the_pages_below_the_address(tmp_path, monkeypatch):
    pytest.importorskip("sphinx_sitemap")
    text = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    (given,) = re.findall(r"^html_baseurl = os.*\nif html_baseurl:\n(?:    .*\n)+", text, re.MULTILINE)
    (tmp_path / "conf.py").write_text(f'import os\nextensions = []\nhtml_theme = "basic"\n{given}')
    (tmp_path / "index.rst").write_text("Title\n=====\n")
    monkeypatch.setenv("MXREF_DOCS_URL", "https://example.org/mxref")
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "-b",
        "html",
        tmp_path,
        tmp_path / "site",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall("<loc>(.*?)</loc>", (tmp_path / "site" / "sitemap.xml").read_text())
    assert "https://example.org/mxref/index.html" in found
    assert all(address.startswith("https://example.org/mxref/") for address in found)
