"""The architecture page lists the modules of the code, no import points upward, and no imports form a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from mxref.vectors import FORMAT_CHAPTERS
from places import ROOT, TESTS

FOLDERS = {
    "mxref": ROOT,
    "mxref_numba": ROOT / "backends",
    "mxref_triton": ROOT / "backends",
    "mxref_torch": ROOT / "training",
    "mxref_training": ROOT / "training",
}
BELOW = {
    "mxref": set(),
    "mxref_numba": {"mxref"},
    "mxref_triton": {"mxref"},
    "mxref_torch": {"mxref"},
    "mxref_training": {"mxref", "mxref_torch"},
}
PAGE = (ROOT / "docs" / "explanation" / "architecture.rst").read_text(encoding="utf-8")
packages = pytest.mark.parametrize("package", FOLDERS)


def rooms_of_the_page(package: str) -> list[str]:
    section = re.search(rf"^{package}\n~+\n(.*?)(?=^\w+\n[~-]+\n|\Z)", PAGE, re.M | re.S)
    assert section, f"the page has no section {package}"
    return re.findall(r"^   `(\w+)`,", section[1], re.M)


def modules(package: str) -> dict[str, Path]:
    """Return the package's modules by their dotted names; a folder is named as its `__init__` is."""
    found = {}
    for path in sorted((FOLDERS[package] / package).rglob("*.py")):
        parts = path.relative_to(FOLDERS[package]).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def import_statements(code: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements anywhere in a module; each module is asked for by many tests."""
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """Yield every module that a module imports, wherever in the file and for type checking too.

    An import from a package counts as one of its module if the name is a module, else of the package itself.
    """
    for node in import_statements(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert not node.level, f"{name} has a relative import; name the package"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)


def room(package: str, module: str) -> str:
    """Return the room of a module; the package's own `__init__` is above every room."""
    return module.split(".")[1] if "." in module else "__init__"


@packages
def test_the_page_lists_the_rooms_of_the_code(package):
    listed = rooms_of_the_page(package)
    assert len(listed) == len(set(listed))
    rooms = {room(package, module) for module in modules(package)} - {"__init__"}
    assert set(listed) == rooms


@packages
def test_no_import_points_upward(package):
    wrong = [line for name, path in modules(package).items() for line in upward(package, name, path)]
    assert not wrong


def upward(package: str, name: str, path: Path) -> list[str]:
    """Return the imports of a module that take from a room above its own."""
    known = set(modules(package))
    height = {room: number for number, room in enumerate([*rooms_of_the_page(package), "__init__"])}
    return [
        f"{name} imports {target}"
        for target in imported(name, path, known)
        if target.split(".")[0] == package and height[room(package, target)] > height[room(package, name)]
    ]


def imports_within(package: str) -> dict[str, set[str]]:
    """Return each module of a package with the modules that its import statements load.

    Python runs the `__init__` of every folder on the way to a module, so these count too, except around the importer.
    """
    known = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = set(imported(name, path, set(known)))
        for target in list(targets):
            parts = target.split(".")
            folders = {".".join(parts[:depth]) for depth in range(2, len(parts))}
            targets |= {folder for folder in folders if not name.startswith(f"{folder}.")}
        edges[name] = targets & set(known) - {name}
    return edges


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the names that only a circle, or a way into one, can keep: none if the graph has no circle."""
    left = {name: set(targets) for name, targets in edges.items()}
    while free := [name for name, targets in left.items() if not targets & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


@packages
def test_no_module_imports_itself_through_others(package):
    found = circle(imports_within(package))
    assert not found, f"circles among {found}"


@packages
def test_the_folders_of_a_room_do_not_import_each_other(package):
    edges = imports_within(package)
    for folder in {name.rpartition(".")[0] for name in edges} - {""}:
        within: dict[str, set[str]] = {}
        for name, targets in edges.items():
            if name.startswith(f"{folder}."):
                places = {child(folder, target) for target in targets if target.startswith(f"{folder}.")}
                within.setdefault(child(folder, name), set()).update(places - {child(folder, name)})
        found = circle(within)
        assert not found, f"circles among {found}"


def child(folder: str, module: str) -> str:
    """Return the module or folder directly inside a folder to which a module belongs."""
    return f"{folder}.{module.removeprefix(f'{folder}.').split('.')[0]}"


@packages
def test_packages_import_only_packages_below_them(package):
    wrong = [line for name, path in modules(package).items() for line in foreign(package, name, path)]
    assert not wrong


def foreign(package: str, name: str, path: Path) -> list[str]:
    """Return the imports of a module that take from a package not below its own, or from the tests."""
    forbidden = set(FOLDERS) - BELOW[package] - {package}
    forbidden |= {path.stem for path in TESTS.iterdir()} - set(FOLDERS) - {"torch", "torchtitan"}
    targets = imported(name, path, set(modules(package)))
    return [f"{name} imports {target}" for target in targets if target.split(".")[0] in forbidden]


INTO_TESTS_OR_DOCS = re.compile(
    r"""^(?:tests|docs)$|(?:^|[\s/\\"'`(])(?:tests|docs)[/\\]|[/\\](?:tests|docs)$"""
)


@packages
def test_no_file_reaches_into_tests_or_docs(package):
    folder = FOLDERS[package] / package
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".js", ".css", ".html", ".j2")]
    reaching = {
        path.relative_to(folder.parent).as_posix(): found for path in files if (found := outside(path))
    }
    assert not reaching


def outside(path: Path) -> list[str]:
    """Return the strings of a file that are paths into `tests` or `docs`; its comments and docstrings may name both."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
        return [line for line in lines if INTO_TESTS_OR_DOCS.search(line)]
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [value for value in strings if isinstance(value, str) and INTO_TESTS_OR_DOCS.search(value)]


@packages
def test_no_name_of_a_package_hides_its_module(package):
    known = modules(package)
    hidden = [
        f"{name}.{bound}"
        for name, path in known.items()
        if path.name == "__init__.py"
        for bound in names_bound(path, known)
        if f"{name}.{bound}" in known
    ]
    assert not hidden


def names_bound(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield the names that the top level of a module defines or imports, except imported modules."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = (name for target in node.targets for name in ast.walk(target))
            yield from (name.id for name in names if isinstance(name, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            aliases = (alias for alias in node.names if f"{node.module}.{alias.name}" not in known)
            yield from (alias.asname or alias.name for alias in aliases)


def test_no_test_changes_the_path_for_good():
    changed = re.compile(r"^(?!.*assert ).*\bsys\.path(?:\.(?:insert|append)\(|\[.*\] *=[^=])", re.M)
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if changed.search(text := path.read_text(encoding="utf-8")) and "sys.path.remove(" not in text
    }
    assert found == {"warm.py"}, "a process that becomes another one takes its path; no other module may"


def test_every_folder_of_the_tests_is_on_the_page():
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("**/*.py")) and path.is_dir()}
    section = PAGE.partition("\nTests\n-----\n")[2]
    assert folders == set(re.findall(r"`tests/(\w+)`", section))


def test_every_chapter_has_its_module_tests_and_vectors():
    cells = r"^   \* - `(\w+)`\n     - `([\w/.]+)`\n     - `([\w/.]+)`\n     -(.*)$"
    rows = re.findall(cells, PAGE.partition("\nRooms\n-----\n")[0], re.M)
    chapters = {path.stem for path in (ROOT / "spec").glob("*.rst")}
    assert {row[0] for row in rows} == chapters - {"index", "coverage", "conventions"}
    for chapter, module, tests, _ in rows:
        for named, place in (
            (rf"Implements: .*\b{chapter}\.", module),
            (rf'clause\([^)]*"{chapter}\.', tests),
        ):
            path = ROOT / place
            texts = [
                p.read_text(encoding="utf-8") for p in ([path] if path.is_file() else path.rglob("*.py"))
            ]
            assert any(re.search(named, text) for text in texts), (chapter, place)
    shown = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[3])}
    vectors = {path.name for path in (ROOT / "spec" / "vectors").glob("*.json")}
    assert shown == vectors - {"schema.json", *(f"{name}.json" for name in FORMAT_CHAPTERS)}


def test_the_oracles_import_nothing_that_they_are_compared_with():
    modules = [path for path in (TESTS / "oracle").glob("*.py") if not path.name.startswith("test_")]
    modules += [TESTS / "training_oracle" / f"{name}.py" for name in ("layer", "model", "study")]
    wrong = [
        f"{path.relative_to(TESTS)} imports {target}"
        for path in modules
        for target in imported(path.stem, path, set())
        if target.partition(".")[0] in FOLDERS
    ]
    assert len(modules) > 8
    assert not wrong


SHARED = {"Matrix": "a piece of an input with the block axis last, in both backends"}
"""Names of classes that several packages use for the same thing."""


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = {}
    for package in FOLDERS:
        for name, path in modules(package).items():
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1}.keys() == SHARED.keys()


def test_an_upward_import_and_a_circle_are_noticed(tmp_path, monkeypatch):
    folder = tmp_path / "mxref_numba"
    folder.mkdir()
    for name, text in {
        "path": "from mxref_numba import backend",
        "backend": "import mxref_numba.path",
        "__init__": "",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setitem(FOLDERS, "mxref_numba", tmp_path)
    with pytest.raises(AssertionError, match="path imports mxref_numba.backend"):
        test_no_import_points_upward("mxref_numba")
    (folder / "__init__.py").write_text("from mxref_numba.backend import thing as backend")
    with pytest.raises(AssertionError, match="mxref_numba.backend"):
        test_no_name_of_a_package_hides_its_module("mxref_numba")
    (folder / "__init__.py").write_text("")
    with pytest.raises(AssertionError, match="circles among"):
        test_no_module_imports_itself_through_others("mxref_numba")
    (folder / "backend.py").write_text("def lazily():\n    import mxref_triton")
    with pytest.raises(AssertionError):
        test_packages_import_only_packages_below_them("mxref_numba")
    (folder / "path.py").write_text(
        '"""docs/index.rst and tests/ say more."""\nPAGE = "../docs/index.rst"  # as in tests/'
    )
    with pytest.raises(AssertionError, match="path.py"):
        test_no_file_reaches_into_tests_or_docs("mxref_numba")
