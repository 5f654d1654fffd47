"""Build the documentation of several versions into folders beside each other.

    python docs/_ext/versions.py OUT REF...     as in: docs/_build/site main v0.1.0

Each REF is a branch or a tag. Its files are taken from git, so the working tree and its changes do not matter. The
packages that Sphinx imports come from REF too, and their dependencies from the environment. Versions that an earlier
call built stay, and stay in the list.

OUT has a folder for each version, `versions.json` with the list, the same list as `versions.js`, which pages can load
from the file system, and an index page that leads to the newest release, or to the first branch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from published import URL, VERSION

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (".", "backends", "training")
_INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mxref</title>
<meta http-equiv="refresh" content="0; url={first}/index.html">
<p><a href="{first}/index.html">mxref {first}</a></p>
</html>
"""


def build(out: Path, ref: str) -> Path:
    """Build the pages of a branch or tag, and return their folder."""
    folder = out / folder_of(ref)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        archive = source / "source.tar"
        subprocess.run(
            ["git", "archive", "--format=tar", f"--output={archive}", "--end-of-options", ref],
            cwd=ROOT,
            check=True,
        )
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
        paths = os.pathsep.join(str(source / package) for package in _PACKAGES)
        url = os.environ.get(URL)
        own = {URL: f"{url.rstrip('/')}/{folder.name}/"} if url else {}
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "sphinx",
                    "--fail-on-warning",
                    "--fresh-env",
                    "--quiet",
                    "-b",
                    "html",
                ),
                *("-d", str(source / "doctrees"), str(source / "docs"), str(folder)),
            ],
            env={**os.environ, "PYTHONPATH": paths, VERSION: folder.name, **own},
            cwd=source,
            check=True,
        )
    return folder


def is_commit(ref: str) -> bool:
    """Return whether git knows a branch, a tag or a commit of this name."""
    words = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 0


def folder_of(ref: str) -> str:
    """Return the name of the folder of a branch or tag: a tag `v0.1.0` is version 0.1.0."""
    return re.sub(r"^v(?=\d)", "", ref).replace("/", "-")


def write_list(out: Path) -> list[str]:
    """Write the list of the versions in a folder and an index page; return their names as the switch shows them."""
    names = sorted((path.parent.name for path in out.glob("*/objects.inv")), key=_order)
    versions = [{"folder": name, "pages": pages(out / name)} for name in names]
    text = json.dumps({"versions": versions})
    (out / "versions.json").write_text(f"{text}\n", encoding="utf-8")
    (out / "versions.js").write_text(f"window.mxrefVersions = {text};\n", encoding="utf-8")
    released = [name for name in names if name[0].isdigit()]
    if names:
        (out / "index.html").write_text(_INDEX.format(first=(released or names)[0]), encoding="utf-8")
    return names


def pages(folder: Path) -> list[str]:
    """Return the pages of a version, without those of the source code."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*.html")))
    return [path.as_posix() for path in found if path.parts[0] != "_modules"]


def _order(name: str) -> tuple[bool, tuple[int, ...], str]:
    """Return what sorts branches by name before releases, the newest release first."""
    numbers = tuple(-int(n) for n in re.findall(r"\d+", name)) if name[:1].isdigit() else ()
    return (bool(numbers), numbers, name)


def main() -> None:
    """Build the versions that the command line names."""
    parser = argparse.ArgumentParser(description="Build the documentation of several versions.")
    parser.add_argument("out", type=Path)
    parser.add_argument("refs", nargs="+", metavar="REF")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for ref in given.refs:
        if not is_commit(ref):
            parser.error(f"{ref} is no branch or tag of this repository")
    for ref in given.refs:
        print(build(given.out.resolve(), ref))
    print(given.out / "index.html", *write_list(given.out))


if __name__ == "__main__":
    main()
