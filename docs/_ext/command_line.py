"""Sphinx extension: the reference of the command line, read from the click commands themselves.

`.. command-line::` writes a section for every command. Each option becomes an `option` of the standard domain, so that
the search finds it and `:option:` links to it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mxref.cli import main
from mxref.discovery import ENVIRONMENT_VARIABLE

ENVIRONMENT = {"--backend": ENVIRONMENT_VARIABLE}
"""Variables that stand for an option, where click does not read them itself."""
EXIT_CODES = {
    "compare": {1: "some bytes differ"},
    "conform": {1: "a clause fails, or an answer of the recording is wrong (`--replay`)"},
    "identify": {1: "the codes show another rule than `--expect`, or none"},
    "vectors verify": {1: "a result differs from the golden vectors"},
    "train": {0: "trained to the end, or stopped by Ctrl-C or SIGTERM with a checkpoint"},
    "ablate": {130: "stopped by Ctrl-C or at the end of `--max-minutes`; the same command goes on"},
}
"""What a command returns besides the codes that all commands share."""
_LITERAL = re.compile(r"(``?[^`]+``?)")
_REPEATED = re.compile(r"[Mm]ay be given|give it \w+ times")
_TARGET = re.compile(r"(?<=\w)_(?!\w)")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its words after `mxref`; a group is followed by its own commands."""
    context = click.Context(main, info_name="mxref")
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            below = click.Context(command, context, info_name=name)
            for inner in command.list_commands(below):
                found = command.get_command(below, inner)
                assert found is not None
                yield f"{name} {inner}", found


def examples(command: click.Command) -> list[str]:
    """Return the commands that a help text shows, each with its remark behind a `#`."""
    found = []
    for paragraph in _paragraphs(command):
        if paragraph.startswith("\b"):
            for line in paragraph.splitlines()[1:]:
                shown, *remark = re.split(r"\s{2,}", line.strip(), maxsplit=1)
                if re.match(r"(\w+=\S+ )*(mxref|torchrun) ", shown + " "):
                    found.append("  # ".join([shown, *remark]))
    return found


def options(command: click.Command) -> list[click.Option]:
    """Return the options that the help shows, without --help itself."""
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def _paragraphs(command: click.Command) -> list[str]:
    text = textwrap.dedent((command.callback and command.callback.__doc__) or command.help or "")
    first, _, rest = text.partition("\n")
    text = f"{first}\n{textwrap.dedent(rest)}".partition("\f")[0]
    return [p for p in re.split(r"\n\s*\n", text.strip()) if p]


def _rst(text: str) -> str:
    """Return a help text as reStructuredText: its literals as they are, the signs of markup escaped elsewhere."""
    parts = _LITERAL.split(" ".join(text.split()))
    for i in range(0, len(parts), 2):
        parts[i] = _TARGET.sub(r"\\_", re.sub(r"([\\*|])", r"\\\1", parts[i]))
    return "".join(parts)


def section(name: str, command: click.Command) -> list[str]:
    """Return the section of a command as lines of reStructuredText."""
    title = f"mxref {name}"
    context = click.Context(command, info_name=title)
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    lines = [
        title,
        ("~" if " " not in name else "^") * len(title),
        "",
        ".. code-block:: text",
        "",
        f"   {usage}",
        "",
    ]
    for paragraph in _paragraphs(command):
        if not paragraph.startswith("\b"):
            lines += [_rst(paragraph), ""]
    shown = examples(command)
    if shown:
        lines += [".. code-block:: console", "", *(f"   $ {line}" for line in shown), ""]
    lines += [f".. program:: {title}", ""]
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.default not in (None, (), click.core.UNSET):
            lines += [f"`{parameter.human_readable_name}` is `{parameter.default}` by default.", ""]
    for option in options(command):
        lines += _option(option, context)
    for code, meaning in EXIT_CODES.get(name, {}).items():
        lines += [f"**Exit code {code}**: {meaning}.", ""]
    return lines


def _option(option: click.Option, context: click.Context) -> list[str]:
    names = [*option.opts, *option.secondary_opts]
    value = "" if option.is_flag or option.count else f" {_metavar(option, context)}"
    said = " ".join([_rst(option.help or ""), *(f"{fact}." for fact in _facts(option, names))])
    spelled = ", ".join(name + value for name in names)
    return [f".. option:: {spelled}", "", f"   {said}", ""]


def _metavar(option: click.Option, context: click.Context) -> str:
    if option.metavar is None and isinstance(option.type, click.Choice):
        return "NAME"
    if option.metavar is None and isinstance(
        option.type, click.types.IntParamType | click.types.FloatParamType
    ):
        return "N" if isinstance(option.type, click.types.IntParamType) else "X"
    return option.make_metavar(context).strip("<>")


def _facts(option: click.Option, names: list[str]) -> Iterator[str]:
    """Yield the values of an option, its default, its variable, and whether it may be repeated."""
    kind = option.type
    if isinstance(kind, click.Choice):
        yield "Values: " + ", ".join(f"`{choice}`" for choice in kind.choices)
    elif isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
        if kind.max is not None:
            yield f"From {kind.min} to {kind.max}"
        else:
            yield f"Above {kind.min}" if kind.min_open else f"At least {kind.min}"
    default = option.default
    if isinstance(default, bool):
        if option.secondary_opts:
            yield f"Default: `{option.opts[0] if default else option.secondary_opts[0]}`"
    elif default not in (None, (), click.core.UNSET):
        yield f"Default: `{default}`"
    variable = option.envvar or next((ENVIRONMENT[name] for name in names if name in ENVIRONMENT), None)
    if variable:
        yield f"Environment variable: `{variable}`"
    if option.multiple and not _REPEATED.search(option.help or ""):
        yield "May be given several times"


class CommandLine(SphinxDirective):
    """A section for every command."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(line for name, command in commands() for line in section(name, command))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def outdated(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Return the page, which depends on code that Sphinx does not watch."""
    return ["reference/cli"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
