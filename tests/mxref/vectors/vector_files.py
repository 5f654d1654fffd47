"""The golden vectors of this repository, and what their tests do with copies of them."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from mxref.cli import main
from places import ROOT

VECTORS = ROOT / "spec" / "vectors"


def cli(*args: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["vectors", *map(str, args)], env={"COLUMNS": "120"})
    return done.exit_code, done.stdout, done.stderr


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))
