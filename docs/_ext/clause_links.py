"""The code and the tests of each clause, read from docstrings and pytest marks through syntax trees."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

EVIDENCE = ("oracle", "known answer", "peer", "vector", "self-consistent")
"""Kinds of evidence, the strongest first.

oracle: compared with the scalar oracle, which shares no code with the package; found by following names.
known answer: expected results written in the test, from a standard, a publication, or worked by hand.
peer: compared with another implementation.
vector: golden vectors, unless the reference itself is their source.
self-consistent: the package compared with itself.
"""
_DECLARED = ("known answer", "peer")
_ORACLES = ("oracle",)
_PEERS = ("ml_dtypes", "torch", "gfloat", "torchao")

_IMPLEMENTS = re.compile(r"Implements:\s*((?:[a-z][\w.]*\s*,\s*)*[a-z][\w.]*)")


@dataclass(frozen=True)
class CodeLink:
    """A module, class or function whose docstring says that it implements a clause."""

    id: str
    name: str
    """Dotted name, as in mxref.steps.scale.scale_code."""
    file: str
    line: int


@dataclass(frozen=True)
class TestLink:
    """A test that carries a clause's mark."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    id: str
    name: str
    file: str
    line: int
    evidence: tuple[str, ...]


def scan_code(folder: Path, root: Path) -> list[CodeLink]:
    """Return every `Implements:` of the docstrings under a folder; none if it does not exist."""
    links = []
    for path in sorted(folder.rglob("*.py")):
        if any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8")
        if not _IMPLEMENTS.search(text):  # most files; to parse them would take most of the time
            continue
        module = _module_name(path)
        for name, node in _definitions(ast.parse(text)):
            for ids in _IMPLEMENTS.findall(ast.get_docstring(node) or ""):
                for clause_id in re.split(r"\s*,\s*", ids):
                    full = ".".join(filter(None, [module, name]))
                    file = str(path.relative_to(root))
                    links.append(CodeLink(clause_id.rstrip("."), full, file, getattr(node, "lineno", 1)))
    return links


def _module_name(path: Path) -> str:
    """Return the dotted name of a module: its file, and the folders above it that are packages."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Definition]]:
    if isinstance(node, _Definition):
        yield prefix, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{prefix}.{child.name}" if prefix else child.name)


def scan_tests(folder: Path, root: Path) -> tuple[list[TestLink], list[str]]:
    """Return the clause marks of the tests in a folder with their evidence, and what is wrong with them."""
    _module.cache_clear()  # files may have changed since the last scan
    _reached.cache_clear()
    links, problems = [], []
    for path in sorted(folder.rglob("test_*.py")):
        file, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        if "clause" not in text:
            continue
        tree = ast.parse(text)
        of_module = [
            mark
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
            for mark in _marks(node.value)
        ]
        for name, node in _definitions(tree):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            of_class = [
                mark
                for outer in tree.body
                if isinstance(outer, ast.ClassDef) and name.startswith(f"{outer.name}.")
                for decorator in outer.decorator_list
                for mark in _marks(decorator)
            ]
            marks = [mark for decorator in node.decorator_list for mark in _marks(decorator)]
            for mark in [*of_module, *of_class, *marks]:
                ids, declared, problem = _read_mark(mark)
                if problem:
                    problems.append(f"{file}:{mark.lineno}: {name}: {problem}")
                reached = _reached(folder, path, name.split(".")[0])
                if declared == "peer" and not any(r.split(".")[0] in _PEERS for r in reached):
                    problems.append(
                        f"{file}:{mark.lineno}: {name} claims a peer but uses none of {', '.join(_PEERS)}"
                    )
                kinds = _evidence(reached, declared)
                links += [TestLink(clause_id, name, file, node.lineno, kinds) for clause_id in ids]
    return links, problems


def scan_vectors(folder: Path, root: Path) -> tuple[Counter[str], list[str]]:
    """Return how many golden vectors name each clause, and the records that name none or an unreadable one.

    Vectors whose source is the reference itself are not counted: they are no evidence for it.
    """
    counts: Counter[str] = Counter()
    problems = []
    for path in sorted(folder.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")).get("records", []):
            named = record.get("clauses")
            if not named:
                problems.append(f"{path.relative_to(root)}: record {record.get('id')} names no clause")
            elif record["source"] != "mxref":
                counts.update(named)
    return counts, problems


def _marks(node: ast.AST) -> list[ast.Call]:
    """Return the calls of `pytest.mark.clause` anywhere in an expression."""
    return [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "clause"
    ]


def _read_mark(mark: ast.Call) -> tuple[list[str], str, str]:
    """Return the IDs of a mark, the evidence that it declares, and what is wrong with it."""
    ids = [a.value for a in mark.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if not ids or len(ids) != len(mark.args):
        return ids, "", "a clause mark names its IDs as literal strings"
    for keyword in mark.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg != "evidence" or value not in _DECLARED:
            return (
                ids,
                "",
                f"a clause mark may declare evidence={' or '.join(map(repr, _DECLARED))}, nothing else",
            )
        return ids, str(value), ""
    return ids, "", ""


def _evidence(reached: frozenset[str], declared: str) -> tuple[str, ...]:
    kinds = {declared} if declared else set()
    if any(name.split(".")[0] in _ORACLES for name in reached):
        kinds.add("oracle")
    return tuple(kind for kind in EVIDENCE if kind in kinds) or (EVIDENCE[-1],)


@cache
def _module(path: Path) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the names that each top-level definition of a module uses, and what its imports stand for."""
    uses: dict[str, set[str]] = {}
    imports: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            imports |= {(a.asname or a.name).split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            uses[node.name] = names
        elif isinstance(node, ast.Assign):
            targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            uses |= dict.fromkeys(targets, names)
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "pytest.importorskip":
                imports |= dict.fromkeys(targets, ast.literal_eval(node.value.args[0]))
    return uses, imports


@cache
def _reached(tests: Path, path: Path, name: str) -> frozenset[str]:
    """Return the imports that a definition reaches through its own module and the helper modules of the tests."""
    reached: set[str] = set()
    todo, seen = [(path, name)], set()
    while todo:
        module, name = todo.pop()
        if (module, name) in seen:
            continue
        seen.add((module, name))
        uses, imports = _module(module)
        if name in imports:
            target = imports[name]
            reached.add(target)
            helper, _, attribute = target.rpartition(".")
            file = tests / f"{helper.replace('.', '/')}.py"
            if helper.split(".")[0] not in _ORACLES and file.is_file():
                # What counts is what this one function of the helper module reaches.
                reached.discard(target)
                todo.append((file, attribute))
        todo += [(module, used) for used in uses.get(name, ()) if used != name]
    return frozenset(reached)
