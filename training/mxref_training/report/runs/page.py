"""The report of one run or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mxref.roles import GemmRole
from mxref.tomlio import dumps
from mxref_training.report.page import Page
from mxref_training.report.probe.tables import slot_title
from mxref_training.report.runs import plots, tables
from mxref_training.report.runs.tables import Run
from mxref_training.report.table import Table
from mxref_training.wording import counted

REPORT, COMPARISON = "report", "comparison"
"""Names of the files, without their suffixes: of one run, and of several."""

WITHOUT = (
    "{names} without telemetry. Switch it on with `mxref train … --set run.telemetry_every=50`, which measures every "
    "50th step; a run that is under way takes it up when the same command is given with it. It changes no bit of the "
    "run."
)


def signs(runs: Sequence[Run]) -> list[str]:
    """Return sentences about unusual values in the last measured steps."""
    found = []
    for run in runs:
        who = f"{run.name}: " if len(runs) > 1 else ""
        for key, excess, says in _LIMITS:
            known = [line for line in run.latest if line.get(key) is not None]
            beyond = sorted(
                (line for line in known if excess(line[key]) > 0), key=lambda line: excess(line[key])
            )
            if beyond:
                worst = beyond[-1]
                more = f", and {counted(len(beyond) - 1, 'more tensor')}" if len(beyond) > 1 else ""
                where = f"{slot_title(worst['role'], worst['operand'])} of {worst['layer']}"
                found.append(f"{who}{says.format(worst[key])} in {where}{more}.")
    return found


_LIMITS: tuple[tuple[str, Callable[[float], float], str], ...] = (
    ("nonfinite", lambda percent: percent, "{:.3g} % of the scales are NaN"),
    ("clipped", lambda percent: percent - 5, "{:.1f} % are clipped"),
    ("zeroed", lambda percent: percent - 50, "{:.0f} % are zeroed"),
    ("bias", lambda share: abs(share) - 0.05, "the bias is {:+.1%}"),
    ("scale_low", lambda percent: percent - 1, "{:.1f} % of the scales are at the lowest byte"),
    ("scale_high", lambda percent: percent - 1, "{:.1f} % of the scales are at the highest byte"),
    ("cosine", lambda cosine: 0.95 - cosine, "the cosine is {:.3f}"),
)
"""How far a number is beyond the limit from which it is unusual; docs/how-to/telemetry.rst gives the reasons."""


def write_page(runs: Sequence[Run], folder: Path) -> tuple[Path, Path]:
    """Write the page and its Markdown into a folder, as `Page.write` does."""
    name = REPORT if len(runs) == 1 else COMPARISON
    return runs_page(runs).write(folder, name, "free some space, or choose another --out")


def runs_page(runs: Sequence[Run]) -> Page:
    """Return the page of one run, or of several side by side."""
    several, measured = len(runs) > 1, [run for run in runs if run.operands]
    names = ", ".join(run.name for run in runs)
    page = Page(f"{len(runs)} runs: {names}" if several else f"Run {names}")
    page.add("text", _lead(runs), "lead")
    page.add("table", _own(tables.overview(runs), several).without("best_val_loss"))
    page.add("h2", "Curves")
    page.add("figure", plots.curves_svg(runs))
    page.add(
        "figure", plots.progress_svg(runs), "The colours are those of the curves above." if several else ""
    )
    page.add("h2", "Telemetry")
    page.add("text", _without(runs))
    if measured:
        _telemetry(page, runs, measured)
    page.add("h2", "Recipes" if several else "Recipe")
    page.add("table", _own(tables.recipes(runs), several))
    config, recipe, machine = tables.settings(runs)
    if several:
        for heading, table in (("Configuration", config), ("Recipe", recipe), ("Environment", machine)):
            apart = tables.differing(table)
            page.add("h2", f"{heading}: differences")
            page.add(*(("table", apart) if apart.rows else ("text", "None.")))
    else:
        page.add("h2", "Environment")
        page.add("terms", machine.shown())
    for run in runs:
        of = f" of {run.name}" if several else ""
        page.add("code", dumps(run.config), f"Configuration{of}")
        page.add("code", dumps(run.recipe), f"Recipe{of}")
    return page


def _own(table: Table, several: bool) -> Table:
    """Return a table without the columns that tell runs apart, if there is only one."""
    return table if several else table.without("run", "val_difference")


def _telemetry(page: Page, runs: Sequence[Run], measured: Sequence[Run]) -> None:
    """Add the telemetry of the runs that have some."""
    several = len(runs) > 1
    found = signs(measured)
    page.add("items", found)
    if not found:
        page.add(
            "text",
            "Nothing in the last measured step is beyond the limits at which a number is worth a look.",
        )
    page.add(
        "table",
        _own(tables.summary(measured), several).without("step", *(["snr_layer"] if several else [])),
        f"Median and extremes over the layers, in the last measured step ({_steps(measured)}). Clipped: beyond the "
        "largest magnitude. Zeroed: a value that became zero. Bias: the relative error with its sign, weighted by "
        "magnitude. Scales: bytes of block formats; for FP8 the factor itself.",
    )
    aligned = [run for run in measured if run.gradients]
    page.add("h2", "Telemetry over the steps")
    page.add("figure", plots.lines_svg(runs, plots.METRICS))
    if aligned:
        page.add("figure", plots.lines_svg(runs, [plots.COSINE]))
    page.add(
        "text",
        "Lines: the median over the layers of each run, in the colours of the curves above."
        if several
        else "Thin lines: one for each layer. Bold: their median.",
        "note",
    )
    page.add("h2", "Telemetry by layer")
    for metric in plots.METRICS:
        page.add("h3", metric.title)
        page.add("figure", plots.heat_svg(measured, metric))
    if aligned:
        page.add("h3", plots.COSINE.title)
        page.add("figure", plots.heat_svg(aligned, plots.COSINE))
    page.add(
        "text",
        f"Rows: blocks of the model. Columns: their linear layers. Last measured step ({_steps(measured)}). Cosine: of "
        "the angle between the gradient from quantized operands and the exact one from the same X and dY.",
        "note",
    )


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"Differences are from {runs[0].name}."
    record = runs[0].record
    return (
        f"{record['parameters']:,} parameters, recipe {record['recipe_digest']}, backend {record['backend']}, started "
        f"{record['started']}."
    )


def _steps(runs: Sequence[Run]) -> str:
    """Return the last measured step, of each run where they differ."""
    steps = [run.measured[-1] for run in runs]
    if len(set(steps)) < 2:
        return "".join(f"{step:,}" for step in steps[:1])
    return ", ".join(f"{run.name}: {step:,}" for run, step in zip(runs, steps, strict=True))


def _without(runs: Sequence[Run]) -> str:
    """Return how telemetry is switched on, where a run has none."""
    names = [run.name for run in runs if not run.operands]
    if not names:
        return ""
    treatments = [own for run in runs if not run.operands for own in run.recipe.treatments()]
    if all(own.kind(role) == "bf16" for own in treatments for role in GemmRole):
        return f"{', '.join(names)}: every GEMM is in BF16, so there is no quantized operand to measure."
    return WITHOUT.format(names=f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}")
