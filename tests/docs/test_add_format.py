"""The page "Add a format, add a scale rule", followed word for word in a copy of the package.

Its format is one that the package has, so its edits are undone; its rule is an example, so its edits are made.
"""

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


def code_blocks(language: str, option: str, text: str = PAGE) -> list[tuple[str, str]]:
    """Return the value of an option and the code of each block of a language, in the order of the text."""
    pattern = rf"^( *)\.\. code-block:: {language}\n\1   :{option}: (.+)\n\n((?:\1   .*\n|\n)+)"
    return [
        (value, re.sub(rf"^{indent}   ", "", code, flags=re.MULTILINE).rstrip() + "\n")
        for indent, value, code in re.findall(pattern, text, re.MULTILINE)
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


def edits(title: str) -> list[tuple[str, str]]:
    """Return the file and the diff of each edit of a section of the page."""
    section = PAGE[PAGE.index(f"\n{title}\n---") :]
    following = re.search(r"\n\n[^\n]+\n-{5,}\n", section[1:])
    return code_blocks("diff", "caption", section[: following.start() + 1] if following else section)


def edit(tree: Path, title: str, *, undo: bool = False) -> None:
    for name, diff in edits(title):
        path, sides = tree / name, (side(diff, " -"), side(diff, " +"))
        before, after = sides[::-1] if undo else sides
        text = path.read_text(encoding="utf-8")
        assert text.count("\n" + before) == 1, f"{name} does not have these lines once:\n{before}"
        path.write_text(text.replace("\n" + before, "\n" + after), encoding="utf-8")


def test_the_page_has_edits_and_checks_and_nothing_that_looks_like_one_is_skipped():
    assert len(code_blocks("diff", "caption")) == PAGE.count("code-block:: diff")
    assert (len(edits("Add a format")), len(edits("Add a scale rule"))) == (6, 5)
    assert len(edits("Add a format")) + len(edits("Add a scale rule")) == PAGE.count("code-block:: diff")
    assert len(code_blocks("python", "name")) == PAGE.count("code-block:: python") >= 3


def test_after_the_edits_of_the_page_its_checks_pass(tree):
    ((_, command),) = code_blocks("console", "name")
    written = tree / "spec" / "vectors" / "mxfp4_e1m2.json"
    shipped = written.read_bytes()
    written.unlink()
    made = run_make(tree, command.removeprefix("$ "))
    assert made.returncode == 0, made.stderr
    assert written.read_bytes() == shipped
    edit(tree, "Add a scale rule")
    made = run_make(tree, command.removeprefix("$ "))
    assert made.returncode == 0, made.stderr
    vectors = json.loads(written.read_text())
    jsonschema.validate(vectors, json.loads((tree / "spec" / "vectors" / "schema.json").read_text()))
    assert any(record.get("rule") == "halfway" for record in vectors["records"])
    # Each check is a program of its own, and all run in one new process.
    done = run_code(tree, "".join(f"exec({code!r}, {{}})\n" for _, code in code_blocks("python", "name")))
    assert done.returncode == 0, done.stderr


def test_the_block_formats_that_the_page_names_need_no_edit_but_that_of_their_table(tree):
    made = re.findall(r'`(BlockFormat\("(\w+)", [^`]+\))`', PAGE)
    assert [name for _, name in made] == ["mxfp4_k16", "fp4_ue5m3"]
    path = tree / "mxref" / "formats" / "blocks.py"
    text = path.read_text().replace("scales import E8M0, UE4M3,", "scales import E8M0, UE4M3, UE5M3,")
    rows = "".join(f"{name.upper()} = {code}\n" for code, name in made)
    text, found = re.subn(
        r"\n(BLOCK_FORMATS: [^(]*\([^)]*)\)",
        lambda match: f"{rows}\n{match[1]}, {', '.join(name.upper() for _, name in made)})",
        text,
    )
    assert found == 1
    path.write_text(text)
    schema = json.loads((tree / "spec" / "vectors" / "schema.json").read_text())
    for _, name in made:
        done = run_make(tree, f"make vectors FORMAT={name}")
        assert done.returncode == 0, done.stderr
        vectors = json.loads((tree / "spec" / "vectors" / f"{name}.json").read_text())
        jsonschema.validate(vectors, schema)
        about = ("id", "note", "clauses", "source")
        asked = [{key: each[key] for key in each if key not in about} for each in vectors["records"]]
        assert len({json.dumps(each) for each in asked}) == len(asked) > 100
    names = [name for _, name in made]
    check = f"""
    from mxref.conformance import check
    report = check(mxref.get_backend("reference"), level="quick", formats={names})
    assert report.ok and report.total("passed") > 1000, report.failing
    """
    done = run_code(tree, textwrap.dedent(check))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", [name for name, _ in code_blocks("python", "name")])
def test_without_the_edits_each_check_fails(tree, check):
    edit(tree, "Add a format", undo=True)
    for path in (tree / "mxref" / "__init__.py", tree / "mxref" / "formats" / "__init__.py"):  # exports
        path.write_text(re.sub(r' *"?(?:MXFP4_)?E1M2"?,\n', "", path.read_text()))
    done = run_code(tree, dict(code_blocks("python", "name"))[check])
    assert done.returncode == 1
    assert re.search(r"mxfp4_e1m2|halfway", done.stderr)
