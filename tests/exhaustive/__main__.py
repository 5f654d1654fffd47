"""Run complete sweeps of the reference and of the Numba backend, and write their results.

    PYTHONPATH=tests python -m exhaustive [--family mxfp8] [--only a] [--every 1] [--out DIR] [--machine TEXT]

`make exhaustive` does. Exit code 1 if any case of any sweep disagrees with the oracle. Each family of formats
has its own record. A stopped run continues after its last finished sweep if the same command is given
again, on any day, with the same machine, versions and code.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numba
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import exhaustive
import mxref
import mxref_numba
import oracle
from exhaustive import decodes, dots, elements, halves, scales
from exhaustive.families import FAMILIES
from exhaustive.sweep import Sweep, run
from exhaustive.table import COLUMNS, as_csv, cells
from mxref_training.sources import digest, own_sources

PARTS = {"a": elements, "b": scales, "c": halves, "d": decodes, "e": dots}
PACKAGES = tuple(Path(str(package.__file__)).parent for package in (mxref, mxref_numba, oracle, exhaustive))
"""The folders of what is tested and of what tests it."""


def all_sweeps(parts: str = "abcde", family: str = "mxfp4") -> Iterator[Sweep]:
    """Yield the sweeps of the named parts, for the formats of a family."""
    for part in parts:
        yield from PARTS[part].sweeps(family)


def machine_name() -> str:
    """The processor as the system names it, and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def code_digest(packages: Iterable[Path] = PACKAGES) -> str:
    """Return 12 hex digits of the SHA-256 over the sources that a result depends on."""
    return digest(pair for package in packages for pair in own_sources(package))


def replace_file(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def label(sweep: Sweep) -> dict[str, Any]:
    """What a row says of its sweep before it has run."""
    return dict(zip(COLUMNS, (sweep.part, sweep.function, sweep.domain, sweep.cases), strict=False))


def finished_rows(path: Path, record: dict[str, Any], sweeps: list[Sweep]) -> list[dict[str, Any]]:
    """The rows of a stopped run that the given record continues: same machine, versions, code and first sweeps."""
    if not path.exists():
        return []
    old = json.loads(path.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = old["rows"]
    same_run = all(old.get(key) == record[key] for key in ("machine", "threads", "versions", "code", "every"))
    same_sweeps = all(row | label(sweep) == row for row, sweep in zip(rows, sweeps, strict=False))
    return rows if same_run and same_sweeps and not old["complete"] else []


@click.command(help=__doc__)
@click.option(
    "--family",
    "families",
    multiple=True,
    default=tuple(FAMILIES),
    show_default=True,
    type=click.Choice(list(FAMILIES)),
    help="The formats to sweep; may be repeated.",
)
@click.option("--only", "parts", default="abcde", show_default=True, help="The parts to run.")
@click.option(
    "--every",
    default=1,
    show_default=True,
    help="1 is complete; k takes every k-th chunk and all thresholds.",
)
@click.option(
    "--out", default="runs/exhaustive", show_default=True, type=click.Path(file_okay=False, path_type=Path)
)
@click.option("--machine", help="What the record says about the hardware.  [default: from the system]")
def main(families: tuple[str, ...], parts: str, every: int, out: Path, machine: str | None) -> None:
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or every < 1:
        raise click.UsageError(f"--only takes letters of {''.join(PARTS)}, --every a number from 1 on")
    out.mkdir(parents=True, exist_ok=True)
    failed = [row for family in families for row in record_family(family, parts, every, out, machine)]
    for row in failed:
        Console().print(
            f"{row['faults']:,} faults in {row['function']}, {row['domain']}; first: {row['first']}",
            markup=False,
        )
    if failed:
        raise SystemExit(1)


def record_family(
    family: str, parts: str, every: int, out: Path, machine: str | None
) -> list[dict[str, Any]]:
    """Run the sweeps of a family, write its record `FAMILY.json` and `FAMILY.csv`, and return the rows with faults."""
    path = out / f"{family}.json"
    sweeps = list(all_sweeps(parts, family))
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine or machine_name(),
        "threads": numba.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("mxref", "numpy", "ml_dtypes", "numba")},
        "code": code_digest(),
        "every": every,
        "complete": False,
        "rows": [],
    }
    record["rows"] = finished_rows(path, record, sweeps)
    console = Console()
    if record["rows"]:
        console.print(f"{path} has {len(record['rows'])} of {len(sweeps)} sweeps already")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task(f"all sweeps of {family}", total=len(sweeps), completed=len(record["rows"]))
        for sweep in sweeps[len(record["rows"]) :]:
            task = progress.add_task(f"{sweep.part} {sweep.function}", total=len(list(sweep.slice(every))))
            result = run(sweep, every, partial(progress.advance, task))
            progress.remove_task(task)
            progress.advance(whole)
            row = label(sweep) | {"faults": result.faults, "seconds": round(result.seconds, 1)}
            if result.faults:
                row["first"] = result.first
            record["rows"].append(row)
            progress.console.print(" | ".join(cells(row)), markup=False, highlight=False, soft_wrap=True)
            replace_file(path, json.dumps(record, indent=1) + "\n")
    record["complete"] = every == 1 and set(parts) == set(PARTS)
    replace_file(path, json.dumps(record, indent=1) + "\n")
    replace_file(path.with_suffix(".csv"), as_csv(record["rows"]))

    table = Table(*COLUMNS, title=f"{record['machine']}, {record['date']}")
    for row in record["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"written: {path} and {path.with_suffix('.csv')}")
    return [row for row in record["rows"] if row["faults"]]


if __name__ == "__main__":
    main()
