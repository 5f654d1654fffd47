"""Compiled kernels on disk: never stale, never an obstacle, and found by the next process."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from mxref_numba import kernel_cache
from mxref_numba.kernels import KERNELS
from places import ROOT

PACKAGE = Path(kernel_cache.__file__).parent

INNER = """
from mxref_numba.kernels import kernel
LIMIT = 3

@kernel
def limited(v):
    return min(v, LIMIT)
"""
OUTER = """
from mxref_numba.kernels import kernel
from mxref_numba.inner import limited

@kernel(no_cpython_wrapper=False)
def twice(v):
    return 2 * limited(v)
"""
RUN = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from mxref_numba.outer import twice
    result = twice(10)
print(json.dumps({
    "result": result,
    "hits": sum(twice.stats.cache_hits.values()),
    "misses": sum(twice.stats.cache_misses.values()),
    "folder": twice.stats.cache_path,
    "warnings": [str(w.message) for w in caught],
}))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of both packages, without their kernels, and with a kernel that another file's kernel goes into."""
    copy_packages(tmp_path)
    return tmp_path


def copy_packages(to: Path) -> None:
    """Modules that are compiled stay so, as their times are copied too."""
    passing = ("*.partial", "*.pyc.*")  # names that other processes give a file for a moment
    for source in (PACKAGE, ROOT / "mxref"):
        left_out = shutil.ignore_patterns("*.kernel", "vectors", *passing)
        shutil.copytree(source, to / source.name, ignore=left_out)
    shutil.copytree(ROOT / "mxref/vectors", to / "mxref/vectors", ignore=shutil.ignore_patterns(*passing))
    (to / "mxref_numba/inner.py").write_text(INNER)
    (to / "mxref_numba/outer.py").write_text(OUTER)
    (to / "mxref_numba/more").mkdir()
    (to / "mxref_numba/more/deep.py").write_text("")


@pytest.fixture(scope="module")
def first_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Such a copy after a process that compiled the kernels, and what that process said."""
    where = tmp_path_factory.mktemp("first")
    copy_packages(where)
    return where, run(where)


@pytest.fixture
def compiled(first_process: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that copy, whose kernels are compiled."""
    where = tmp_path / "compiled"
    shutil.copytree(first_process[0], where)
    return where


def python(where: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=where, capture_output=True, text=True, timeout=200
    )


def run(where: Path, **variables: str) -> Any:
    done = python(where, RUN, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kernel_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*.kernel")}


def test_second_process_compiles_nothing(first_process: tuple[Path, Any]) -> None:
    where, first = first_process
    assert (first["result"], first["hits"], first["misses"], first["warnings"]) == (6, 0, 1, [])
    assert Path(first["folder"]) == where / "mxref_numba/__pycache__"
    files = kernel_files(where)
    second = run(where)
    assert (second["result"], second["hits"], second["misses"]) == (6, 1, 0)
    assert kernel_files(where) == files


@pytest.mark.parametrize(
    "edited", ["mxref_numba/inner.py", "mxref_numba/more/deep.py", "mxref/formats/elements.py"]
)
def test_an_edit_anywhere_compiles_anew(compiled: Path, edited: str) -> None:
    before = kernel_files(compiled)
    assert before
    file = compiled / edited
    file.write_text(file.read_text().replace("LIMIT = 3", "LIMIT = 4") + "\n# edited\n")
    after = run(compiled)
    assert (after["result"], after["misses"]) == (8 if edited.endswith("inner.py") else 6, 1)
    assert not before.keys() & kernel_files(compiled).keys(), "files of the old sources are removed"


def test_an_edit_of_what_no_kernel_sees_compiles_nothing(compiled: Path) -> None:
    with open(compiled / "mxref/explain.py", "a") as f:
        f.write("# edited\n")
    assert run(compiled)["misses"] == 0


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-9] + b"damaged!!"]
)
def test_a_damaged_file_is_compiled_and_written_anew(compiled: Path, damage: Any) -> None:
    folder = compiled / "mxref_numba/__pycache__"
    files = kernel_files(folder)
    assert files
    for name, data in files.items():
        (folder / name).write_bytes(damage(data))
    again = run(compiled)
    assert (again["result"], again["misses"]) == (6, 1)
    assert kernel_files(folder).keys() == files.keys()
    assert run(compiled)["misses"] == 0


def test_folder_is_the_one_asked_for(copied: Path) -> None:
    wanted = copied / "elsewhere"
    assert wanted in Path(run(copied, NUMBA_CACHE_DIR=str(wanted))["folder"]).parents
    assert run(copied, NUMBA_CACHE_DIR=str(wanted))["misses"] == 0


def obstruct(folder: Path) -> None:
    """Put a file where the folder is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way of the folder")


def test_a_package_that_cannot_be_written_caches_in_the_users_folder(copied: Path) -> None:
    obstruct(copied / "mxref_numba/__pycache__")
    home = copied / "home"
    assert home in Path(run(copied, XDG_CACHE_HOME=str(home))["folder"]).parents
    assert run(copied, XDG_CACHE_HOME=str(home))["misses"] == 0


def test_no_folder_at_all_is_said_once_and_costs_only_time(copied: Path) -> None:
    obstruct(copied / "mxref_numba/__pycache__")
    found = run(copied, XDG_CACHE_HOME="/dev/null", HOME="/dev/null")
    assert found["result"] == 6
    assert len(found["warnings"]) == 1
    assert "set NUMBA_CACHE_DIR" in found["warnings"][0]


def test_a_folder_asked_for_that_others_can_write_is_refused_and_that_is_said(copied: Path) -> None:
    wanted = copied / "shared"
    wanted.mkdir()
    assert run(copied, NUMBA_CACHE_DIR=str(wanted))["misses"] == 1
    wanted.chmod(0o777)
    before = kernel_files(copied)
    found = run(copied, NUMBA_CACHE_DIR=str(wanted))
    assert (found["result"], found["hits"], found["folder"]) == (6, 0, None)
    (said,) = found["warnings"]
    assert f"({wanted} can be written by every user)" in said
    assert "set NUMBA_CACHE_DIR to a folder that you alone can write" in said
    assert kernel_files(copied) == before, "nothing is written there either"


def test_a_package_that_others_can_write_caches_in_the_users_folder(compiled: Path) -> None:
    first = compiled / "mxref_numba/__pycache__"
    first.chmod(0o777)
    home = compiled / "home"
    found = run(compiled, XDG_CACHE_HOME=str(home))
    assert home in Path(found["folder"]).parents
    assert (found["result"], found["hits"], found["warnings"]) == (6, 0, [])
    code = (
        "from mxref_numba.outer import twice\ntwice(10)\n"
        "from mxref_numba.backend import backend\nprint(backend.details())"
    )
    done = python(compiled, code, XDG_CACHE_HOME=str(home))
    assert f"{first} can be written by every user" in done.stdout, done.stderr
    home.chmod(0o777)
    nowhere = run(compiled, XDG_CACHE_HOME=str(home))
    assert nowhere["result"] == 6
    (said,) = nowhere["warnings"]
    assert f"{first} can be written by every user; {home} can be written by every user" in said


def test_a_kernel_that_others_can_write_is_compiled_anew(tmp_path: Path) -> None:
    files = kernel_cache._KernelFiles(tmp_path, "kernel")
    files.save("key", "value")
    assert files.load("key") == "value"
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    assert files.load("key") is None
    files.save("key", "value")
    assert files.load("key") == "value"


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    files = kernel_cache._KernelFiles(tmp_path, "kernel")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            files.save("key", "value")
    assert not list(tmp_path.iterdir())
    files.save("key", "value")
    assert (files.load("key"), files.load("other")) == ("value", None)


def test_every_kernel_of_the_package_is_kept_by_this_cache() -> None:
    assert KERNELS
    assert all(isinstance(kernel._cache, kernel_cache.KernelCache) for kernel in KERNELS)
    for file in PACKAGE.rglob("*.py"):
        named = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
        assert file.name == "kernels.py" or not named & {"njit", "jit", "vectorize", "guvectorize"}, file.name


def test_constants_come_only_from_modules_that_the_stamp_covers() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mxref":
                constants = [alias.name for alias in node.names if alias.name.isupper()]
                module = (node.module or "").removeprefix("mxref.").replace(".", "/")
                assert not constants or module in kernel_cache.CONSTANTS_FROM, (
                    f"{file.name}: {constants} of {module}"
                )
