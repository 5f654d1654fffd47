"""`python -m aot`: compile the table without a GPU, count instructions, and check budgets."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import triton
from rich.console import Console
from rich.table import Table

from aot.absent import MACHINES
from aot.budgets import alu_per_element, check, read_budgets
from aot.run import compile_cases
from aot.table import CompiledCase, cases
from mxref import __version__
from mxref.errors import MxrefError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=click.Choice([*MACHINES, "all"]), default="all", show_default=True)
@click.option(
    "--only", metavar="PATTERN", multiple=True, help="Cases to compile, as in a shell; may be repeated."
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Compilers at a time.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the counts there."
)
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Write the machine code there."
)
@click.option("--check", "checked", is_flag=True, help="Exit with 1 if a goal or a budget does not hold.")
def main(
    target: str, only: tuple[str, ...], jobs: int, json_path: Path | None, keep: Path | None, checked: bool
) -> None:
    """Compile the backend's kernels with no GPU, and show what they cost.

    Nothing is run: every number is counted in machine code.
    """
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    only = only or ("*",)
    names = [name for name in cases() if any(fnmatchcase(name, pattern) for pattern in only)]
    if not names:
        raise click.ClickException(f"no case matches {' or '.join(only)}; the names are {', '.join(cases())}")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    try:
        results = [
            result
            for name in (MACHINES if target == "all" else [target])
            for result in _compile(console, name, names, jobs, keep)
        ]
        records = [record for result in results for record in result.get("records", ())]
        failures = [f"{r['target']} {r['case']}: {r['error']}" for r in results if "error" in r]
        notes: list[str] = []
        if checked:
            exceeded, notes = _hold(records, whole=len(names) == len(cases()) and target == "all")
            failures += exceeded
    except MxrefError as err:
        raise click.ClickException(str(err)) from None
    for name in MACHINES:
        if mine := [r for r in records if r["target"] == name]:
            console.print(_table(name, mine))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document(records), indent=1, sort_keys=True) + "\n")
    for line in failures:
        console.print(f"[red]✗[/red] {line}", soft_wrap=True)
    for line in notes:
        console.print(f"- {line}", soft_wrap=True)
    if checked and not failures:
        held = "goals" if notes else "goals and budgets"
        console.print(f"[green]✓[/green] {len(records)} kernels are within their {held}")
    if failures:
        sys.exit(1)


def _hold(records: list[dict[str, Any]], whole: bool) -> tuple[list[str], list[str]]:
    """Return what exceeds the limits of this Triton release, and notes about limits of other releases."""
    budgets, release = read_budgets(), triton.__version__
    waived = budgets.waived(release)
    notes = [f"{line} (not enforced)" for line in check(records, waived, whole)]
    if waived:
        notes.append(
            f"{len(waived)} budgets are not enforced: counted with Triton {budgets.counted_with}, this is {release}"
        )
    return check(records, budgets.enforced(release), whole), notes


def document(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts and what they depend on, as JSON text."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "mxref": __version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "records": sorted((_short(r) for r in records), key=lambda r: (r["target"], r["case"], r["kernel"])),
    }


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without its lists of mnemonics, which are long and change with every compiler."""
    kept = {k: v for k, v in record.items() if k not in ("mnemonics", "loop_mnemonics")}
    return kept | {"alu_per_element": round(alu_per_element(record), 2)}


def _compile(
    console: Console, target: str, names: list[str], jobs: int, keep: Path | None
) -> list[dict[str, Any]]:
    out = []
    table: dict[str, CompiledCase] = cases()
    wanted = [name for name in names if target in table[name].targets]
    with console.status(f"{target}: 0 of {len(wanted)}") as status:
        for result in compile_cases(target, MACHINES[target].hip, wanted, jobs, keep):
            out.append(result)
            status.update(f"{target}: {len(out)} of {len(wanted)}, {result['case']}")
    return sorted(out, key=lambda result: wanted.index(result["case"]))


def _table(target: str, records: list[dict[str, Any]]) -> Table:
    amd = MACHINES[target].target.backend == "hip"
    # On NVIDIA the ALU and the FMA pipe take different instructions, so both are shown.
    pipes = [] if amd else ["fma", "alu", "shuffle", "shared"]
    out = Table(
        title=f"compiled for {target} by Triton {triton.__version__}, never run there", title_justify="left"
    )
    out.add_column("case")
    out.add_column("kernel")
    registers = list(records[0]["registers"])
    for head in (*registers, "LDS" if amd else "shared", "spills", "scratch", "occ."):
        out.add_column(head, justify="right")
    out.add_column("VALU/element" if amd else "issued/element", justify="right")
    for head in (*pipes, "matrix in loop", "other/matrix"):
        out.add_column(head, justify="right")
    out.add_column("notable")
    for r in records:
        out.add_row(
            r["case"], r["kernel"], *(str(r["registers"][k]) for k in registers),
            *(str(r[k]) for k in ("shared", "spills", "scratch", "occupancy")),
            "" if r["loop_alu"] else f"{alu_per_element(r):.2f}",
            *("" if r["loop_alu"] else f"{r['pipes'][p] / r['elements_per_thread']:.2f}" for p in pipes),
            str(r["loop_matrix"] or ""),
            f"{r['loop_alu'] / r['loop_matrix']:.2f}" if r["loop_matrix"] else "",
            " ".join(r["notable"]),
        )  # fmt: skip
    return out


if __name__ == "__main__":
    main()
