"""The checks of a release: each passes on what is right, and fails on a planted fault."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mxref._version import SPECIFICATION
from places import ROOT
from release import contents, versions
from release.environment import Environment, required
from release.errors import ReleaseError
from release.network import NAMESPACE, PYTHON, REFUSING, Cut, find_cut, require_cut
from release.trial import ALONE, TRAINING, Step, require_step

METADATA = """Metadata-Version: 2.4
Name: mxref
Version: 0.1.0
Requires-Dist: click>=8.1
Requires-Dist: matplotlib; extra == 'training'
Requires-Dist: {other}
"""


def make_wheel(folder: Path, files: dict[str, bytes], other: str = "rich") -> Path:
    wheel = folder / "mxref-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("mxref-0.1.0.dist-info/METADATA", METADATA.format(other=other))
    return wheel


def test_all_files_state_one_version():
    stated = versions.stated(ROOT)
    assert {"pyproject.toml", "mxref/_version.py", "CITATION.cff"} <= set(stated)
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions.require_one(stated))


@pytest.fixture
def checkout(tmp_path) -> Path:
    for folder in ("mxref", "spec"):
        (tmp_path / folder).mkdir()
    for name in ("pyproject.toml", "mxref/_version.py", "CITATION.cff", "spec/clauses.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    released = f'version = "{SPECIFICATION}"\n' + (tmp_path / "spec/clauses.lock").read_text()
    (tmp_path / "spec/released.lock").write_text(released)
    return tmp_path


@pytest.mark.parametrize("name", ["pyproject.toml", "mxref/_version.py", "CITATION.cff", "CHANGELOG.md"])
def test_another_version_in_one_file_is_named(name, checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-11-22\n")
    file = checkout / name
    file.write_text(file.read_text().replace("0.1.0", "0.2.0"))
    with pytest.raises(ReleaseError, match=rf"the versions differ: .*{re.escape(name)} 0\.2\.0"):
        versions.require_one(versions.stated(checkout))


@pytest.mark.parametrize(
    ("changelog", "unreleased", "ready"),
    [
        ("# Changelog\n\n## Unreleased\n\n### Added\n", True, False),
        ("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-11-22\n", True, False),
        ("# Changelog\n\n## 0.1.0\n", False, False),
        ("# Changelog\n\n## 0.1.0 - 2026-11-22\n\n## 0.0.9 - 2026-01-01\n", False, True),
        ("# Changelog\n\n## [0.1.0] - 2026-11-22\n", False, True),
        ("# Changelog\n", False, False),
    ],
)
def test_a_release_has_the_first_section_of_the_changelog(changelog, unreleased, ready, checkout):
    (checkout / "CHANGELOG.md").write_text(changelog)
    assert versions.unreleased(checkout) is unreleased
    if ready:
        versions.require_released(checkout, "0.1.0")
    else:
        with pytest.raises(ReleaseError, match="must begin with the section '## 0.1.0 - YYYY-MM-DD'"):
            versions.require_released(checkout, "0.1.0")


@pytest.mark.parametrize("name", ["mxref/_version.py", "CITATION.cff", "spec/released.lock"])
def test_another_version_of_the_specification_in_one_file_is_named(name, checkout):
    assert set(versions.specification(checkout).values()) == {SPECIFICATION}
    file = checkout / name
    file.write_text(file.read_text().replace(SPECIFICATION, "9.0.0"))
    with pytest.raises(ReleaseError, match=rf"the versions differ: .*{re.escape(name)} 9\.0\.0"):
        versions.require_one(versions.specification(checkout))


def test_a_release_has_frozen_its_clauses(checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 - 2026-11-22\n")
    versions.require_released(checkout, "0.1.0")
    lock = checkout / "spec/released.lock"
    lock.write_text(lock.read_text().replace('"scale.rule.floor" = "', '"scale.rule.floor" = "0'))
    for spoil in (lambda: None, lock.unlink):
        spoil()
        with pytest.raises(
            ReleaseError, match="does not hold the clauses of this release: run `make freeze`"
        ):
            versions.require_released(checkout, "0.1.0")


@pytest.fixture
def repository(tmp_path) -> Path:
    root = tmp_path / "checkout"
    for name in (
        "mxref/a.py",
        "backends/b/kernel.c",
        "backends/README.md",
        "spec/vectors/scale.json",
        "docs/page.rst",
        "tests/t.py",
        "LICENSE",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


FILES = {
    "mxref/a.py": b"mxref/a.py",
    "b/kernel.c": b"backends/b/kernel.c",
    "mxref/_vectors/scale.json": b"spec/vectors/scale.json",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"b/kernel.c": None}, "lacks b/kernel.c"),
        ({"README.md": b"backends/README.md"}, "has README.md, which git does not track"),
        ({"mxref/a.py": b"stale"}, "has other bytes in mxref/a.py"),
    ],
)
def test_the_wheel_has_every_tracked_file_of_the_packages_and_nothing_else(
    change, message, repository, tmp_path
):
    files = {name: data for name, data in (FILES | change).items() if data is not None}
    wheel = make_wheel(tmp_path, files)
    if message is None:
        assert contents.require_files(wheel, repository) == len(FILES)
    else:
        with pytest.raises(ReleaseError, match=re.escape(message)):
            contents.require_files(wheel, repository)


def test_the_wheel_of_the_vectors_has_the_vectors_and_the_licence(repository, tmp_path):
    files = {"mxref_vectors/scale.json": b"spec/vectors/scale.json", "mxref_vectors/LICENSE": b"LICENSE"}
    assert contents.require_files(make_wheel(tmp_path, files), repository, contents.VECTORS) == 2
    more = files | {"mxref_vectors/__init__.py": b""}
    with pytest.raises(ReleaseError, match=r"has mxref_vectors/__init__\.py, which git does not track"):
        contents.require_files(make_wheel(tmp_path, more), repository, contents.VECTORS)


def test_what_the_checkout_tracks_holds_every_kind_of_data():
    held = set(contents.expected_in_wheel(contents.tracked_files(ROOT)))
    for kind in (
        "mxref_training/recipes/mxfp4_h16.toml", "mxref_training/presets/tiny.toml",
        "mxref_training/ladders/paper.toml", "mxref/_vectors/scale.json", "mxref/explain/explorer/index.html",
        "mxref_training/report/page.html.j2", "mxref_training/report/style.css", "mxref/py.typed",
    ):  # fmt: skip
        assert kind in held, kind
    assert not any(name.startswith(("README", "tests", "docs")) for name in held)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{quote}/{folder}/anna" for folder in ("home", "Users", "root", "work", "mnt") for quote in " '("),
        *(f"{drive}:\\Users\\anna" for drive in "CD"),
    ],
)
def test_a_path_of_a_machine_is_found(text, tmp_path):
    data = f"first line\n{text}\n".encode()
    wheel = make_wheel(tmp_path, {"mxref/a.py": data})
    with pytest.raises(ReleaseError, match="names a folder of a machine: mxref/a.py"):
        contents.require_no_machine_paths(wheel)
    sdist = tmp_path / "mxref-0.1.0.tar.gz"
    (tmp_path / "a.py").write_bytes(data)
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "a.py", "mxref-0.1.0/mxref/a.py")
    with pytest.raises(ReleaseError, match="mxref-0.1.0/mxref/a.py"):
        contents.require_no_machine_paths(sdist)


@pytest.mark.parametrize(
    "text",
    ["/home/me/x", "/tmp/x", "https://a.org/work/x", "runs/work/x", "~/work/x", "$A/work/x", "/usr/bin"],
)
def test_other_paths_are_not_those_of_a_machine(text):
    assert contents.machine_paths({"a": text.encode()}, (Path("/"), Path("/srv/here"))) == []


def test_the_folder_of_the_checkout_is_a_path_of_a_machine():
    own = (Path("/srv/here"),)
    assert contents.machine_paths({"a": b"at /srv/here/x and /srv/heretic"}, own) == ["a: /srv/here"]


def test_what_a_wheel_requires_is_followed_all_the_way_down(tmp_path):
    wheel = make_wheel(tmp_path, {})
    assert {"click", "rich", "pygments"} <= required(wheel, ())
    assert "matplotlib" not in required(wheel, ())
    assert {"matplotlib", "pillow"} <= required(wheel, ("training",))
    with pytest.raises(ReleaseError, match="no-such-distribution is required, and not installed"):
        required(make_wheel(tmp_path, {}, other="no-such-distribution"), ())
    assert Requirement("click").marker is None


def outside(tmp_path: Path, cut: Cut, sitecustomize: str = "") -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(sitecustomize)
    return {"PYTHONPATH": str(tmp_path)}


def test_the_cut_that_is_claimed_is_tried(tmp_path):
    python = Path(sys.executable)
    found = find_cut()
    assert found.name in (NAMESPACE, PYTHON)
    require_cut(found, python, outside(tmp_path, found, found.sitecustomize))
    refusing = Cut(PYTHON, sitecustomize=REFUSING)
    require_cut(refusing, python, outside(tmp_path, refusing, refusing.sitecustomize))
    for claimed in (Cut(NAMESPACE), Cut(NAMESPACE, ("env",)), Cut(PYTHON)):
        with pytest.raises(ReleaseError, match="said to be cut off .*, but can be reached"):
            require_cut(claimed, python, outside(tmp_path, claimed))


def test_a_refused_python_opens_pipes_and_unix_sockets_and_no_others(tmp_path):
    code = (
        "import socket, subprocess, sys\n"
        "a, b = socket.socketpair()\n"
        "a.sendall(b'x'); assert b.recv(1) == b'x'\n"
        "assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout.strip() == b'1'\n"
        "for call in (lambda: socket.getaddrinfo('localhost', 80),\n"
        "             lambda: socket.create_connection(('127.0.0.1', 9)),\n"
        "             lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))):\n"
        "    try: call()\n"
        "    except OSError as err: assert str(err) == 'the network is cut off', err\n"
        "    else: sys.exit('not refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=outside(tmp_path, Cut(PYTHON), REFUSING),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_step_that_prints_something_else_fails(tmp_path):
    here = Environment(Path(sys.prefix), tmp_path, Cut("none"))
    words = ("python", "-c", "print('seen'); raise SystemExit(3)")
    require_step(here, Step(words, "seen", 3))
    for wrong in (Step(words, "seen"), Step(words, "unseen", 3)):
        with pytest.raises(ReleaseError, match="exit code 3, expected"):
            require_step(here, wrong)


def test_the_trial_explains_conforms_and_trains():
    tried = [" ".join(step.words) for step in (*ALONE, *TRAINING)]
    for command in (
        "mxref explain 1 2 3",
        "mxref conform --backend reference --quick",
        "mxref train tiny --set",
    ):
        assert any(words.startswith(command) for words in tried)
