"""Control codes in labels, paths and messages do not reach the terminal."""

from __future__ import annotations

import io
import sys
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mxref import terminal
from mxref.cli import main
from mxref.printable import printable

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202eevil\x08"
SPELLED = r"\x1b]0;title\x07\x1b[2J\x9b31m\r\u202eevil\x08"
TURNS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def is_harmful(character: str) -> bool:
    kind, turn = unicodedata.category(character), unicodedata.bidirectional(character)
    return (kind in ("Cc", "Cs", "Zl", "Zp") and character not in "\t\n") or turn in TURNS


@given(st.text(st.characters()))
def test_what_is_printed_holds_no_control_codes(text: str) -> None:
    safe = printable(text)
    assert not any(map(is_harmful, safe))
    assert printable(safe) == safe
    safe.encode()


def test_every_control_code_is_spelled_out() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        assert (printable(character) != character) >= is_harmful(character), hex(ord(character))
    assert printable(HOSTILE) == SPELLED


def test_other_text_is_left_alone() -> None:
    text = "漢字 é 🏳️‍🌈 \tשלום\n✗ ± −"
    assert printable(text) == text


def shown(*items: object, width: int = 100) -> str:
    out = terminal.console()
    out.file, out.width = io.StringIO(), width
    for item in items:
        out.print(item)
    return out.file.getvalue()


def test_a_console_spells_out_control_codes_in_all_that_it_prints() -> None:
    table = Table(title=HOSTILE, box=terminal.BOX)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, terminal.HEAD))
    text = shown(HOSTILE, Text(HOSTILE), Text.assemble("a ", (HOSTILE, "bold")), table)
    assert not any(map(is_harmful, text))
    # rich itself takes out some of the codes of a `Text`.
    assert text.count(r"\x1b[2J") == 7


def test_a_console_on_a_terminal_keeps_its_own_colours_and_movements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = terminal._SafeConsole(file=io.StringIO(), force_terminal=True, width=60, color_system="standard")
    out.print(Text(HOSTILE, "bold red"))
    with Progress(TextColumn("{task.description}", markup=False), console=out, transient=True) as bar:
        bar.add_task(HOSTILE, total=2)
        bar.refresh()
    written = out.file.getvalue()
    assert "\x1b[1;31m" in written, "bold red"
    assert "\x1b[2K" in written, "the bar is taken away"
    assert "\x1b]0" not in written
    assert "\x1b[2J" not in written


def test_a_column_is_as_wide_as_what_it_shows() -> None:
    table = Table(box=terminal.BOX)
    table.add_column("name")
    table.add_column("value", justify="right")
    table.add_row(HOSTILE, "1")
    table.add_row("x" * 60, "2")
    assert len({len(line) for line in shown(table).splitlines() if line.strip()}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", f"{HOSTILE}"],
        ["ablate", f"{HOSTILE}.toml", "--list"],
        [HOSTILE],
        ["conform", f"--{HOSTILE}"],
        [f"--{HOSTILE}"],
        ["conform", "--backend", f"{HOSTILE}.py:backend"],
        ["conform", "--jobs", HOSTILE],
    ],
)
def test_errors_of_commands(arguments: list[str]) -> None:
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2
    assert "evil" in found.output
    assert not any(map(is_harmful, found.output))


def test_a_backend_that_sends_control_codes(tmp_path: Path) -> None:
    file = tmp_path / "hostile.py"
    file.write_text(f"raise ImportError({HOSTILE!r})\n")
    for command in ("conform", "warm-up"):
        found = CliRunner().invoke(main, [command, "--backend", f"{file}:backend"])
        assert found.exit_code == 2
        assert SPELLED in found.output
    found = CliRunner(env={"MXREF_BACKEND": f"{file}:backend"}).invoke(main, ["backends"])
    assert found.exit_code == 2
    assert not any(map(is_harmful, found.output))
