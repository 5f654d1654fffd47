"""The page "Add a format, add a scale rule", followed word for word in a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-a-format.rst").read_text(encoding="utf-8")


def code_blocks(language: str, option: str) -> list[tuple[str, str]]:
    """Return the value of an option and the code of each block of a language, in the order of the page."""
    pattern = rf"^( *)\.\. code-block:: {language}\n\1   :{option}: (.+)\n\n((?:\1   .*\n|\n)+)"
    return [
        (value, re.sub(rf"^{indent}   ", "", code, flags=re.MULTILINE).rstrip() + "\n")
        for indent, value, code in re.findall(pattern, PAGE, re.MULTILINE)
    ]


def side(diff: str, signs: str) -> str:
    """Return the lines of a diff that begin with one of two signs: the text before or after the edit."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in signs)


@pytest.fixture
def tree(tmp_path):
    """A copy of the package, of the oracle, and of the golden vectors with their generator, placed as in a checkout."""
    for folder in ("mxref", "tests/oracle", "tests/golden", "spec/vectors"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/differential.py", "tests/places.py", "Makefile"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(tree: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as in a fresh shell in the copy: no backend, and no settings of the `make` that runs the tests."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MXREF_BACKEND", "MAKEFLAGS")}
    return subprocess.run(
        words, cwd=tree, capture_output=True, text=True, timeout=200,
        env=environment | {
            "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "tests"))),
            "PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1",
        },
    )  # fmt: skip


def run_code(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    where = "import mxref, pathlib\nassert pathlib.Path(mxref.__file__).parents[1] == pathlib.Path.cwd()\n"
    return run(tree, [sys.executable, "-c", where + textwrap.dedent(code)])


def run_make(tree: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a target of the Makefile in the environment of the tests."""
    return run(tree, [*shlex.split(command), "STAMP=", f"BIN={Path(sys.executable).parent}"])


def make_edits(tree: Path) -> None:
    for name, diff in code_blocks("diff", "caption"):
        path = tree / name
        before, after = side(diff, " -"), side(diff, " +")
        text = path.read_text(encoding="utf-8")
        assert text.count("\n" + before) == 1, f"{name} does not have these lines once:\n{before}"
        path.write_text(text.replace("\n" + before, "\n" + after), encoding="utf-8")


def test_the_page_has_edits_and_checks_and_nothing_that_looks_like_one_is_skipped():
    assert len(code_blocks("diff", "caption")) == PAGE.count("code-block:: diff") == 12
    assert len(code_blocks("python", "name")) == PAGE.count("code-block:: python") >= 3


def test_after_the_edits_of_the_page_its_checks_pass(tree):
    make_edits(tree)
    ((_, command),) = code_blocks("console", "name")
    made = run_make(tree, command.removeprefix("$ "))
    assert made.returncode == 0, made.stderr
    vectors = json.loads((tree / "spec" / "vectors" / "mxfp4_e3m0.json").read_text())
    jsonschema.validate(vectors, json.loads((tree / "spec" / "vectors" / "schema.json").read_text()))
    assert any(record.get("rule") == "nearest" for record in vectors["records"])
    # Each check is a program of its own, and all run in one new process.
    done = run_code(tree, "".join(f"exec({code!r}, {{}})\n" for _, code in code_blocks("python", "name")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", [name for name, _ in code_blocks("python", "name")])
def test_without_the_edits_each_check_fails(tree, check):
    done = run_code(tree, dict(code_blocks("python", "name"))[check])
    assert done.returncode == 1
    assert re.search(r"mxfp4_e3m0|nearest", done.stderr)
