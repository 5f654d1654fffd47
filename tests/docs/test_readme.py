"""The README: its example prints what is written, its table is what was measured, and its links lead somewhere."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

import older_cpu
from bench.records import newest, read
from peers.front import table
from places import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEMPLATES = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def targets(text: str) -> list[str]:
    """Return the targets of all links and images of a Markdown text."""
    tokens = itertools.chain.from_iterable(
        token.children or [token] for token in MarkdownIt("commonmark").enable("table").parse(text)
    )
    return [
        str(t.attrs.get("href") or t.attrs.get("src")) for t in tokens if t.type in ("link_open", "image")
    ]


def anchors(path: str) -> set[str]:
    """Return the anchors of a page: the headings of Markdown as code hosts name them, or explicit ones."""
    text = (ROOT / path).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$|^(.+)\n[=~-]+$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", a or b).strip().lower().replace(" ", "-") for a, b in headings}


def broken(links: list[str]) -> list[str]:
    """Return the links whose file or anchor does not exist."""
    found = []
    for link in links:
        path, _, anchor = unquote(link).partition("#")
        whole = path or "README.md"
        if not (ROOT / whole).exists() or (anchor and anchor not in anchors(whole)):
            found.append(link)
    return found


@pytest.mark.parametrize("settings", [{}, older_cpu.environment()], ids=["this CPU", "older CPU"])
def test_the_example_prints_what_is_written(settings):
    """Its numbers are portable: what mxref computes is exact or rounded in one stated order, and the inputs of
    NumPy's own product are multiples of 1/8 below 5, of which float32 holds every partial sum.
    """
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (printed,) = re.findall(r"prints\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_table_shows_what_was_measured_and_what_mxref_gives():
    """Where this fails after `make peers`, paste the table that it prints."""
    record = read(newest("peers"))
    assert table(record) in TEXT, table(record)
    last = re.findall(r"`(\w\w):", table(record).splitlines()[-1])
    assert len(set(last[:4])) == 4
    shares = [
        share for pair, share in record["normal"]["bytes"].items() if "ceil" not in pair.replace("rceil", "")
    ]
    assert len(shares) == 3
    assert f"in {min(shares):.0%} to {max(shares):.0%} of the" in TEXT.replace(" %", "%").replace("\n", " ")


def test_the_first_screen_has_the_problem_the_commands_one_figure_and_three_doors():
    screen, rule, rest = TEXT.partition("\n---\n")
    assert rule
    assert rest.count("![") == 0
    assert screen.count("![") == 1
    assert len(re.findall(r"^make \w+", screen, re.MULTILINE)) == 2
    assert len(re.findall(r"^- \*\*", screen, re.MULTILINE)) == 3
    assert len(screen.splitlines()) <= 60


def test_links_exist():
    links = [link for link in targets(TEXT) if not link.startswith("https://")]
    assert len(links) > 20
    assert broken(links) == []
    assert broken(["docs/nowhere.rst", "#nowhere", "CHANGELOG.md#nowhere", "#two-commands"]) == [
        "docs/nowhere.rst", "#nowhere", "CHANGELOG.md#nowhere"
    ]  # fmt: skip


# ---- as a package index shows it ----


@pytest.fixture(scope="module")
def long_description():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return import_module("hatch_build").long_description


def test_an_index_gets_no_relative_link(long_description):
    repository = "https://host.example/owner/mxref/"
    text = long_description(TEXT, "1.2", repository, **TEMPLATES)
    relative = [link for link in targets(TEXT) if "://" not in link]
    made = [link for link in targets(text) if link.startswith(repository)]
    assert len(made) == len(relative)
    assert [link for link in targets(text) if "://" not in link] == []
    assert [link.partition("v1.2/")[2] for link in made] == relative
    assert f"]({repository}raw/v1.2/docs/_static/formats.svg)" in text


def test_without_a_public_repository_an_index_gets_the_words_of_the_links(long_description):
    text = long_description("[a *b*](c/d.rst) ![e](f.svg) [g](https://h) [i](#j)", "1", None, **TEMPLATES)
    assert text == "a *b*  [g](https://h) [i](#j)"
    assert [
        link for link in targets(long_description(TEXT, "1", None, **TEMPLATES)) if "://" not in link
    ] == []


def test_the_metadata_of_a_build_has_this_text(long_description):
    core = import_module("hatchling.metadata.core")
    plugins = import_module("hatchling.plugin.manager").PluginManager()
    metadata = core.ProjectMetadata(str(ROOT), plugins)
    repository = PROJECT["project"].get("urls", {}).get("Repository")
    assert metadata.core.readme == long_description(TEXT, metadata.version, repository, **TEMPLATES)
    assert metadata.core.readme_content_type == "text/markdown"
