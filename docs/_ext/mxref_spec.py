"""Sphinx extension of the specification: clauses with their code and tests, informative text, the table of coverage.

The rules themselves are in `clauses`; here a specification that breaks one of them stops the build.
"""

from __future__ import annotations

import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import ReferenceRole, SphinxDirective
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parent))

from clause_links import EVIDENCE
from clauses import ROOT, Clause, Specification, load
from spec_drawings import Bitfield, Drawing
from spec_worked import Worked, table

from mxref.conformance.clauses import CLAUSES

FOLDER = "spec"
"""Where the chapters are among the documents."""


@cache
def specification() -> Specification:
    """Return the specification of this source tree, read once per build."""
    return load(ROOT)


def _document(clause: Clause) -> str:
    return f"{FOLDER}/{clause.chapter}"


class ClauseDirective(SphinxDirective):
    """A normative paragraph: number, title, permanent link, text, and who implements and checks it."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"title": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        clause = specification().clauses[self.arguments[0]]
        head = nodes.paragraph(classes=["clause-head"])
        head += nodes.inline("", clause.number, classes=["clause-number"])
        head += nodes.inline("", clause.title, classes=["clause-title"])
        head += nodes.reference("", clause.id, refuri=f"#{clause.id}", internal=True, classes=["clause-id"])
        box = nodes.container(classes=["clause"], ids=[clause.id])
        box += head
        self.state.nested_parse(self.content, self.content_offset, box)
        for part in box.children[1:]:
            _set_variables(part)
        box += _trace(clause)
        self.state.document.note_explicit_target(box)
        return [box]


def _trace(clause: Clause) -> list[nodes.Node]:
    """Return the folded lines under a clause: its code, its tests, its evidence."""
    spec = specification()
    code, tests = spec.code.get(clause.id, []), spec.tests.get(clause.id, [])
    by = f"implemented by {len(code)}, " if code else ""
    noun = "test" if len(tests) == 1 else "tests"
    stored = spec.vectors[clause.id]
    vectors = f" and {stored} vector{'' if stored == 1 else 's'}" if stored else ""
    counts = f"{by}checked by {len(tests)} {noun}{vectors}: {', '.join(spec.evidence(clause.id))}"
    body = nodes.bullet_list(classes=["trace-list"])
    for link in code:
        body += nodes.list_item("", nodes.paragraph("", "", _python_link(link.name)))
    for test in tests:
        line = nodes.paragraph("", "", nodes.literal("", f"{test.file}::{test.name}"))
        line += nodes.inline("", f" {', '.join(test.evidence)}", classes=["trace-evidence"])
        body += nodes.list_item("", line)
    opening = f'<details class="trace"><summary>{counts}</summary>'
    return [nodes.raw("", opening, format="html"), body, nodes.raw("", "</details>", format="html")]


_VARIABLE = re.compile(r"(?<![A-Za-z_'.-])(d[XYW]|[b-zB-HJ-Z]'?)(?![\w'-]|\+\+| code)")
"""A single letter as a variable; the words A, a and I and the languages C and C++ are not variables."""


def _set_variables(box: nodes.Element) -> None:
    """Set single letters in italics, as variables of formulas are printed, except in code."""
    for text in list(box.findall(nodes.Text)):
        parents = []
        node = text.parent
        while node is not box:
            parents.append(node)
            node = node.parent
        kept = (nodes.literal, nodes.literal_block, nodes.reference, nodes.emphasis, nodes.title)
        if any(isinstance(parent, kept) for parent in parents):
            continue
        parts = _VARIABLE.split(text)
        if len(parts) > 1:
            marked = [
                nodes.emphasis("", part, classes=["var"]) if i % 2 else nodes.Text(part)
                for i, part in enumerate(parts)
            ]
            text.parent.replace(text, [part for part in marked if part.astext()])


def _python_link(name: str) -> nodes.Node:
    """Return a link to a documented Python object, or its name alone if the API pages leave it out."""
    reference = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=name, refexplicit=False)
    reference["refwarn"] = False
    reference += nodes.literal("", name)
    return reference


class QuotedClause(SphinxDirective):
    """The text of a clause on a page outside the specification, with a link to the clause: a table is stored once."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        clause = specification().clauses[self.arguments[0]]
        source = f"spec/{clause.chapter}.rst"
        self.env.note_dependency(str(ROOT / source))
        box = nodes.container(classes=["quoted-clause"])
        lines = StringList(textwrap.dedent(clause.text).strip("\n").splitlines(), source)
        self.state.nested_parse(lines, self.content_offset, box)
        line = nodes.paragraph("", "From ")
        line += _clause_link(clause.id, self.env.docname)
        return [box, line]


class Informative(SphinxDirective):
    """Text that is not normative, with an optional title."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        box = nodes.container(classes=["informative"])
        if self.arguments:
            box += nodes.paragraph("", self.arguments[0], classes=["informative-title"])
        self.state.nested_parse(self.content, self.content_offset, box)
        _set_variables(box)
        return [box]


class ClauseRole(ReferenceRole):
    """A cross reference to a clause by its ID."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        return [_clause_link(self.target, self.env.docname)], []


def resolve_clause(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> Any:
    """Return the link of a `clause` reference; unknown IDs stopped the build earlier."""
    if node["reftype"] != "clause" or node["reftarget"] not in specification().clauses:
        return None
    clause = specification().clauses[node["reftarget"]]
    title = f"{clause.number} {clause.title}"
    return make_refnode(app.builder, node["refdoc"], _document(clause), clause.id, content, title)


class Coverage(SphinxDirective):
    """The table of all clauses with their code, tests and evidence, and the counts above it."""

    def run(self) -> list[nodes.Node]:
        spec = specification()
        strongest = [spec.evidence(clause_id)[0] for clause_id in spec.clauses]
        counts = ", ".join(f"{kind} {strongest.count(kind)}" for kind in EVIDENCE if kind in strongest)
        tests = {(t.file, t.name) for links in spec.tests.values() for t in links}
        covered = f"{sum(i in spec.tests for i in spec.clauses)} of {len(spec.clauses)} clauses are checked"
        summary = f"{covered}, by {len(tests)} tests. Clauses by their strongest evidence: {counts}."
        out: list[nodes.Node] = [nodes.paragraph("", summary, classes=["coverage-summary"])]
        for chapter in spec.chapters:
            clauses = [c for c in spec.clauses.values() if c.chapter == chapter]
            if not clauses:
                continue
            out.append(nodes.rubric("", spec.titles[chapter]))
            rows = [self._row(clause) for clause in clauses]
            out.append(
                table(["clause", "code", "tests", "evidence"], rows, ["coverage"], widths=[20, 27, 41, 12])
            )
        return out

    def _row(self, clause: Clause) -> list[list[nodes.Node]]:
        spec = specification()
        target = _clause_link(clause.id, self.env.docname)
        tests = [
            nodes.paragraph(
                "", f"{Path(test.file).stem}: {test.name.removeprefix('test_').replace('_', ' ')}"
            )
            for test in spec.tests[clause.id]
        ]
        if spec.vectors[clause.id]:
            tests.append(nodes.paragraph("", f"golden vectors: {spec.vectors[clause.id]}"))
        return [
            [nodes.paragraph("", "", target)],
            [nodes.paragraph("", "", _python_link(link.name)) for link in spec.code.get(clause.id, [])],
            tests,
            [nodes.paragraph("", kind) for kind in spec.evidence(clause.id)],
        ]


class ConformClauses(SphinxDirective):
    """The clauses that `mxref conform` reports, and those that it does not, each in the order of the chapters."""

    def run(self) -> list[nodes.Node]:
        known = specification().clauses
        out: list[nodes.Node] = []
        for title, asked in (("Asked of a backend", True), ("Not asked", False)):
            line = nodes.paragraph(classes=["clause-list"])
            line += nodes.strong("", f"{title}: ")
            listed = [clause_id for clause_id in known if (clause_id in CLAUSES) == asked]
            for clause_id in listed:
                line += _clause_link(clause_id, self.env.docname)
                line += nodes.Text("." if clause_id == listed[-1] else ", ")
            out.append(line)
        return out


def _clause_link(clause_id: str, document: str) -> nodes.Node:
    reference = addnodes.pending_xref(
        "", refdomain="", reftype="clause", reftarget=clause_id, refdoc=document, refwarn=True
    )
    reference += nodes.literal("", clause_id, classes=["clause-link"])
    return reference


def check(app: Sphinx) -> None:
    """Stop the build if the specification is not in order."""
    specification.cache_clear()
    problems = specification().problems
    if problems:
        raise ExtensionError("the specification is not in order:\n  " + "\n  ".join(problems))


def outdated(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Return the chapters: each shows code, tests and computed numbers, so each is read in every build."""
    return [name for name in env.found_docs if name.startswith(f"{FOLDER}/")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives and the checks."""
    app.add_directive("clause", ClauseDirective)
    app.add_directive("quoted-clause", QuotedClause)
    app.add_directive("informative", Informative)
    app.add_directive("clause-coverage", Coverage)
    app.add_directive("conform-clauses", ConformClauses)
    app.add_directive("bitfield", Bitfield)
    app.add_directive("drawing", Drawing)
    app.add_directive("worked", Worked)
    app.add_role("clause", ClauseRole())
    app.connect("builder-inited", check)
    app.connect("env-get-outdated", outdated)
    app.connect("missing-reference", resolve_clause)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
