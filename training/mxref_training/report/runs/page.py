"""The report of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mxref.roles import GemmRole
from mxref.tomlio import dumps
from mxref_training.report.page import Page
from mxref_training.report.probe.tables import slot_title
from mxref_training.report.runs import plots, tables
from mxref_training.report.runs.read import Run
from mxref_training.report.table import written

REPORT, COMPARISON = "report", "comparison"
"""Names of the files, without their suffixes: of one run, and of several."""

WITHOUT = (
    "{names} without telemetry. Switch it on with `mxref train … --set run.telemetry_every=50`, which measures every "
    "50th step; a run that is under way takes it up when the same command is given with it. It changes no bit of the "
    "run."
)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the few numbers that stand at the head of a page."""
    evaluated = tables.last(run.evaluations, "step")
    step, tokens = (written(tables.last(run.steps, key)) for key in ("step", "tokens"))
    return [
        (written(tables.final_loss(run), ".4f"), f"validation loss, step {written(evaluated)}"),
        (written(tables.last(run.steps, "loss"), ".4f"), f"training loss, step {step}"),
        (tokens, f"tokens in {step} of {written(run.config['run'].get('steps'))} steps"),
        (written(tables.rate(run), ",.0f"), "tokens per second, median"),
    ]


def signs(runs: Sequence[Run]) -> list[str]:
    """Return sentences about unusual values in the last measured steps."""
    found = []
    for run in runs:
        now = run.latest
        who = f"{run.name}: " if len(runs) > 1 else ""
        for key, limit, says in _LIMITS:
            beyond = [line for line in now if line[key] is not None and abs(line[key]) > limit]
            if beyond:
                worst = max(beyond, key=lambda line: abs(line[key]))
                where = f"{slot_title(worst['role'], worst['operand'])} of {worst['layer']}"
                more = f", and {len(beyond) - 1} more operands" if len(beyond) > 1 else ""
                found.append(
                    f"{who}{says.format(worst[key] * (100 if key == 'bias' else 1))} in {where}{more}."
                )
        step = tables.last(run.operands, "step")
        low = [x for x in run.gradients if x["step"] == step and (x["cosine"] or 1.0) < _COSINE]
        if low:
            worst = min(low, key=lambda x: x["cosine"])
            more = f", and {len(low) - 1} more layers" if len(low) > 1 else ""
            found.append(f"{who}the cosine of dW is {worst['cosine']:.3f} in {worst['layer']}{more}.")
    return found


_LIMITS = (
    ("nonfinite", 0.0, "{:.3g} % of the scales are NaN"),
    ("clipped", 5.0, "{:.1f} % are clipped"),
    ("zeroed", 50.0, "{:.0f} % are zeroed"),
    ("bias", 0.05, "the bias is {:+.1f} %"),
    ("scale_low", 1.0, "{:.1f} % of the scales are at the lowest byte"),
    ("scale_high", 1.0, "{:.1f} % of the scales are at the highest byte"),
)
"""Limits beyond which a number is unusual; docs/how-to/telemetry.rst gives the reasons."""

_COSINE = 0.95


def write_page(runs: Sequence[Run], folder: Path) -> tuple[Path, Path]:
    """Write the page and its Markdown into a folder, and return their paths.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    name = REPORT if len(runs) == 1 else COMPARISON
    return runs_page(runs).write(folder, name, "free some space, or choose another --out")


def runs_page(runs: Sequence[Run]) -> Page:
    """Return the page of one run, or of several side by side."""
    several, measured = len(runs) > 1, [run for run in runs if run.operands]
    alone = [] if several else ["run"]
    page = Page(_title(runs))
    page.text(_lead(runs), "lead")
    if several:
        table = tables.overview(runs).without("best_val_loss")
        page.table(replace(table, dots=[*plots.run_colours(runs).values()]))
    else:
        page.facts(facts(runs[0]))
    page.heading("Curves")
    page.figure(plots.curves_svg(runs))
    page.figure(plots.progress_svg(runs), "The colours are those of the table above." if several else "")
    page.heading("Telemetry")
    page.text(_without(runs))
    if measured:
        _telemetry(page, measured, signs(runs), several)
    page.heading("Recipes" if several else "Recipe")
    page.table(tables.recipes(runs).without(*alone))
    census = tables.census(runs)
    if census.rows:
        page.heading("GEMMs that ran")
        page.table(
            census.without("step", *alone),
            "In the last measured step, all micro-batches together. The first step of every process is compared with "
            "the recipe, and a run that differs stops.",
        )
    config, recipe, machine = tables.settings(runs)
    if several:
        for heading, table in (("Configuration", config), ("Recipe", recipe), ("Environment", machine)):
            apart = tables.differing(table)
            page.heading(f"{heading}: differences")
            if apart.rows:
                page.table(apart)
            else:
                page.text("None.")
    else:
        page.heading("Environment")
        page.terms([(key, value) for key, value in machine.shown()])
    for run in runs:
        of = f" of {run.name}" if several else ""
        page.code(f"Configuration{of}", dumps(run.config))
        page.code(f"Recipe{of}", dumps(run.recipe))
    return page


def _telemetry(page: Page, runs: Sequence[Run], warnings: Sequence[str], several: bool) -> None:
    """Add the telemetry of the runs that have some."""
    alone = [] if several else ["run"]
    if warnings:
        page.items(warnings)
    else:
        page.text("Nothing in the last measured step is beyond the limits at which a number is worth a look.")
    page.table(
        tables.summary(runs).without("step", *(alone or ["snr_layer"])),
        f"Median and extremes over the layers, in the last measured step ({_steps(runs)}). Clipped: beyond the largest "
        "magnitude. Zeroed: a value that became zero. Bias: the relative error with its sign, weighted by magnitude. "
        "Scales: bytes of block formats; for FP8 the factor itself.",
    )
    page.heading("Telemetry over the steps")
    page.figure(
        plots.lines_svg(runs, plots.METRICS[:4]),
        "Lines: the median over the layers of each run, in the colours above. Bands: from the tenth to the ninetieth "
        "percentile of the layers."
        if several
        else "Thin lines: one for each layer. Bold: their median.",
    )
    if aligned := [run for run in runs if run.gradients]:
        page.heading("Gradients of the weights")
        page.figure(plots.lines_svg(aligned, [plots.COSINE]))
        page.figure(
            plots.heat_svg(aligned, plots.COSINE),
            "The angle between the gradient from quantized operands and the exact one from the same X and dY; 1 is no "
            "difference in direction. Above: over the steps. Below: by layer in the last measured step.",
        )
        page.table(tables.alignment(aligned, 2 if several else 5).without("step", *alone))
    page.heading("Telemetry by layer")
    for metric in plots.METRICS:
        page.heading(metric.title, 3)
        page.figure(plots.heat_svg(runs, metric))
    page.text(
        f"Rows: blocks of the model. Columns: their linear layers. Last measured step ({_steps(runs)}).",
        "note",
    )


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"Run {runs[0].name}"
    return f"{len(runs)} runs: {', '.join(run.name for run in runs)}"


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"Differences are from {runs[0].name}."
    run = runs[0]
    size = run.record.get("parameters")
    parts = [f"{size:,} parameters" if isinstance(size, int) else "", f"recipe {run.recipe.digest}"]
    parts += [f"backend {run.record.get('backend')}", f"started {run.record.get('started')}"]
    return ", ".join(part for part in parts if part) + "."


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
