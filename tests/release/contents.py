"""What is inside the distributions: every file of the packages and nothing else, and no path of a machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from release.errors import ReleaseError

FOLDERS = {
    "mxref": "mxref",
    "backends": "",
    "training": "",
    "spec/vectors": "mxref/_vectors",
}
"""Folders of the checkout that a user needs, and where the wheel has them."""
VECTORS = {"spec/vectors": "mxref_vectors", "LICENSE": "mxref_vectors/LICENSE"}
"""The same for the wheel of `mxref-vectors`."""
LEFT_OUT = {"backends/README.md"}
"""Files of these folders that belong to the checkout alone."""

_FOLDER_OF_A_USER = re.compile(
    rb"(?<![\w.~$}/-])/(?:home|Users|root|work|workspace|mnt)/(?!(?:me|you|user)\b)[\w.-]+|[A-Z]:\\Users\\\w+"
)
_SHOWN = 10


def expected_in_wheel(tracked: list[str], folders: Mapping[str, str] = FOLDERS) -> dict[str, str]:
    """Return where a wheel must have the tracked files of its folders: paths of the wheel to those of the checkout."""
    found = {}
    for name in tracked:
        for folder, target in folders.items():
            if f"{name}/".startswith(f"{folder}/") and name not in LEFT_OUT:
                found[str(PurePosixPath(target, name.removeprefix(folder).lstrip("/")))] = name
    return found


def tracked_files(checkout: Path) -> list[str]:
    """Return the paths of the files that git tracks and that exist."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=checkout, capture_output=True, check=True, text=True, timeout=60
    )
    return [name for name in done.stdout.split("\0") if name and (checkout / name).is_file()]


def require_files(wheel: Path, checkout: Path, folders: Mapping[str, str] = FOLDERS) -> int:
    """Return how many files of its folders a wheel has.

    Raises:
        ReleaseError: a tracked file is missing or has other bytes, or the wheel has a file that is not tracked.
    """
    expected = expected_in_wheel(tracked_files(checkout), folders)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not re.match(r"[^/]+\.dist-info/", name)}
        changed = sorted(
            name
            for name in held & expected.keys()
            if archive.read(name) != (checkout / expected[name]).read_bytes()
        )
    problems = [f"lacks {name}" for name in sorted(expected.keys() - held)]
    problems += [f"has {name}, which git does not track" for name in sorted(held - expected.keys())]
    problems += [f"has other bytes in {name}" for name in changed]
    _require_none(wheel.name, problems)
    return len(held)


def require_no_machine_paths(path: Path, own: tuple[Path, ...] = ()) -> int:
    """Return how many files a distribution holds.

    Args:
        path: a wheel, or a source distribution.
        own: folders of this machine that no file may name, such as the checkout.

    Raises:
        ReleaseError: a file has the path of a folder in somebody's home, or one of `own`.
    """
    contents = dict(_contents(path))
    _require_none(
        path.name, [f"names a folder of a machine: {line}" for line in machine_paths(contents, own)]
    )
    return len(contents)


def machine_paths(contents: Mapping[str, bytes], own: tuple[Path, ...] = ()) -> list[str]:
    """Return `file: path` for each path of a machine in the files."""
    folders = [re.escape(str(folder).encode()) + rb"(?!\w)" for folder in own if len(folder.parts) > 2]
    pattern = re.compile(b"|".join([_FOLDER_OF_A_USER.pattern, *folders]))
    return [
        f"{name}: {found[0].decode(errors='replace')}"
        for name, data in contents.items()
        for found in pattern.finditer(data)
    ]


def folders_of_this_machine(checkout: Path) -> tuple[Path, ...]:
    """Return the folders that no published file may name."""
    return (checkout, Path.home(), Path(sys.prefix))


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


def _require_none(what: str, problems: list[str]) -> None:
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ReleaseError(f"{what}\n  " + "\n  ".join(problems[:_SHOWN]) + more)
