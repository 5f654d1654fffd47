"""Under `torchrun` only `train` runs; every other command is refused once, by the first rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mxref.cli import main
from mxref.cli import ranks as cli_ranks

COMMANDS = [name for name in main.list_commands(main.make_context("mxref", ["conform"])) if name != "train"]


@pytest.fixture
def of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which a rank waits, in a folder of the test."""
    slept: list[float] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_ranks.time, "sleep", slept.append)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return slept


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_rank_refuses(command: str, of_two: list[float], tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [command, "paper"])
    assert found.exit_code == 2
    (line,) = found.stderr.splitlines()
    assert line.startswith(
        f"error: mxref {command} is for one process, but WORLD_SIZE = 2 says that torchrun has started 2 ranks: give "
        "the command without torchrun"
    )
    assert ("--gpus-per-run N gives each run N of them" in line) == (command == "ablate")
    assert not list(tmp_path.iterdir())
    assert not of_two


@pytest.mark.parametrize("command", COMMANDS)
def test_the_others_leave_the_word_to_it(
    command: str, of_two: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    found = CliRunner().invoke(main, [command, "paper"])
    assert (found.exit_code, found.output) == (2, "")
    assert of_two == [5]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"WORLD_SIZE": "1"}, ["backends"]),
        ({"RANK": ""}, ["backends"]),
        ({}, ["ablate", "--help"]),
        ({}, ["--version"]),
    ],
)
def test_one_rank_and_help_are_taken(
    settings: dict[str, str], arguments: list[str], of_two: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output


def test_training_is_for_ranks(of_two: list[float]) -> None:
    found = CliRunner().invoke(main, ["train", "tiny", "--dry-run", "--set", "run.micro_batch=1"])
    assert "run.micro_batch = 1 sequences do not split over 2 ranks" in found.stderr
