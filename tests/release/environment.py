"""An environment that holds a wheel and the distributions that it asks for, linked from the one that runs this."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.errors import ReleaseError
from release.network import Cut


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder in which its commands run."""

    folder: Path
    home: Path
    cut: Cut

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.folder / "bin"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its commands: none of the caller's but the number of threads."""
        kept = {
            name: os.environ[name] for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ
        }
        path = f"{self.bin}{os.pathsep}{os.defpath}"
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", "COLUMNS": "80", **kept}

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Return what a command of the environment gives, without a network."""
        command = [*self.cut.words, str(self.bin / words[0]), *words[1:]]
        return subprocess.run(
            command, cwd=self.home, env=self.variables, capture_output=True, text=True, timeout=timeout
        )


def make_environment(folder: Path, wheel: Path, extras: tuple[str, ...], cut: Cut) -> Environment:
    """Return a new environment of a wheel and the distributions that its extras ask for, and these in turn.

    The distributions are links to the installed ones, so nothing is downloaded or copied.

    Raises:
        ReleaseError: a required distribution is not installed here, or pip cannot install the wheel.
    """
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    made = Environment(folder / "venv", folder / "empty", cut)
    made.home.mkdir()
    packages = next((made.folder / "lib").glob("python3*/site-packages"))
    for name in sorted(required(wheel, extras)):
        _link(distribution(name), packages)
    if cut.sitecustomize:
        (packages / "sitecustomize.py").write_text(cut.sitecustomize, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(made.bin / "python"), "--disable-pip-version-check"]
    done = subprocess.run(
        [*cut.words, *pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"pip cannot install {wheel.name}: {done.stderr.strip()}")
    return made


def required(wheel: Path, extras: tuple[str, ...]) -> set[str]:
    """Return the names of the distributions that a wheel with extras needs on this machine, all the way down.

    Raises:
        ReleaseError: one is not installed here.
    """
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=False)
    found: dict[str, set[str]] = {}
    _follow(metadata.requires_dist or [], set(extras), found)
    return set(found)


def _follow(requirements: list[Requirement], extras: set[str], found: dict[str, set[str]]) -> None:
    for requirement in requirements:
        if not any(_applies(requirement, extra) for extra in extras | {""}):
            continue
        name = canonicalize_name(requirement.name)
        known = found.setdefault(name, set())
        if known and requirement.extras <= known:
            continue
        known |= {"", *requirement.extras}
        try:
            below = distribution(name).requires or []
        except PackageNotFoundError as err:
            raise ReleaseError(f"{requirement} is required, and not installed here: make env") from err
        _follow([Requirement(text) for text in below], known, found)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _link(source: Distribution, packages: Path) -> None:
    """Link a distribution's folders and modules into a site-packages."""
    for name in sorted(set(_tops(source))):
        target = packages / name
        if not target.exists():
            target.symlink_to(Path(str(source.locate_file(name))).resolve())


def _tops(source: Distribution) -> Iterator[str]:
    if source.files is None:
        raise ReleaseError(f"{source.name} has no list of its files: install it by pip")
    for file in source.files:
        if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pth":
            yield file.parts[0]
