"""The page from text to Transformers: its commands, in its order; on one process, and, marked `long`, as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from exported import invoke
from places import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "end-to-end.rst").read_text(encoding="utf-8")
BLOCK = re.compile(r"\.\. code-block:: (console|python|text)\n\n((?:   .*\n|\n)+)")
RANKS = ["torchrun", "--nproc-per-node", "2", "--no-python"]
PATIENCE = 240


@dataclass(frozen=True)
class Block:
    """A block of the page: a command or a program, and what it prints as far as the page shows it."""

    kind: str
    words: list[str]
    text: str


def blocks() -> list[Block]:
    found = []
    for kind, body in BLOCK.findall(PAGE):
        text = textwrap.dedent(body).strip() + "\n"
        command, _, printed = text.partition("\n") if kind == "console" else ("", "", text)
        found.append(Block(kind, command.removeprefix("$ ").split(), printed))
    return found


def assert_prints(block: Block, said: str) -> None:
    """What the page shows is printed, in this order; numbers and digests may be others."""

    def without_numbers(line: str) -> str:
        return re.sub(r"\b[0-9a-f]{12}\b|[\d.,:]*\d", "#", line).strip()

    printed = iter([without_numbers(line) for line in said.splitlines()])
    for line in block.text.splitlines():
        if line != "...":
            assert without_numbers(line) in printed, (line, said)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MXREF_BACKEND", raising=False)
    exec(compile(blocks()[1].text, "the page", "exec"), {})
    return tmp_path


def test_no_document_of_the_text_stands_there_twice(folder: Path) -> None:
    lines = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines)
    assert 600_000 < (folder / "text.jsonl").stat().st_size < 800_000


def generated(program: Block, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    exec(compile(program.text, "the page", "exec"), {})
    return capsys.readouterr().out


def test_the_commands_on_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The run is shorter and is not killed."""
    _, _, plan, train, kill, fallen, again, export, program, text = blocks()
    assert [kill.words[0], fallen.kind, again.words, text.kind] == ["kill", "text", train.words, "text"]
    assert (plan.words[0], export.words[0]) == ("mxref", "mxref")
    dry = invoke(*plan.words[1:])
    assert dry.exit_code == 0, dry.output
    assert set(plan.text.splitlines()) - {"..."} <= {line.rstrip() for line in dry.stdout.splitlines()}
    assert train.words[:5] == [*RANKS, "mxref"]
    done = invoke(*train.words[5:], "--set", "run.steps=2", "--recipe", "bf16", "--set", "run.eval_every=2")
    assert done.exit_code == 0, done.output
    folder = invoke(*export.words[1:])
    assert folder.exit_code == 0, folder.output
    assert_prints(export, folder.stdout)
    assert generated(program, capsys).startswith("Return the")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_as_they_stand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs have 60 steps in place of 400, and the first is killed when its first checkpoint is there."""
    _, _, _, train, kill, fallen, again, export, program, _ = blocks()
    steps = ["--set", "run.steps=60"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", *RANKS[1:]]

    def start(block: Block) -> subprocess.Popen[str]:
        command = [*launcher, *block.words[4:], *steps]
        return subprocess.Popen(
            command, env=quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def printed(process: subprocess.Popen[str]) -> str:
        try:
            return process.communicate(timeout=PATIENCE)[0]
        finally:
            process.kill()

    first, until = start(train), time.monotonic() + PATIENCE
    while not (folder / "runs" / "mine" / "checkpoints" / "latest").exists():
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)
    subprocess.run(["bash", "-c", " ".join(kill.words)], check=True)
    said = printed(first)
    assert first.returncode != 0
    assert_prints(Block("text", [], "\n".join(train.text.splitlines()[:2])), said)
    shown = fallen.text.splitlines()
    assert_prints(Block("text", [], "\n".join(shown[shown.index("...") :])), said)
    second = start(again)
    said = printed(second)
    assert second.returncode == 0, said
    assert_prints(again, said)
    whole = (folder / "runs" / "mine" / "metrics.jsonl").read_bytes()
    undisturbed = start(Block("console", [*train.words[:-1], "runs/whole"], ""))
    assert printed(undisturbed)
    assert (folder / "runs" / "whole" / "metrics.jsonl").read_bytes() == whole
    folder_of_export = invoke(*export.words[1:])
    assert_prints(export, folder_of_export.stdout)
    assert generated(program, capsys).startswith("Return the")
