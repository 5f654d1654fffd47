"""Completion in the shell: commands, options and the names that they take, quickly and without an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mxref import DIALECTS
from mxref.cli import main
from mxref.cli.completion import SHELLS, VARIABLE
from mxref.conformance import CLAUSES
from mxref.recipe_files import shipped_recipes
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from mxref_training.lab.ladder import shipped

LADDERS = sorted(shipped())
PRESETS = ["demo", "lab_20m", "lab_50m", "llama31_70b", "llama31_8b", "tiny"]


def completed(line: str) -> list[tuple[str, str]]:
    """Return kind and value of what completes a line; its last word is incomplete."""
    *words, last = line.split(" ")
    assert words[0] == "mxref"
    items = ShellComplete(main, {}, "mxref", VARIABLE).get_completions(words[1:], last)
    return [(item.type, item.value) for item in items]


def values(line: str) -> list[str]:
    found = completed(line)
    assert {kind for kind, _ in found} <= {"plain"}, found
    return [value for _, value in found]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_commands_are_completed_with_their_first_sentences():
    items = ShellComplete(main, {}, "mxref", VARIABLE).get_completions([], "")
    assert [item.value for item in items] == main.list_commands(None)
    assert {item.value: item.help for item in items}[
        "explain"
    ] == "Explain how a block is quantized, bit by bit."
    assert values("mxref tr") == ["train"]
    assert values("mxref --ver") == ["--version"]
    assert values("mxref vectors v") == ["verify"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mxref explain --dialect ", list(DIALECTS)),
        ("mxref compare a b c --spec n", ["nvidia"]),
        ("mxref explain --scale-rule ", [rule.value for rule in ScaleRule]),
        ("mxref explain --rounding ", [rounding.value for rounding in Rounding]),
        ("mxref conform --backend ", ["numba", "reference", "triton"]),
        ("mxref conform --backend=n", ["numba"]),
        ("mxref conform --clause scale.r", [c for c in CLAUSES if c.startswith("scale.r")]),
        ("mxref conform --jobs a", ["auto"]),
        ("mxref warm-up --backend n", ["numba"]),
        ("mxref recipes ", list(shipped_recipes())),
        ("mxref train ", PRESETS),
        ("mxref train t", ["tiny"]),
        ("mxref train --recipe mxfp4", ["mxfp4", "mxfp4_h16", "mxfp4_h32"]),
        ("mxref train tiny --backend r", ["reference"]),
        ("mxref train tiny --data b", ["builtin"]),
        ("mxref ablate ", LADDERS),
        ("mxref ablate paper --arms m", ["mxfp8"]),
        ("mxref ablate paper --arms all,all-h", ["all,all-h16", "all,all-h32"]),
        ("mxref probe x --ladder ts", ["tseng"]),
        ("mxref export a b --dialect o", ["ocp"]),
        ("mxref export a b --recipe bf", ["bf16"]),
        ("mxref completion ", list(SHELLS)),
    ],
)
def test_values_are_completed(line, expected):
    assert values(line) == expected


def test_files_stand_beside_names_and_the_shell_completes_other_paths():
    for name in ("mine.toml", "text.jsonl", "mine.py"):
        Path(name).touch()
    assert values("mxref train ") == [*PRESETS, "mine.toml"]
    assert values("mxref train --recipe mi") == ["mine.toml"]
    assert values("mxref train --data t") == ["text.jsonl"]
    assert values("mxref conform --backend m") == ["mine.py"]
    assert completed("mxref train --recipe configs/") == [("file", "configs/")]


def test_arms_are_those_of_the_ladder_that_the_line_names():
    Path("mine.toml").write_text('[[arm]]\nname = "one"\n[[arm]]\nname = "two"\n[[arm]]\nrecipe = "x"\n')
    assert values("mxref ablate mine.toml --arms ") == ["one", "two"]
    assert values("mxref ablate mine.toml --arms one,") == ["one,two"]
    Path("broken.toml").write_text("[[arm")
    for ladder in ("broken.toml", "absent.toml", "unknown", "--seeds 3"):
        assert values(f"mxref ablate {ladder} --arms o") == []


def test_folders_of_runs_are_completed():
    for name in (
        "runs/a/run.json",
        "runs/b/results.json",
        "runs/.c/run.json",
        "other/x.txt",
        "d/e/f/run.json",
    ):
        file = Path(name)
        file.parent.mkdir(parents=True)
        file.touch()
    for command in ("report", "probe", "export", "ablate paper --collect"):
        assert values(f"mxref {command} ") == ["runs/a", "runs/b"]
        assert values(f"mxref {command} runs/b") == ["runs/b"]
        assert completed(f"mxref {command} oth") == [("dir", "oth")]
    assert values("mxref report d/") == ["d/e/f"]


def test_a_line_that_is_wrong_completes_without_an_error(monkeypatch):
    assert values("mxref explian --dialect o") == []
    assert values("mxref train --out x --recipe bf") == ["bf16"]
    monkeypatch.setattr("mxref.cli._OWN", {"explain": "no_such_package.cli:go"})
    assert values("mxref explain --dialect o") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script_that_asks_by_the_variable(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"{VARIABLE}={shell}_complete" in result.stdout
    assert re.search(r"\bmxref\b", result.stdout)


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from mxref.cli import main\n"
        "try: main(prog_name='mxref')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'triton', 'rich', 'mxref.conformance'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    for words, count in (("mxref ", 1), ("mxref train --recipe m", 3)):
        asked = {VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert ("plain,train" if count == 1 else "plain,mxfp4_h16") in done.stdout.splitlines()
