"""The clauses of the specification, their lock, and every rule that ties them to code and tests.

Nothing here needs Sphinx: the tests, the documentation build and the command line run the same checks.

    python docs/_ext/clauses.py check     print what is wrong; exit code 1 if anything is
    python docs/_ext/clauses.py relock    write spec/clauses.lock after the tests of an edited clause were re-read
    python docs/_ext/clauses.py freeze    write spec/released.lock: the version of the specification is released
"""

from __future__ import annotations

import hashlib
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from clause_links import EVIDENCE, CodeLink, TestLink, scan_code, scan_tests, scan_vectors

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("mxref", "backends", "training")
ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")

_DIRECTIVE = re.compile(r"^\.\. ([a-z-]+)::\s*(.*)$")
_REFERENCE = re.compile(r":clause:`([^`]+)`")
_UNMARKED_OK = {
    "informative",
    "worked",
    "bitfield",
    "drawing",
    "toctree",
    "clause-coverage",
    "conform-clauses",
    "clause",
}
"""Directives that may stand outside a clause; anything else there is refused."""

_VERSION = re.compile(r'^SPECIFICATION = "(\d+)\.(\d+)\.(\d+)"$', re.MULTILINE)
_RELEASED_HEADER = """\
# Checksum of every clause of the last released version of the specification; `make freeze` writes it. A clause that
# differs needs a higher version in mxref/_version.py, as spec/index.rst says, and its ID in CHANGELOG.md.
"""
_LOCK_HEADER = """\
# Checksum of every clause of the specification. An edited clause no longer matches: read its tests again,
# then write this file with `make relock`. IDs are never reused: those of removed clauses stay in `retired`.
"""


@dataclass(frozen=True)
class Clause:
    """One normative paragraph of a chapter."""

    id: str
    title: str
    text: str
    chapter: str
    number: str
    """Chapter and place in it, as in 3.4; it may change, the ID never does."""
    line: int

    @property
    def checksum(self) -> str:
        """First 16 hex digits of the SHA-256 of title and text, independent of the wrapping of their paragraphs."""
        paragraphs = re.split(r"\n\s*\n", textwrap.dedent(self.text).strip("\n"))
        # Indented paragraphs are tables, lists and formulas, whose layout is part of what they say.
        joined = [p if re.search(r"^\s", p, re.MULTILINE) else " ".join(p.split()) for p in paragraphs]
        text = "\n\n".join("\n".join(line.rstrip() for line in p.splitlines()) for p in [self.title, *joined])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Specification:
    """All clauses, and who implements, checks and refers to them."""

    chapters: list[str]
    titles: dict[str, str]
    clauses: dict[str, Clause] = field(default_factory=dict)
    code: dict[str, list[CodeLink]] = field(default_factory=dict)
    tests: dict[str, list[TestLink]] = field(default_factory=dict)
    vectors: Counter[str] = field(default_factory=Counter)
    """How many golden vectors name each clause."""
    problems: list[str] = field(default_factory=list)

    def evidence(self, clause_id: str) -> list[str]:
        """Return the kinds of evidence behind a clause, the strongest first; the weakest only if it is alone."""
        kinds = {kind for test in self.tests.get(clause_id, []) for kind in test.evidence}
        if self.vectors[clause_id]:
            kinds.add("vector")
        if len(kinds) > 1:
            kinds.discard(EVIDENCE[-1])
        return [kind for kind in EVIDENCE if kind in kinds]


def read_chapters(root: Path = ROOT) -> Specification:
    """Return the clauses of a source tree alone, with the problems of the chapters themselves.

    Args:
        root: the folder that holds `spec`.
    """
    spec_folder = root / "spec"
    chapters = _chapters(spec_folder / "index.rst")
    spec = Specification(chapters, {})
    missing = {p.stem for p in spec_folder.glob("*.rst")} - {"index", *chapters}
    spec.problems += [f"spec/{name}.rst is not in the toctree of spec/index.rst" for name in sorted(missing)]
    for number, chapter in enumerate(chapters, 1):
        _read_chapter(spec_folder / f"{chapter}.rst", chapter, number, spec)
    return spec


def load(root: Path = ROOT) -> Specification:
    """Return the specification of a source tree with its code, its tests and every problem found.

    Args:
        root: the folder that holds `spec`, `docs`, `tests` and the code folders.
    """
    spec = read_chapters(root)
    scans = [scan_code(root / folder, root) for folder in CODE_FOLDERS]
    for link in [link for scan in scans for link in scan]:
        spec.code.setdefault(link.id, []).append(link)
    tests, problems = scan_tests(root / "tests", root)
    spec.problems += problems
    for test in tests:
        spec.tests.setdefault(test.id, []).append(test)
    spec.vectors, problems = scan_vectors(root / "spec" / "vectors", root)
    spec.problems += problems
    _check_links(root, spec)
    _check_lock(root / "spec" / "clauses.lock", spec)
    _check_version(root, spec)
    return spec


def _chapters(index: Path) -> list[str]:
    """Return the documents of the index's toctrees, in order."""
    names, inside = [], False
    for line in index.read_text(encoding="utf-8").splitlines():
        if line.startswith(".. toctree::"):
            inside = True
        elif inside and line.strip() and not line.startswith(" "):
            inside = False
        elif inside and line.strip() and not line.strip().startswith(":"):
            names.append(line.strip())
    return names


def _read_chapter(path: Path, chapter: str, number: int, spec: Specification) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    spec.titles[chapter] = lines[0]
    where = f"spec/{path.name}"
    count = 0
    for start, name, argument, body in _top_level(lines):
        if name == "":
            spec.problems.append(
                f"{where}:{start + 1}: text that is neither a clause nor marked informative: {argument[:60]!r}"
            )
        if name != "clause":
            continue
        count += 1
        options, text = _options(body)
        clause = Clause(argument, options.get("title", ""), text, chapter, f"{number}.{count}", start + 1)
        if not ID.fullmatch(argument):
            spec.problems.append(f"{where}:{start + 1}: {argument!r} is not a clause ID like scale.rule.even")
        elif not text.strip():
            spec.problems.append(f"{where}:{start + 1}: clause {argument} is empty")
        elif argument in spec.clauses:
            first = spec.clauses[argument]
            spec.problems.append(
                f"{where}:{start + 1}: duplicate clause {argument}, first in spec/{first.chapter}.rst:{first.line}"
            )
        else:
            spec.clauses[argument] = clause


def _top_level(lines: list[str]) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yield (line, directive, argument, body) of each top-level element; the directive of bare text is empty.

    Titles, comments and labels are skipped: they say nothing normative.
    """
    i = 0
    while i < len(lines):
        line = lines[i]
        underline = lines[i + 1] if i + 1 < len(lines) else ""
        if line.strip() and underline.strip() and not underline.strip().strip('=-~^"'):
            i += 2
            continue
        end = i + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
            end += 1
        match = _DIRECTIVE.match(line)
        if match and match[1] in _UNMARKED_OK:
            yield i, match[1], match[2].strip(), lines[i + 1 : end]
        elif line.strip() and (match or not line.startswith(".. ")):
            yield i, "", line, []
        i = end


def _options(body: list[str]) -> tuple[dict[str, str], str]:
    """Return the field options at the head of a directive's body, and the rest of it."""
    options = {}
    i = 0
    while i < len(body) and (match := re.match(r"^\s+:(\w+):\s*(.*)$", body[i])):
        options[match[1]] = match[2].strip()
        i += 1
    return options, textwrap.dedent("\n".join(body[i:])).strip("\n")


def _check_links(root: Path, spec: Specification) -> None:
    """Note unknown IDs in code, tests and cross references, and clauses that no test checks."""
    for links in (*spec.code.values(), *spec.tests.values()):
        spec.problems += [
            f"{link.file}:{link.line}: {link.name} names unknown clause {link.id}"
            for link in links
            if link.id not in spec.clauses
        ]
    unknown = sorted(set(spec.vectors) - set(spec.clauses))
    spec.problems += [f"spec/vectors: {spec.vectors[i]} records name unknown clause {i}" for i in unknown]
    pages = [*sorted((root / "spec").glob("*.rst")), *sorted((root / "docs").glob("*.rst"))]
    for page in pages:
        for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            spec.problems += [
                f"{page.relative_to(root)}:{i}: refers to unknown clause {target}"
                for target in _REFERENCE.findall(line)
                if target not in spec.clauses
            ]
    spec.problems += [
        f"spec/{c.chapter}.rst:{c.line}: clause {c.id} has no test; mark one with @pytest.mark.clause({c.id!r})"
        for c in spec.clauses.values()
        if c.id not in spec.tests
    ]


def read_lock(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the checksums and the retired IDs of a lock file; both empty if there is none."""
    if not path.exists():
        return {}, []
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return table.get("clauses", {}), table.get("retired", [])


def _check_lock(path: Path, spec: Specification) -> None:
    locked, retired = read_lock(path)
    for clause in spec.clauses.values():
        where = f"spec/{clause.chapter}.rst:{clause.line}: clause {clause.id}"
        if clause.id in retired:
            spec.problems.append(f"{where} reuses a retired ID; give it a new one")
        elif clause.id not in locked:
            spec.problems.append(f"{where} is not in spec/clauses.lock; run `make relock`")
        elif locked[clause.id] != clause.checksum:
            spec.problems.append(f"{where} was edited: read its tests again, then run `make relock`")
    spec.problems += [
        f"spec/clauses.lock: clause {clause_id} is gone from the chapters; run `make relock` to retire its ID"
        for clause_id in locked
        if clause_id not in spec.clauses
    ]


def relock(root: Path = ROOT) -> list[str]:
    """Write spec/clauses.lock from the chapters and return what changed; retired IDs are kept for ever.

    Raises:
        ValueError: a clause reuses a retired ID; nothing is written.
    """
    path = root / "spec" / "clauses.lock"
    locked, retired = read_lock(path)
    clauses = read_chapters(root).clauses
    reused = sorted(set(retired) & set(clauses))
    if reused:
        raise ValueError(f"retired IDs are never reused: {', '.join(reused)}")
    gone = [clause_id for clause_id in locked if clause_id not in clauses]
    changes = [f"retired {clause_id}" for clause_id in gone]
    changes += [
        f"{'edited' if clause.id in locked else 'added'} {clause.id}"
        for clause in clauses.values()
        if locked.get(clause.id) != clause.checksum
    ]
    retired_lines = [f'    "{clause_id}",' for clause_id in sorted({*retired, *gone})]
    lines = [
        _LOCK_HEADER,
        "retired = [",
        *retired_lines,
        "]",
        "",
        "[clauses]",
        *(f'"{clause.id}" = "{clause.checksum}"' for clause in clauses.values()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changes


def changed_since_release(root: Path, clauses: dict[str, Clause]) -> dict[str, str]:
    """Return the IDs of the clauses that differ from the released version: `added`, `edited` or `removed`."""
    released, _ = read_lock(root / "spec" / "released.lock")
    if not released:
        return {}
    found = {clause_id: "removed" for clause_id in released if clause_id not in clauses}
    for clause in clauses.values():
        if clause.id not in released:
            found[clause.id] = "added"
        elif released[clause.id] != clause.checksum:
            found[clause.id] = "edited"
    return found


def version(root: Path = ROOT) -> tuple[int, int, int]:
    """Return the version of the specification that mxref/_version.py states."""
    found = _VERSION.search((root / "mxref" / "_version.py").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("mxref/_version.py states no SPECIFICATION of the form X.Y.Z")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def _check_version(root: Path, spec: Specification) -> None:
    """Note changes since the released version that its number or the changelog does not announce."""
    path = root / "spec" / "released.lock"
    if not path.exists():
        return
    was = tomllib.loads(path.read_text(encoding="utf-8"))["version"]
    major, minor, patch = map(int, was.split("."))
    least = {
        "edited": (major, minor, patch + 1),
        "added": (major, minor + 1, 0),
        "removed": (major + 1, 0, 0),
    }
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    for clause_id, how in changed_since_release(root, spec.clauses).items():
        where = f"clause {clause_id} was {how} since version {was} of the specification"
        if version(root) < least[how]:
            needed = ".".join(map(str, least[how]))
            spec.problems.append(f"{where}: set SPECIFICATION in mxref/_version.py to {needed} or higher")
        if f"`{clause_id}`" not in log:
            spec.problems.append(f"{where}: name `{clause_id}` in CHANGELOG.md")


def freeze(root: Path = ROOT) -> str:
    """Write spec/released.lock from the chapters and return the version that is released with it."""
    number = ".".join(map(str, version(root)))
    clauses = read_chapters(root).clauses.values()
    lines = [_RELEASED_HEADER, f'version = "{number}"', "", "[clauses]"]
    lines += [f'"{clause.id}" = "{clause.checksum}"' for clause in clauses]
    (root / "spec" / "released.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return number


def main(arguments: list[str]) -> int:
    """Run `check`, `relock` or `freeze` and return the exit code."""
    if arguments == ["freeze"]:
        print(f"version {freeze()} of the specification is released")
        return 0
    if arguments == ["relock"]:
        print("\n".join(relock()) or "spec/clauses.lock is up to date")
        return 0
    if arguments != ["check"]:
        print(__doc__)
        return 2
    spec = load()
    print("\n".join(spec.problems) or f"{len(spec.clauses)} clauses, all of them checked by tests")
    return 1 if spec.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
