"""By default `mxref conform` prints at most a screen of 24 lines and 80 columns, whatever failed."""

from __future__ import annotations

import pytest

from mxref.cli.conform_text import show
from mxref.conformance import CLAUSES
from mxref.conformance.outcome import ClauseResult, Failure, Level, Report

WIDTH, LINES = 80, 24
INTRODUCTION = f"backend {'a_long_folder/' * 7}mine.py:backend, asked for by name"
NUMBERS = " 0xc0200000"


def failure(clause: str, numbers: int, **more) -> Failure:
    command = f"mxref explain --block 0{NUMBERS * numbers}" if numbers else None
    codes = " 0e" * (numbers or 32)
    return Failure(
        clause, "36 of 401 blocks differ; " * 8, {"scale_rule": "floor", "shape": "(1, 32), " * 9},
        {"x": ("0xc0200000",) * 64}, f"scale 7e  codes{codes}", f"scale 7f  codes{codes}", tuple(range(32)),
        command, check="a check " * 8, **more,
    )  # fmt: skip


def report(failing: list[str], numbers: int) -> Report:
    results = tuple(
        ClauseResult(c, 10, 7, 3, failures=[failure(c, numbers)]) if c in failing else ClauseResult(c, 10)
        for c in CLAUSES
    )
    return Report("mine", Level.QUICK, 0, ("quantize",), results, 1.5)


def printed(of: Report, capsys, monkeypatch, verbose: bool = False, width: int = WIDTH) -> list[str]:
    """Return the lines of a terminal, which breaks those that are longer than it is wide."""
    monkeypatch.setenv("COLUMNS", str(width))
    show(of, verbose)
    lines = [INTRODUCTION, *capsys.readouterr().out.splitlines()]
    return [line[i : i + width] for line in lines for i in range(0, max(1, len(line)), width)]


@pytest.mark.parametrize("count", [0, 1, 2, 5, len(CLAUSES)])
@pytest.mark.parametrize("numbers", [0, 1, 32, 256])
def test_a_report_takes_one_screen(count, numbers, capsys, monkeypatch):
    of = report(list(CLAUSES)[:count], numbers)
    lines = printed(of, capsys, monkeypatch)
    assert len(lines) <= LINES
    text = "\n".join(lines)
    shown = text.count("  expected ")
    assert (shown > 0) == (count > 0)
    assert (f"and {count - shown} more failure" in text) == (shown < count)
    assert ("does not conform" in text) == (count > 0)
    joined = "".join(lines)
    command = f"mxref explain --block 0{NUMBERS * numbers}"
    assert joined.count(command) == (shown if numbers in (1, 32) else 0)
    assert ("--all prints" in text) == (shown < count or (count > 0 and numbers == 256))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_printed_on_demand(width, capsys, monkeypatch):
    of = report(list(CLAUSES), 256)
    lines = printed(of, capsys, monkeypatch, verbose=True, width=width)
    assert "".join(lines).count(f"mxref explain --block 0{NUMBERS * 256}") == len(CLAUSES)
    assert " more failure" not in "\n".join(lines)


def test_several_failures_are_shown_where_there_is_room(capsys, monkeypatch):
    answers = {"expected": "1", "got": "2", "command": "mxref explain 1"}
    short = tuple(
        ClauseResult(c, 1, 1, failures=[Failure(c, "it differs", check="a check", **answers)])
        for c in list(CLAUSES)[:3]
    )
    of = Report("mine", Level.QUICK, 0, ("quantize",), short, 1.5)
    text = "\n".join(printed(of, capsys, monkeypatch))
    assert text.count("mxref explain 1") == 2
    assert "and 1 more failure: --all" in text
    assert "FAILED" in text
