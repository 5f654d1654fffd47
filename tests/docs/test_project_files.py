"""CONTRIBUTING, SECURITY and CITATION say what is so."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from places import ROOT

REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {
    "type",
    "abstract",
    "version",
    "license",
    "keywords",
    "date-released",
    "doi",
    "repository-code",
    "url",
    "references",
}
PICKLED = {"backends/mxref_numba/kernel_cache.py"}
"""The only file that reads pickles; SECURITY.md says from where."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_a_citation_file():
    """Keys and values as the schema of the Citation File Format 1.2.0 has them."""
    table = yaml.safe_load(text("CITATION.cff"))
    assert set(table) >= REQUIRED
    assert set(table) <= ALLOWED
    assert (table["cff-version"], table["type"], table["license"]) == ("1.2.0", "software", "Apache-2.0")
    assert all(set(author) == {"name"} and isinstance(author["name"], str) for author in table["authors"])
    (specification,) = table["references"]
    assert set(specification) == {"type", "title", "authors", "version"}
    assert specification["type"] == "standard"
    assert len(set(table["keywords"])) == len(table["keywords"]) > 0
    assert all(isinstance(table[key], str) for key in ("message", "title", "abstract", "version"))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_paths_exist(name):
    page = text(name)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page)
    paths = re.findall(r"`((?:mxref|backends|training|tests|docs|spec)/(?!_build)[\w./-]*)`", page)
    assert len(links) + len(paths) >= (20 if name == "CONTRIBUTING.md" else 0)
    assert [path for path in links + paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_make_targets_exist(name):
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text(name), re.MULTILINE))
    assert (name == "CONTRIBUTING.md") == bool(named)
    assert named <= set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))


def test_no_address_is_invented():
    for name in ("SECURITY.md", "CONTRIBUTING.md", "CITATION.cff"):
        assert not re.search(r"[\w.+-]+@[\w-]+\.\w", text(name)), name
        assert "http" not in text(name).replace("URL=https://...", ""), name


def test_each_step_of_ci_is_a_target_and_the_wheel_is_one():
    steps = re.findall(r"^make (.+)$", text(".ci/run"), re.MULTILINE)
    targets = [target for step in steps for target in step.split()]
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert {"lint", "docs", "test", "release"} <= set(targets)


def test_make_quick_names_tests_that_exist():
    """A file that is not there ends it with an error of pytest's."""
    shown = subprocess.run(["make", "-n", "quick"], cwd=ROOT, capture_output=True, check=True, text=True)
    named = [word.partition("::")[0] for word in shown.stdout.split() if word.startswith("tests/")]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def sources() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "mxref", "backends", "training"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in done.stdout.splitlines() if name.endswith(".py")]


def careless(tree: ast.AST) -> list[str]:
    """Return the calls and imports of a module by which a file could run code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                name for name in names if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill")
            ]
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {key.arg: ast.unparse(key.value) for key in node.keywords}
            safe = {"np.load": ("allow_pickle", "False"), "torch.load": ("weights_only", "True")}.get(called)
            if (safe and given.get(safe[0]) != safe[1]) or called in ("eval", "exec"):
                found.append(ast.unparse(node))
    return found


def test_no_file_of_others_is_unpickled():
    reads = ("pickle", "marshal", "shelve", "dill", "load(", "eval(", "exec(")
    for path in sources():
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in reads):
            expected = str(path.relative_to(ROOT)) in PICKLED
            assert bool(careless(ast.parse(source))) is expected, (path, careless(ast.parse(source)))


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import pickle", 1), ("from marshal import loads", 1), ("np.load(f)", 1), ("np.load(f, allow_pickle=True)", 1),
        ("torch.load(f, weights_only=False)", 1), ("eval(x)", 1), ("np.load(f, allow_pickle=False)", 0),
        ("torch.load(f, weights_only=True)", 0), ("model.eval()", 0), ("json.load(f)", 0),
    ],
)  # fmt: skip
def test_what_could_run_code_is_found(code, count):
    assert len(careless(ast.parse(code))) == count
