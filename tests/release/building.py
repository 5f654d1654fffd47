"""The distributions of mxref, and the wheel of its golden vectors, built by hatchling without a download."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from release.errors import ReleaseError


@dataclass(frozen=True)
class Built:
    """The files that are published."""

    sdist: Path
    wheel: Path
    vectors: Path
    """The wheel of `mxref-vectors`."""


def build(source: Path, out: Path) -> Built:
    """Build the distributions of a checkout into a folder; files of earlier builds there are deleted."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.whl", "*.tar.gz"):
        for old in out.glob(pattern):
            old.unlink()
    _hatchling(source, out)
    _hatchling(source / "spec", out, "--target", "wheel")
    return Built(*(_only(out, pattern) for pattern in ("*.tar.gz", "mxref-*.whl", "mxref_vectors-*.whl")))


def require_same_wheel(built: Built) -> None:
    """Raise ReleaseError unless the source distribution builds the same wheel, byte for byte."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with tarfile.open(built.sdist) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        _hatchling(source, folder / "dist", "--target", "wheel")
        again = _only(folder / "dist", "*.whl")
        if again.name != built.wheel.name or again.read_bytes() != built.wheel.read_bytes():
            raise ReleaseError(
                f"{built.sdist.name} builds another wheel than the checkout: compare `unzip -lv` of both"
            )


def _hatchling(source: Path, out: Path, *more: str) -> None:
    if shutil.which("git") is None and (source / ".git").exists():
        raise ReleaseError("git is needed to leave ignored files out of the source distribution: install git")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(out.resolve()), *more],
        cwd=source, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"hatchling cannot build {source}: {done.stderr.strip()[-2000:]}")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ReleaseError(f"expected one {pattern} in {folder}, found {len(found)}")
    return found[0]
