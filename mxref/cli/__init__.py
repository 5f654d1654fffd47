"""The command line, `mxref <command>`. A command is imported only when it runs or shows its own help.

`mxref --help` is therefore fast, and lists the training commands also without PyTorch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from mxref._version import SPECIFICATION, __version__
from mxref.cli.ranks import refuse_ranks
from mxref.errors import BackendError, MxrefError
from mxref.printable import printable
from mxref.raised import raised_text
from mxref.tomlio import nearest

ENTRY_POINT_GROUP = "mxref.commands"
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_TRACEBACK = "MXREF_TRACEBACK"

_ERROR = click.style("error:", fg="red", bold=True)

_OWN = {
    "explain": "mxref.cli.explain:explain",
    "backends": "mxref.cli.backends:backends",
    "warm-up": "mxref.cli.warm_up:warm_up",
    "conform": "mxref.cli.conform:conform",
    "compare": "mxref.cli.compare:compare",
    "layout": "mxref.cli.layout:layout",
    "identify": "mxref.cli.identify:identify",
    "vectors": "mxref.cli.vectors:vectors",
    "recipes": "mxref.cli.recipes:recipes",
    "completion": "mxref.cli.completion:completion",
}


DOORS = {
    "For kernel engineers": (
        "explain",
        "conform",
        "compare",
        "layout",
        "identify",
        "vectors",
        "backends",
        "warm-up",
    ),
    "For numerics researchers": ("recipes", "ablate", "probe"),
    "For people who train": ("train", "report", "export"),
}
"""The commands by those who ask for them. All others, those of plugins too, follow as `Other commands`."""


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    """Escape control codes in usage errors, which quote the arguments."""
    try:
        yield
    except click.ClickException as err:
        err.message = printable(err.message)  # type: ignore[misc]
        raise


class LazyGroup(click.Group):
    """A group whose commands come from `_OWN` and from the entry points of the group `mxref.commands`."""

    def points(self) -> dict[str, EntryPoint]:
        """Return the known commands by name, those of mxref first, without importing them."""
        own = {name: EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in _OWN.items()}
        return own | {p.name: p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name not in own}

    def point(self, name: str) -> EntryPoint | None:
        """Return a known command; the entry points of all packages are read only for those that are not mxref's."""
        if name in _OWN:
            return EntryPoint(name, _OWN[name], ENTRY_POINT_GROUP)
        return self.points().get(name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `points`."""
        return list(self.points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; BackendError names the package to install if one is missing."""
        point = self.point(cmd_name)
        return load_command(point) if point else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` name; an unknown name is a usage error that suggests the nearest one.

        Of several ranks, none gets a command for one process, except to show its help.
        """
        name = args[0]
        if ctx.resilient_parsing:
            return self._completed(ctx, args)
        try:
            found = super().resolve_command(ctx, args)
        except click.UsageError:
            if name.startswith("-") or self.point(name) is not None:
                raise
            raise click.UsageError(f"no command {name!r}{nearest(name, self.points())}", ctx) from None
        if found[1] is not None and not set(args) & set(ctx.help_option_names):
            refuse_ranks(name, found[1])
        return found

    def _completed(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that a shell completes; none, without an error, if it is unknown or cannot be loaded."""
        try:
            return super().resolve_command(ctx, args)
        except MxrefError:
            return None, None, []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the commands and options that begin so, with the commands' first sentences read from source files."""
        items = click.Command.shell_complete(self, ctx, incomplete)
        points = self.points().items()
        return [
            *items,
            *(
                CompletionItem(name, help=summary(point))
                for name, point in points
                if name.startswith(incomplete)
            ),
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by `DOORS` with their first sentences, read from source files instead of imported."""
        points = self.points()
        widest = max(map(len, points))
        limit = formatter.width - 6 - widest
        named = {name for names in DOORS.values() for name in names}
        for title, names in (DOORS | {"Other commands": tuple(sorted(points.keys() - named))}).items():
            rows = [
                (f"{name:{widest}}", textwrap.shorten(summary(points[name]), limit, placeholder="..."))
                for name in names
                if name in points
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; print a one-line error and exit with code 2 if a file cannot be read or written."""
        try:
            return super().main(*args, **options)
        except OSError as err:
            name = f": {err.filename}" if err.filename else ""
            _print_error(f"{err.strerror or err}{name}")
            _drop_output()
            sys.exit(EXIT_ERROR)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the options before the command."""
        with _printable_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; print one line and exit with code 2 after an error, with code 130 on Ctrl-C."""
        try:
            with _printable_errors():
                return super().invoke(ctx)
        except MxrefError as err:
            _print_error(str(err))
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except (click.exceptions.Exit, click.Abort, click.ClickException, OSError):
            raise
        except Exception as err:
            more = "" if _wants_traceback() else f"; {_TRACEBACK}=1 prints the traceback"
            _print_error(
                f"mxref {ctx.invoked_subcommand} stopped: {raised_text(err)}, which is a defect of mxref, a backend or "
                f"a plugin{more}"
            )
            ctx.exit(EXIT_ERROR)


def _wants_traceback() -> bool:
    return os.environ.get(_TRACEBACK, "") not in ("", "0")


def _print_error(text: str) -> None:
    """Print the line of an error, after the traceback of the exception being handled if the user asks for it."""
    if _wants_traceback():
        for line in traceback.format_exc().splitlines():
            click.echo(printable(line), err=True)
    color = False if os.environ.get("NO_COLOR") else None  # rich heeds the variable, click does not
    click.echo(f"{_ERROR} {printable(text)}", err=True, color=color)


def _drop_output() -> None:
    """Discard unwritten standard output; otherwise Python writes it at exit and prints a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def load_command(point: EntryPoint) -> click.Command:
    """Import and return the command of an entry point."""
    try:
        command: click.Command = point.load()
    except ModuleNotFoundError as err:
        missing = (err.name or str(err)).partition(".")[0]
        if missing == point.module.partition(".")[0]:
            origin = point.dist.name if point.dist else missing
            raise BackendError(
                f"command {point.name!r} is declared by {origin}, but its package {missing} is missing: "
                f"reinstall {origin}"
            ) from err
        raise BackendError(
            f"command {point.name!r} needs {missing}, which is not installed: "
            f"pip install {_distribution(point, missing)}"
        ) from err
    return command


def _distribution(point: EntryPoint, missing: str) -> str:
    """Return what to install for a missing package: the extra that contains it, else the package."""
    for requirement in (point.dist and point.dist.requires) or []:
        extra = re.match(rf"{re.escape(missing)}\b.*extra == ['\"]([\w-]+)['\"]", requirement)
        if extra and point.dist:
            return f"'{point.dist.name}[{extra[1]}]'"
    return missing


def summary(point: EntryPoint) -> str:
    """Return the first sentence of a command's docstring without importing its module, else its entry point."""
    text = _docstring(point.module, point.attr) or f"From {point.value}."
    return re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]


def _docstring(module: str, name: str) -> str | None:
    source = _source(module)
    if source is None:
        return None
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _docstring(node.module, alias.name)
    return None


def _source(module: str) -> Path | None:
    """Return the file of a module without importing it: only its top-level package is looked up."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    folders = [Path(folder, *rest) for folder in spec.submodule_search_locations or []]
    files = [f for folder in folders for f in (folder.with_suffix(".py"), folder / "__init__.py")]
    if not rest and spec.origin:
        files.append(Path(spec.origin))
    return next((f for f in files if f.is_file()), None)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Environment: MXREF_BACKEND chooses the backend. {_TRACEBACK}=1 prints the traceback of an error.",
)
@click.version_option(
    __version__, prog_name="mxref", message=f"%(prog)s %(version)s, specification {SPECIFICATION}"
)
def main() -> None:
    """Microscaled training, specified bit by bit: explain a block, check a backend, train, compare recipes."""
