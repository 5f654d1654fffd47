"""`mxref backends`: list the backends, their declarations, and the chosen one with the reason."""

from __future__ import annotations

import json
from dataclasses import fields
from enum import Enum
from typing import Any

import click

from mxref.capabilities import Capabilities
from mxref.discovery import Candidate, candidates, choose, get_backend
from mxref.errors import MxrefError
from mxref.formats import FORMATS, OperandFormat


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def backends(as_json: bool) -> None:
    """List the backends, what each declares, and which is chosen.

    MXREF_BACKEND=NAME, module:object or path/to/file.py:object chooses another one.

    \b
    Examples:
      mxref backends
      mxref backends --json
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    chosen, why = choose()
    found = candidates()
    if chosen not in {c.name for c in found}:
        found = [_candidate(chosen), *found]
    if as_json:
        click.echo(json.dumps(_plain(found, chosen, why), indent=2))
    else:
        _show(found, chosen, why)
    get_backend(chosen)  # after the list: a chosen backend that cannot be loaded is an error


def _candidate(name: str) -> Candidate:
    try:
        return Candidate(name, name, get_backend(name))
    except MxrefError as err:
        return Candidate(name, name, problem=str(err))


def declared(capabilities: Capabilities, field: str) -> Any:
    """Return a capability as plain data: a set as a list in the order of definition, a GEMM as [profile, A, B]."""
    value = getattr(capabilities, field)
    if not isinstance(value, frozenset):
        return value
    return [_named(member) for member in sorted(value, key=_order)]


def _named(member: Any) -> Any:
    if isinstance(member, tuple):
        return [_named(part) for part in member]
    if isinstance(member, Enum):
        return member.value
    return member.name if isinstance(member, OperandFormat) else member


def _order(member: Any) -> Any:
    if isinstance(member, tuple):
        return tuple(map(_order, member))
    if isinstance(member, Enum):
        return list(type(member)).index(member)
    if isinstance(member, OperandFormat):
        return list(FORMATS).index(member.name) if member.name in FORMATS else len(FORMATS)
    return member


def _plain(found: list[Candidate], chosen: str, why: str) -> dict[str, Any]:
    rows = []
    for c in found:
        row: dict[str, Any] = {
            "name": c.name,
            "source": c.source,
            "available": c.backend is not None,
            "problem": c.problem,
        }
        if c.backend is not None:
            row["details"] = c.backend.details()
            row["capabilities"] = {
                f.name: declared(c.backend.capabilities, f.name) for f in fields(Capabilities)
            }
        rows.append(row)
    return {"chosen": chosen, "why": why, "backends": rows}


def _show(found: list[Candidate], chosen: str, why: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mxref.terminal import BOX, HEAD, QUIET, console

    out: Console = console()
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False, expand=False)
    for heading in ("", "backend", "from", "state"):
        table.add_column(heading, overflow="fold")
    for c in found:
        state = Text("available", style="green") if c.backend is not None else Text(c.problem, style="red")
        mark = Text("->", style="bold green") if c.name == chosen else ""
        table.add_row(mark, Text(c.name, style="bold"), Text(c.source, style=QUIET), state)
    out.print(table)
    out.print(Text.assemble("\nchosen: ", (chosen, "bold"), f", {why}"))
    for c in found:
        if c.backend is not None and (details := c.backend.details()):
            out.print(Text.assemble((c.name, "bold"), f" runs {details}"), soft_wrap=True)
    usable = [c for c in found if c.backend is not None]
    if not usable:
        return
    matrix = Table(
        box=BOX,
        header_style=HEAD,
        pad_edge=False,
        show_edge=False,
    )
    matrix.add_column("capability", style=QUIET, no_wrap=True)
    for c in usable:
        matrix.add_column(c.name, overflow="fold", ratio=1)
    for f in fields(Capabilities):
        values = [declared(c.backend.capabilities, f.name) for c in usable if c.backend is not None]
        differs = any(v != values[0] for v in values)
        cells = map(_gemms if f.name == "gemms" else _cell, values)
        matrix.add_row(f.name, *(Text(cell, style="bold" if differs else "") for cell in cells))
    out.print(Text("\nWhat each declares", HEAD))
    out.print(matrix)
    differing = "Bold rows differ. " if len(usable) > 1 else ""
    out.print(
        Text(f"\n{differing}Undeclared requests raise UnsupportedError; there is no fallback.", style=QUIET)
    )


def _gemms(found: list[list[str]]) -> str:
    """Return the declared GEMMs, a sentence for each profile; all pairs of some formats as one phrase."""
    lines = []
    for profile in dict.fromkeys(profile for profile, _, _ in found):
        pairs = [(a, b) for name, a, b in found if name == profile]
        # Formats whose partners are the same, themselves among them, multiply in all pairs.
        partners = {a: tuple(b for first, b in pairs if first == a) for a, _ in pairs}
        groups = dict.fromkeys(group for a, group in partners.items() if a in group)
        if all(partners.get(a) == group for group in groups for a in group) and len(pairs) == sum(
            len(group) ** 2 for group in groups
        ):
            said = (f"all pairs of {', '.join(g)}" if len(g) > 1 else g[0] for g in groups)
            lines.append(f"{profile}: {' and '.join(said)}")
        else:
            lines.append(f"{profile}: {', '.join(a if a == b else f'{a} by {b}' for a, b in pairs)}")
    return "; ".join(lines) or "none"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
