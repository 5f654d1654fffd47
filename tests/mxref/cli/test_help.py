"""The help of every command: examples that are valid and keep their lines, at every width of the terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from mxref.cli import DOORS, main

NARROWEST = 60


def commands() -> Iterator[tuple[str, ...]]:
    root = click.Context(main, info_name="mxref")
    for name in main.list_commands(root):
        yield (name,)
        command = main.get_command(root, name)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.list_commands(click.Context(command, root)))


ALL = list(commands())


def help_of(words: tuple[str, ...], width: int = 80) -> str:
    result = CliRunner().invoke(main, [*words, "--help"], terminal_width=width)
    assert result.exit_code == 0
    return result.output


def examples(words: tuple[str, ...]) -> list[str]:
    """Return the lines below `Examples:` and other commands that are shown, with their remarks."""
    assert help_of(words).count("\n  Examples:\n    ") == 1
    return re.findall(r"^    (?:\w+=\S+ )*(?:mxref|torchrun|eval) .*$", help_of(words), re.MULTILINE)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_command_has_examples_that_its_options_allow(words):
    lines = examples(words)
    assert len(lines) >= 2
    for line in lines:
        assert len(line) <= 80, line
        command = re.split(r" {3,}", line.strip())[0]
        parts = shlex.split(re.sub(r"^(\w+=\S+ )+|^eval \"\$\(|\)\"$| [|>] .*", "", command))
        assert parts[0] in ("mxref", "torchrun"), line
        context = main.make_context("mxref", parts[parts.index("mxref") + 1 :])
        while isinstance(context.command, click.Group):
            name, found, rest = context.command.resolve_command(
                context, context._protected_args + context.args
            )
            context = found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_examples_keep_their_lines_and_other_text_its_width(words):
    kept = set(examples(words))
    for width in (NARROWEST, 80, 120):
        lines = help_of(words, width).splitlines()
        assert kept <= set(lines)
        for line in lines:
            one_word = len(line.split()) <= 2  # an option and its values
            assert len(line) <= width or line in kept or one_word, line


def test_the_list_of_commands_fits_every_width():
    for width in (NARROWEST, 80, 120):
        lines = help_of((), width).splitlines()
        assert max(map(len, lines)) <= width
        assert width < 80 or not any(line.endswith("...") for line in lines[1:])
        for name in main.list_commands(None):
            assert sum(line.startswith(f"  {name} ") for line in lines) == 1


def test_the_commands_are_listed_by_who_asks_for_them_and_none_is_left_out():
    sections = re.findall(r"^(For [\w ]+|Other commands):\n((?:  .+\n)+)", help_of(()), re.MULTILINE)
    listed = {title: re.findall(r"^  ([\w-]+)", body, re.MULTILINE) for title, body in sections}
    assert list(listed) == [*DOORS, "Other commands"]
    assert listed["For people who train"] == ["train", "report", "export"]
    assert sorted(name for names in listed.values() for name in names) == sorted(main.list_commands(None))


@pytest.mark.parametrize("command", [("explain", "1", "-2"), ("recipes",), ("recipes", "mxfp5")])
def test_no_color_is_heard_and_colours_are_there_without_it(command):
    colour = re.compile(r"\x1b\[(?:\d+;)*3\d")
    for plain in (False, True):
        env = {"NO_COLOR": "1" if plain else "", "FORCE_COLOR": "1", "TERM": "xterm"}
        printed = CliRunner().invoke(main, command, env=env, color=True).output
        assert bool(colour.search(printed)) is not plain
