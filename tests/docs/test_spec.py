"""The specification follows its rules, and each rule refuses a specification that breaks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from clause_index import EXTENSION, load_clauses

clauses = load_clauses()
ROOT = EXTENSION.parent.parent


@pytest.fixture(scope="module")
def spec():
    return clauses.load(ROOT)


def test_the_specification_is_in_order(spec):
    assert spec.problems == []
    assert len(spec.clauses) > 80
    assert len(spec.chapters) > 12


def test_docs_render_the_chapters_in_place():
    assert (ROOT / "docs" / "spec").resolve() == (ROOT / "spec").resolve()
    assert "spec/index" in (ROOT / "docs" / "index.rst").read_text(encoding="utf-8")


def test_every_module_of_the_reference_that_defines_bits_implements_clauses(spec):
    names = {link.file for links in spec.code.values() for link in links}
    modules = {
        *(
            "formats/elements",
            "formats/blocks",
            "formats/scales",
            "steps/scale",
            "steps/rounding",
            "steps/random",
            "steps/hadamard",
        ),
        *("quantization", "layouts/packed", "gemm", "linear", "recipe"),
    }
    assert {f"mxref/{module}.py" for module in modules} <= names


def test_the_conformance_suite_blames_clauses_that_exist():
    from mxref.conformance.clauses import CLAUSES

    assert set(CLAUSES) <= set(clauses.read_chapters(ROOT).clauses)


# ---- a small specification, and what breaks it ----

INDEX = """\
    Specification
    =============

    .. toctree::

       ticks
"""
CHAPTER = """\
    Ticks
    =====

    .. informative:: Why

       Not normative; see :clause:`tick.tock`.

    .. clause:: tick.tock
       :title: Tock

       A tick is followed by a tock,
       and no other.

    .. clause:: tick.never

       It never stops:

       .. code-block:: none

          tick
            tock
"""
CODE = '''\
    def tick():
        """Return the tock.

        Implements: tick.tock,
        tick.never
        """
'''
TESTS = """\
    import oracle
    import pytest

    def helper():
        return oracle.tock()

    @pytest.mark.clause("tick.tock")
    def test_tock():
        assert helper()

    @pytest.mark.clause("tick.never", evidence="known answer")
    def test_never():
        assert 1

    @pytest.mark.clause("tick.never")
    @pytest.mark.parametrize("a", [1])
    def test_never_again(a):
        assert a
"""


@pytest.fixture
def tree(tmp_path):
    files = {
        "spec/index.rst": INDEX,
        "spec/ticks.rst": CHAPTER,
        "mxref/clock.py": CODE,
        "mxref/__init__.py": "",
        "mxref/_version.py": 'SPECIFICATION = "1.2.3"\n',
        "CHANGELOG.md": "",
        "tests/test_clock.py": TESTS,
        "tests/oracle/__init__.py": "from oracle.clock import tock",
        "tests/oracle/clock.py": "def tock(): ...",
        "spec/vectors/ticks.json": '{"records": [{"id": "a", "clauses": ["tick.tock"], "source": "oracle"}, \n'
        '{"id": "b", "clauses": ["tick.never"], "source": "mxref"}]}',
        "docs/index.rst": "See :clause:`tick.tock`.\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    clauses.relock(tmp_path)
    return tmp_path


def edit(tree: Path, name: str, old: str, new: str) -> list[str]:
    """Replace text in a file of the tree and return the problems of the tree."""
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1))
    return clauses.load(tree).problems


def test_a_sound_tree_has_no_problems_and_all_its_links(tree):
    spec = clauses.load(tree)
    assert spec.problems == []
    assert {c.id: (c.number, c.title) for c in spec.clauses.values()} == {
        "tick.tock": ("1.1", "Tock"),
        "tick.never": ("1.2", ""),
    }
    assert [link.name for link in spec.code["tick.never"]] == ["mxref.clock.tick"]
    assert [test.name for test in spec.tests["tick.never"]] == ["test_never", "test_never_again"]
    assert spec.evidence("tick.tock") == ["oracle", "vector"]
    assert spec.evidence("tick.never") == ["known answer"]


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("spec/ticks.rst", ".. clause:: tick.never", ".. clause:: tick.tock", r"rst:14: duplicate clause tick.tock"),
        ("spec/ticks.rst", ".. clause:: tick.never", ".. clause:: Never", r"ticks.rst:14: 'Never' is not a clause ID"),
        ("spec/ticks.rst", ".. clause:: tick.never", ".. clause:: tick.new", r"clause tick.new has no test"),
        ("spec/ticks.rst", "no other", "none other", r"clause tick.tock was edited: read its tests again"),
        ("spec/ticks.rst", ":title: Tock", ":title: Tocks", r"clause tick.tock was edited"),
        ("spec/ticks.rst", "    tock", "tock", r"clause tick.never was edited"),
        ("spec/ticks.rst", "It never stops:", "", r"clause tick.never was edited"),
        ("spec/ticks.rst", ":clause:`tick.tock`", ":clause:`tick.tack`", r":6: refers to unknown clause tick.tack"),
        ("spec/ticks.rst", ".. informative:: Why\n\n   Not", "Not", r"ticks.rst:4: text that is neither a clause"),
        ("spec/ticks.rst", ".. informative:: Why", ".. note::", r"ticks.rst:4: text that is neither a clause"),
        ("spec/index.rst", "   ticks", "", r"spec/ticks.rst is not in the toctree"),
        ("docs/index.rst", "tick.tock", "tick.tack", r"docs/index.rst:1: refers to unknown clause tick.tack"),
        ("mxref/clock.py", "tick.never", "tick.nevre", r"clock.py:1: mxref.clock.tick names unknown clause tick.nevre"),
        ("tests/test_clock.py", '"tick.tock"', '"tick.tack"', r":8: test_tock names unknown clause tick.tack"),
        ("tests/test_clock.py", '@pytest.mark.clause("tick.tock")', "", r"clause tick.tock has no test"),
        ("tests/test_clock.py", '"tick.tock"', "NAME", r"names its IDs as literal strings"),
        ("tests/test_clock.py", '"known answer"', '"faith"', r"may declare evidence='known answer' or 'peer', nothing"),
        ("tests/test_clock.py", '"known answer"', '"peer"', r"test_never claims a peer but uses none"),
        ("spec/vectors/ticks.json", "tick.tock", "tick.tack", r"spec/vectors: 1 records name unknown clause tick.tack"),
        ("spec/vectors/ticks.json", '["tick.tock"]', "[]", r"vectors/ticks.json: record a names no clause"),
        ("spec/clauses.lock", "retired = [", 'retired = [\n    "tick.tock",', r"clause tick.tock reuses a retired ID"),
        ("spec/clauses.lock", '"tick.never" =', '"tick.gone" =', r"clause tick.never is not in spec/clauses.lock"),
        ("spec/clauses.lock", '"tick.never" =', '"tick.gone" =', r"clause tick.gone is gone from the chapters"),
    ],
)  # fmt: skip
def test_every_fault_is_found(tree, name, old, new, problem):
    problems = edit(tree, name, old, new)
    assert any(re.search(problem, p) for p in problems), problems


def test_rewrapping_a_paragraph_is_no_edit(tree):
    assert edit(tree, "spec/ticks.rst", "tock,\n   and no", "tock, and\n   no") == []


def test_relock_takes_edits_and_retires_what_is_gone_for_ever(tree):
    edit(tree, "spec/ticks.rst", "no other", "none other")
    edit(tree, "spec/ticks.rst", ".. clause:: tick.never", ".. clause:: tick.always")
    edit(tree, "mxref/clock.py", "tick.never", "tick.always")
    edit(tree, "tests/test_clock.py", "tick.never", "tick.always")
    edit(tree, "tests/test_clock.py", "tick.never", "tick.always")
    assert clauses.relock(tree) == ["retired tick.never", "edited tick.tock", "added tick.always"]
    assert clauses.load(tree).problems == []
    assert clauses.relock(tree) == []

    edit(tree, "spec/ticks.rst", ".. clause:: tick.always", ".. clause:: tick.never")
    before = (tree / "spec/clauses.lock").read_text()
    with pytest.raises(ValueError, match=r"retired IDs are never reused: tick.never"):
        clauses.relock(tree)
    assert (tree / "spec/clauses.lock").read_text() == before


@pytest.fixture
def released(tree):
    """Return the tree after its version 1.2.3 was released."""
    assert clauses.freeze(tree) == "1.2.3"
    assert clauses.load(tree).problems == []
    return tree


@pytest.mark.parametrize(
    ("old", "new", "changed", "least"),
    [
        ("no other", "none other", {"tick.tock": "edited"}, "1.2.4"),
        (".. clause:: tick.n", ".. clause:: tick.a\n\n   A.\n\n.. clause:: tick.n", {"tick.a": "added"}, "1.3.0"),
        (".. clause:: tick.never", ".. informative:: tick.never", {"tick.never": "removed"}, "2.0.0"),
    ],
)  # fmt: skip
def test_a_clause_that_differs_from_the_released_one_needs_a_version_and_a_line_of_the_changelog(
    old, new, changed, least, released
):
    edit(released, "spec/ticks.rst", old, new)
    clauses.relock(released)
    assert clauses.changed_since_release(released, clauses.read_chapters(released).clauses) == changed
    (clause_id,) = changed
    number = rf"clause {clause_id} was {changed[clause_id]} since version 1.2.3 .*: set SPECIFICATION .* to {least} or"
    unnamed = rf"clause {clause_id} was .*: name `{clause_id}` in CHANGELOG.md"
    for wanted in (number, unnamed):
        assert any(re.search(wanted, problem) for problem in clauses.load(released).problems), wanted
    (released / "CHANGELOG.md").write_text(f"- `{clause_id}` says more.\n")
    problems = edit(released, "mxref/_version.py", "1.2.3", least)
    assert not any("since version" in problem for problem in problems)
    major, minor, patch = map(int, least.split("."))
    too_low = (major, minor, patch - 1) if patch else (major, minor - 1, 9) if minor else (major - 1, 99, 0)
    problems = edit(released, "mxref/_version.py", least, ".".join(map(str, too_low)))
    assert any(re.search(number, problem) for problem in problems)


def test_a_version_of_another_form_is_refused(tree):
    (tree / "mxref/_version.py").write_text('SPECIFICATION = "1.0"\n')
    with pytest.raises(ValueError, match=r"no SPECIFICATION of the form X.Y.Z"):
        clauses.freeze(tree)


def test_evidence_follows_helpers_and_not_their_neighbours(tree):
    (tree / "tests/beside.py").write_text(
        "import oracle\ndef exact(): return oracle.tock()\ndef plain(): return 1\n"
    )
    problems = edit(
        tree,
        "tests/test_clock.py",
        "import oracle\n",
        "from beside import exact, plain as helper2\nimport oracle\n",
    )
    assert problems == []
    edit(tree, "tests/test_clock.py", "assert 1", "assert helper2()")
    edit(tree, "tests/test_clock.py", ', evidence="known answer"', "")
    assert clauses.load(tree).evidence("tick.never") == ["self-consistent"]
    edit(tree, "tests/test_clock.py", "assert helper2()", "assert exact()")
    assert clauses.load(tree).evidence("tick.never") == ["oracle"]


def test_the_command_line_and_the_build_refuse_a_specification_that_is_out_of_order():
    """In a process of its own, so that Sphinx and the modules of docs/_ext stay out of this one."""
    pytest.importorskip("sphinx")
    code = """
        import clauses, mxref_spec
        from sphinx.errors import ExtensionError
        assert clauses.main(["check"]) == 0
        assert clauses.main([]) == 2
        broken = clauses.load()
        broken.problems.append("a clause is wrong")
        clauses.load = mxref_spec.load = lambda root=None: broken
        assert clauses.main(["check"]) == 1
        try:
            mxref_spec.check(None)
        except ExtensionError as err:
            assert "a clause is wrong" in str(err)
        else:
            raise SystemExit("the build went on")
    """
    environment = os.environ | {"PYTHONPATH": str(EXTENSION)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)
