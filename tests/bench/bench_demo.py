"""Time the ladder `paper` with vectors of 512 bits against vectors of 256 bits, and make the table of both.

    PYTHONPATH=tests python -m bench.bench_demo [--arms NAMES] [--steps N] [--turns N] [--record]

Both run in turns, in processes of their own, as `mxref ablate paper --jobs auto` runs. Steps and arms can be fewer;
the table says how many there were.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench import machine
from bench.goals import DEMO_RATIO
from bench.records import RECORDS, newest, read
from mxref_numba.path import VARIABLE, KernelPath, available
from rst_table import csv_table

TABLE = "demo_paths.inc"
KIND = "demo_paths"
PATHS = (KernelPath.AVX512, KernelPath.AVX2)


def run_once(path: str, arms: str, steps: int, jobs: str) -> dict[str, Any]:
    """Return wall and processor seconds of a ladder on a path."""
    program = [sys.executable, "-c", "from mxref.cli import main; main()"]
    command = [
        *program,
        "ablate",
        "paper",
        "--set",
        "last.probe=true",
        "--set",
        "data.train=builtin",
        "--jobs",
        jobs,
    ]
    if arms:
        command += ["--arms", arms]
    if steps:
        command += ["--set", f"run.steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = os.environ | {VARIABLE: path, "MXREF_BACKEND": "numba"}
        done = subprocess.run(
            [*command, "--out", str(Path(folder, "demo"))], env=environment, stdout=sys.stderr
        )
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise click.ClickException(f"the ladder on {path} failed with status {done.returncode}")
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return {"path": str(path), "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}


@click.command(help=__doc__)
@click.option("--arms", default="", help="As in `mxref ablate`; all arms without it.")
@click.option("--steps", default=0, help="Of each arm; those of the ladder without it.")
@click.option("--turns", default=1, show_default=True, help="How often each path runs.")
@click.option("--jobs", default="auto", show_default=True, help="As in `mxref ablate`.")
@click.option("--record", is_flag=True, help="Keep the numbers in docs/records.")
def main(arms: str, steps: int, turns: int, jobs: str, record: bool) -> None:
    if missing := [path for path in PATHS if path not in available()]:
        raise click.ClickException(f"this CPU has no path {', '.join(missing)}")
    results = {"machine": machine.describe(), "arms": arms, "steps": steps, "jobs": jobs}
    runs = [run_once(path, arms, steps, jobs) for _ in range(turns) for path in PATHS]
    results["runs"] = runs
    click.echo(table(results))
    if record:
        file = RECORDS / f"{KIND}_{results['machine']['date']}.json"
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        click.echo(file)


def table(results: dict[str, Any]) -> str:
    """Return the sentence and the table of a record as reStructuredText."""
    here = results["machine"]
    arms = [f"`{arm}`" for arm in results["arms"].split(",") if arm]
    what = f"the arm{'s'[: len(arms) != 1]} {', '.join(arms)} and the reference" if arms else "all arms"
    what += f", {results['steps']} steps" if results["steps"] else ""
    noise = "quiet" if here["quiet"] else f"other processes took {here['busy_share']:.0%}"
    best = {
        path: [
            min(run[key] for run in results["runs"] if run["path"] == path)
            for key in ("seconds", "cpu_seconds")
        ]
        for path in PATHS
    }
    ratios = [narrow / wide for wide, narrow in zip(best[PATHS[0]], best[PATHS[1]], strict=True)]
    lines = [
        f"The ladder `paper` ({what}) on {here['processor']}, {here['cores']} cores, {noise}, {here['date']}. "
        f"The goal is at most {DEMO_RATIO} times.",
        "",
    ]  # fmt: skip
    rows = [(path, f"{wall:.1f}", f"{cpu:.1f}") for path, (wall, cpu) in best.items()]
    rows.append((f"{PATHS[1]}, times {PATHS[0]}", *(f"{ratio:.2f}" for ratio in ratios)))
    return "\n".join([*lines, csv_table(("path", "seconds", "seconds of processor time"), rows)])


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the table of the newest record by the name under which the page includes it."""
    return {TABLE: table(read(newest(KIND, records)))}


if __name__ == "__main__":
    main()
