"""The files of the explorer page: all are loaded, none comes from a network, and every clause that they name exists."""

from __future__ import annotations

import re
import shlex
from itertools import chain

import pytest
from click.testing import CliRunner
from hatchling.builders.wheel import WheelBuilder

from clause_index import load_clauses
from explorer.page_backend import Engine
from mxref import DIALECTS
from mxref.cli import main
from mxref.errors import FileFormatError
from mxref.explain.link import EXPLORER, explorer_page
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from places import ROOT

INDEX = (EXPLORER / "index.html").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in EXPLORER.glob("*.js")}
CHOICES = {"scale.rule": ScaleRule, "rounding": Rounding, "dialect": DIALECTS}
"""The beginnings of clauses that the scripts complete with a choice."""


def test_the_page_loads_each_of_its_files_once():
    loaded = re.findall(r'(?:src|href)="([\w.-]+\.(?:js|css))"', INDEX)
    assert sorted(loaded) == sorted(path.name for path in EXPLORER.iterdir() if path.name != "index.html")


def test_every_script_is_well_formed():
    engine = Engine()
    for name, text in SCRIPTS.items():
        assert engine.call("((text) => typeof new Function(text))", text) == "function", name
    with pytest.raises(Exception, match="SyntaxError"):
        engine.call("((text) => typeof new Function(text))", "let a = ;")


def test_nothing_comes_from_a_network():
    for name, text in {path.name: path.read_text(encoding="utf-8") for path in EXPLORER.iterdir()}.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        assert not re.search(
            r"\bfetch\(|XMLHttpRequest|\bimport\s*\(|@import|url\((?!#)", text.replace("`url(#", "")
        )


def test_every_clause_that_the_page_names_exists():
    known = load_clauses().read_chapters().clauses
    text = "".join(SCRIPTS.values())
    prefixes = "|".join({clause.split(".")[0] for clause in known})
    named = set(re.findall(rf'"((?:{prefixes})\.[a-z0-9_.]+)"', text))
    assert len(named) >= 25
    begun = set(re.findall(r"`([a-z.]+)\.\$\{", text)) & set(CHOICES)
    assert begun == set(CHOICES)
    named |= set(chain.from_iterable((f"{begin}.{each}" for each in CHOICES[begin]) for begin in begun))
    assert named <= set(known)


def test_the_chapters_of_clauses_are_found():
    text = SCRIPTS["ui.js"]
    other = dict(re.findall(r'(\w+): "(\w+)"', re.search(r"CHAPTERS = \{([^}]*)\}", text)[1]))
    for clause in load_clauses().read_chapters().clauses.values():
        prefix = clause.id.split(".")[0]
        assert other.get(prefix, prefix) == clause.chapter


BROWSER = """
var location = { pathname: "%s" };
var document = { createElement: (tag) => ({ tag, setAttribute(name, value) { this[name] = value; }, append() {} }) };
"""
"""What `ui.js` asks of a browser to make the link of a clause, at an address."""


@pytest.mark.parametrize(
    ("folder", "link"),
    [
        ("/checkout/docs/_build/html/explorer", {"tag": "a", "href": "../spec/quantize.html#dequantize.nan"}),
        ("/checkout/mxref/explain/explorer", {"tag": "span"}),
        ("/lib/site-packages/mxref/explain/explorer", {"tag": "span"}),
    ],
)
def test_a_clause_is_a_link_where_the_documentation_is_beside_the_page(folder, link):
    engine = Engine(BROWSER % f"{folder}/index.html", SCRIPTS["ui.js"])
    made = engine.call("((id) => ui.clause(id))", "dequantize.nan")
    assert {key: made[key] for key in ("tag", "href") if key in made} == link


def test_an_installed_package_has_the_page():
    held = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"mxref/explain/explorer/{path.name}" for path in EXPLORER.iterdir()} <= held


def test_without_a_page_the_error_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("mxref.explain.link.EXPLORER", tmp_path)
    with pytest.raises(FileFormatError, match="--explorer https://"):
        explorer_page()
    (tmp_path / "index.html").touch()
    assert explorer_page() == (tmp_path / "index.html").as_uri()


DOCUMENT = (ROOT / "docs" / "reference" / "explorer.rst").read_text(encoding="utf-8")


def test_the_documentation_lists_every_key_of_the_address():
    (keys,) = re.findall(r"const KEYS = \[([^\]]*)\]", SCRIPTS["link.js"])
    documented = re.findall(r"^   \* - (`.*`)$", DOCUMENT, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(documented)) == re.findall(r'"(\w+)"', keys)


def test_the_documented_command_prints_the_address_that_is_shown():
    command, address = re.search(r"\$ mxref (explain .* --explorer .*)\n +(https://.*)\n", DOCUMENT).groups()
    assert CliRunner().invoke(main, shlex.split(command)).stdout == f"{address}\n"
