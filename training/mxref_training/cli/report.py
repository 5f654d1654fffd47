"""The command `mxref report`: the page of a run, of several side by side, or of a ladder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxref_training.cli import known
from mxref_training.cli.setting import FOLDER
from mxref_training.errors import ConfigError


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="RUN...",
    type=click.Path(path_type=Path),
    shell_complete=known.runs,
)
@click.option(
    "--out",
    type=FOLDER,
    help="Folder of the pages. Default: that of the run or ladder; for several runs the current one.",
)
@click.option(
    "--csv",
    "csv_folder",
    type=click.Path(path_type=Path),
    help="Write every table as a CSV file into this folder.",
)
def report(folders: tuple[Path, ...], out: Path | None, csv_folder: Path | None) -> None:
    """Write the page of a RUN, or of several side by side.

    A RUN is the --out of `mxref train`; several are compared with the first. One run has report.html and report.md:
    curves, telemetry by layer and GEMM, recipe, hardware and versions. Several have comparison.html and comparison.md.
    The pages need no network. The folder of a ladder, the --out of `mxref ablate`, has its results shown again and its
    report.html and report.md written anew; that of a probe has its probe.html and probe.md written anew. The folders of
    several ladders print the contrasts that all of them have, over the pairs of all of them together.

    \b
    Examples:
      mxref report runs/demo-mxfp4_h16                  the page of one run
      mxref report runs/fp8 runs/mxfp4 --out compared   two runs side by side
      mxref report runs/mxfp4 --csv tables              every table as CSV too
      mxref report runs/ladder                          the page of a ladder
      mxref report runs/readings runs/paper_50m         contrasts over ladders
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    require("report", "torch", "matplotlib", "jinja2", "scipy")
    from mxref.terminal import echo
    from mxref_training.lab.study import RESULTS, load_results
    from mxref_training.probe.results import JSON
    from mxref_training.report.runs.page import write_page
    from mxref_training.report.runs.tables import all_tables, is_run, read_runs
    from mxref_training.report.table import write_csv

    ladders = [folder for folder in folders if (folder / RESULTS).exists() and not is_run(folder)]
    if ladders and len(ladders) < len(folders):
        raise ConfigError(
            f"{ladders[0]} is a ladder, which has a report of its own: name it alone or with other ladders, or name "
            f"runs, as in {ladders[0] / 'arms'}/*"
        )
    if len(ladders) > 1:
        _show_combined([load_results(folder) for folder in ladders], csv_folder)
        return
    if ladders:
        results = load_results(ladders[0])
        show_ladder(results, ladders[0], out)
        if csv_folder:
            from mxref_training.report.ladder.tables import ladder_tables

            _say_csv(write_csv(ladder_tables(results), csv_folder), csv_folder)
        return
    if len(folders) == 1 and (folders[0] / JSON).exists() and not is_run(folders[0]):
        _show_probe(folders[0], out or folders[0], csv_folder)
        return
    runs = read_runs(folders)
    page, _ = write_page(runs, out or (folders[0] if len(folders) == 1 else Path()))
    echo(str(page))
    if csv_folder:
        _say_csv(write_csv(all_tables(runs), csv_folder), csv_folder)


def show_ladder(results: dict[str, Any], folder: Path, out: Path | None = None) -> None:
    """Print what decides and a ladder's table, and write its pages.

    Args:
        results: the content of `results.json`.
        folder: of the ladder, which may hold a probe.
        out: folder of the pages; default that of the ladder.
    """
    from mxref.terminal import console, echo
    from mxref_training.probe.results import JSON, load
    from mxref_training.report.ladder.page import WIDE, screen, write_report
    from mxref_training.report.probe.tables import headline

    terminal = console()
    if not terminal.is_terminal:
        terminal.width = max(terminal.width, WIDE)  # a file or a pipe has room
    probed = load(folder) if (folder / JSON).exists() else None
    if probed:
        echo(f"{headline(probed)}\n")
    terminal.print(screen(results, terminal.width))
    page, _ = write_report(results, out or folder, probed)
    echo(f"\n{page}")


def _show_combined(results: list[dict[str, Any]], csv_folder: Path | None) -> None:
    """Print the contrasts that several ladders share, over all their pairs."""
    from mxref.terminal import echo
    from mxref_training.lab.answers import combined
    from mxref_training.report.ladder.tables import contrasts_table
    from mxref_training.report.table import write_csv

    found = contrasts_table("combined", combined(results), results[0])
    echo(found.markdown())
    if csv_folder:
        _say_csv(write_csv([found], csv_folder), csv_folder)


def _show_probe(folder: Path, out: Path, csv_folder: Path | None) -> None:
    """Write the pages of a probe anew, from the numbers in its folder."""
    from mxref.terminal import echo
    from mxref_training.probe.results import load
    from mxref_training.report.probe.page import write_page
    from mxref_training.report.probe.tables import all_rows
    from mxref_training.report.table import write_csv

    results = load(folder)
    page, _ = write_page(results, out)
    echo(str(page))
    if csv_folder:
        _say_csv(write_csv([all_rows(results)], csv_folder), csv_folder)


def _say_csv(paths: list[Path], folder: Path) -> None:
    from mxref.terminal import echo

    echo(f"{len(paths)} tables in {folder}")


def require(command: str, *packages: str) -> None:
    """Raise ConfigError that says what to install where a package of the training extra is missing."""
    import importlib.util

    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"mxref {command} needs {package}, which is not installed: pip install 'mxref[training]'"
            )
