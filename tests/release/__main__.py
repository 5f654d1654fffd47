"""Build the distributions and check that they can be published.

    PYTHONPATH=tests python -m release [--out DIR] [--version X.Y.Z]

`make release` does. The exit code is 1 if a check fails. With `--version`, the checkout must be ready for that release:
no uncommitted change, and a changelog that begins with its section.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from places import ROOT
from release import contents, trial, versions
from release.building import Built, build, require_same_wheel
from release.environment import make_environment
from release.errors import ReleaseError
from release.network import find_cut


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Folder of the distributions."
)
@click.option("--version", metavar="X.Y.Z", help="The release that is to be published.")
def main(out: Path, version: str | None) -> None:
    """Build the distributions and check that they can be published."""
    try:
        check(out, version or "")
    except ReleaseError as err:
        raise click.ClickException(str(err)) from err


def check(out: Path, release: str) -> None:
    """Build into a folder and run every check; ReleaseError on the first that fails."""
    said = _timed()
    if release:
        _require_committed()
        versions.require_released(ROOT, release)
    version = versions.require_one(versions.stated(ROOT))
    specification = versions.require_one(versions.specification(ROOT))
    said(f"version {version}, specification {specification} in all files")
    built = build(ROOT, out)
    require_same_wheel(built)
    said(f"{built.sdist.name} and {built.wheel.name}; the first builds the second, byte for byte")
    count = contents.require_files(built.wheel, ROOT)
    own = contents.folders_of_this_machine(ROOT)
    vectors = contents.require_files(built.vectors, ROOT, contents.VECTORS)
    for path in (built.sdist, built.wheel, built.vectors):
        contents.require_no_machine_paths(path, own)
    said(f"{count} files in the wheel, all of them tracked; no path of a machine")
    said(f"{vectors} files in {built.vectors.name}")
    _try_wheels(built, f"{version}, specification {specification}")
    click.echo(f"{built.sdist}\n{built.wheel}\n{built.vectors}")
    if versions.unreleased(ROOT):
        click.echo(
            "CHANGELOG.md begins with `Unreleased`: give its section version and date before you publish"
        )


def _try_wheels(built: Built, version: str) -> None:
    """Install the wheel twice, with its dependencies and with those of training too, and try both at the same time.

    The wheel of the vectors has an environment of its own.
    """
    cut = find_cut()

    def tried(name: str, extras: tuple[str, ...], steps: tuple[trial.Step, ...]) -> None:
        folder = Path(scratch, name)
        folder.mkdir()
        made = make_environment(folder, built.wheel, extras, cut)
        trial.require_trial(made, steps, ROOT, version, _timed(f"{name}: "))

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as both:
        began = [
            both.submit(tried, "training", trial.EXTRAS, trial.TRAINING),
            both.submit(tried, "alone", (), trial.ALONE),
        ]
        folder = Path(scratch, "vectors")
        folder.mkdir()
        trial.require_step(make_environment(folder, built.vectors, (), cut), trial.VECTORS)
        for one in began:
            one.result()


def _timed(place: str = "") -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since the last one."""
    last = time.monotonic()

    def said(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        click.echo(f"{now - last:5.1f} s  {place}{line}")
        last = now

    return said


def _require_committed() -> None:
    done = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    )
    if done.stdout:
        raise ReleaseError(f"the checkout has uncommitted changes:\n{done.stdout}")


if __name__ == "__main__":
    main()
