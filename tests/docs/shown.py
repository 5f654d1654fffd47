"""What the pages show: their code blocks and commands, and a session that runs them as a reader would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxref.cli import main
from places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.rst")
    if not {"spec", "_measured", "_build"} & set(path.relative_to(DOCS).parts)
)
_BLOCK = re.compile(r"^( *)\.\. code-block:: (\w+)\n((?:\1   :.*\n)*)\n((?:\1   .*\n|\n)+)", re.MULTILINE)
_ASSIGNED = re.compile(r"[A-Z_]\w*=")
_SECONDS = re.compile(r"\d+(\.\d+)? s\b")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    caption: str
    """The name of its file; empty if the page gives none."""
    text: str

    def steps(self) -> list[Step]:
        """Return the commands of a console block with what the page shows of their output."""
        found: list[tuple[str, list[str]]] = []
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif found:
                found[-1][1].append(line)
        return [Step(command, tuple(output)) for command, output in found]


@dataclass(frozen=True)
class Step:
    """A command, and the lines that the page shows below it."""

    command: str
    output: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The words of the command, without a remark."""
        return shlex.split(self.command, comments=True)

    @property
    def program(self) -> list[str]:
        """The words after the variables that are set for the command, up to a redirection."""
        words = self.words
        while words and _ASSIGNED.match(words[0]):
            words = words[1:]
        ends = [i for i, word in enumerate(words) if word in (">", "|", "2>")]
        return words[: ends[0]] if ends else words


@cache
def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page in their order, without their indentation."""
    found = []
    for _, language, options, body in _BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        caption = re.search(r":caption: (\S+)", options)
        found.append(Block(language, caption[1] if caption else "", textwrap.dedent(body).strip("\n") + "\n"))
    return found


def steps(page: str) -> list[Step]:
    """Return all commands of a page."""
    return [step for block in blocks(page) if block.language == "console" for step in block.steps()]


class Session:
    """A folder in which the blocks of a page are saved and run, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.delenv("MXREF_BACKEND", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    def save(self, name: str, text: str) -> None:
        """Write a file of the page."""
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, step: Step, *more: str, code: int = 0) -> str:
        """Run a command, with more arguments, and return what it prints; the exit code and the shown lines must fit."""
        words = [file for word in step.program for file in sorted(glob(word)) or [word]] + [*more]
        assigned = dict(word.split("=", 1) for word in step.words[: step.words.index(words[0])])
        if words[0] == "mxref":
            done = CliRunner().invoke(main, words[1:], env={"COLUMNS": "80", **assigned})
            assert done.exit_code == code, (step.command, done.output)
            printed = done.stdout
        elif words[0] == "python" and words[1].endswith(".py"):
            printed = self._python(words[1])
        else:
            done_ = subprocess.run(
                [sys.executable, "-m", *words] if words[0] == "pytest" else words,
                env=os.environ | assigned, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done_.returncode == code, (step.command, done_.stdout, done_.stderr)
            printed = done_.stdout
        if ">" in step.words:
            self.save(step.words[step.words.index(">") + 1], printed)
        require_shown(step.output, printed)
        return printed

    def _python(self, file: str) -> str:
        """Run a script in this process; modules of the folder are read anew."""
        said = io.StringIO()
        local = {path.stem for path in self.folder.glob("*.py")}
        sys.path.insert(0, str(self.folder))
        try:
            with contextlib.redirect_stdout(said), without_bytecode():
                runpy.run_path(str(self.folder / file), run_name="__main__")
        finally:
            sys.path.remove(str(self.folder))
            for name in local:
                sys.modules.pop(name, None)
        return said.getvalue()


@contextlib.contextmanager
def without_bytecode():
    """Write no bytecode: a file that is changed within a second would be taken for the old one."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def require_shown(shown: tuple[str, ...], printed: str) -> None:
    """The lines of the page are printed in their order; `...` stands for any others, and seconds may differ."""

    def same(line: str) -> str:
        return _SECONDS.sub("# s", line.rstrip())

    rest = [same(line) for line in printed.splitlines() if line.strip()]
    anywhere = False
    for line in filter(str.strip, shown):
        if line.strip() == "...":
            anywhere = True
            continue
        assert same(line) in rest, (line, printed)
        at = rest.index(same(line))
        assert anywhere or at == 0, (line, printed)
        rest, anywhere = rest[at + 1 :], False
