"""The files of the explorer page: all are loaded, none comes from a network, and every clause that they name exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import chain

import pytest
from click.testing import CliRunner

from clause_index import load_clauses
from explorer.page_backend import PAGE, Engine
from mxref import DIALECTS
from mxref.cli import main
from mxref.errors import FileFormatError
from mxref.explain import link
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from places import ROOT

INDEX = (PAGE / "index.html").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}
CHOICES = {"scale.rule": ScaleRule, "rounding": Rounding, "dialect": DIALECTS}
"""The beginnings of clauses that the scripts complete with a choice."""


def test_the_page_loads_each_of_its_files_once():
    loaded = re.findall(r'(?:src|href)="([\w.-]+\.(?:js|css))"', INDEX)
    assert sorted(loaded) == sorted(path.name for path in PAGE.iterdir() if path.name != "index.html")


def test_every_script_is_well_formed():
    engine = Engine()
    for name, text in SCRIPTS.items():
        assert engine.call("((text) => typeof new Function(text))", text) == "function", name
    with pytest.raises(Exception, match="SyntaxError"):
        engine.call("((text) => typeof new Function(text))", "let a = ;")


def test_nothing_comes_from_a_network():
    for name, text in {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}.items():
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


def test_an_installed_package_has_the_page():
    with (ROOT / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "docs/explorer" in wheel["only-include"]
    assert wheel["sources"]["docs/explorer"] == "mxref/_explorer"


def test_without_a_page_the_error_names_the_way_out(tmp_path, monkeypatch):
    package = tmp_path / "mxref" / "explain"
    package.mkdir(parents=True)
    monkeypatch.setattr(link, "__file__", str(package / "link.py"))
    with pytest.raises(FileFormatError, match="--explorer https://"):
        link.explorer_page()
    (tmp_path / "mxref" / "_explorer").mkdir()
    (tmp_path / "mxref" / "_explorer" / "index.html").touch()
    assert link.explorer_page() == (tmp_path / "mxref" / "_explorer" / "index.html").as_uri()


DOCUMENT = (ROOT / "docs" / "reference" / "explorer.rst").read_text(encoding="utf-8")


def test_the_documentation_lists_every_key_of_the_address():
    (keys,) = re.findall(r"const KEYS = \[([^\]]*)\]", SCRIPTS["link.js"])
    documented = re.findall(r"^   \* - (`.*`)$", DOCUMENT, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(documented)) == re.findall(r'"(\w+)"', keys)


def test_the_documented_command_prints_the_address_that_is_shown():
    command, address = re.search(r"\$ mxref (explain .* --explorer .*)\n +(https://.*)\n", DOCUMENT).groups()
    assert CliRunner().invoke(main, shlex.split(command)).stdout == f"{address}\n"
