"""The report of one run or of several: an HTML page in one file, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref.roles import GemmRole
from mxref.tomlio import dumps
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.report.runs import plots, tables
from mxref_training.report.runs.metrics import METRICS
from mxref_training.report.runs.read import Run
from mxref_training.report.table import markdown_table, written
from mxref_training.report.templates import template
from mxref_training.report.text import markdown_text

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
        step = run.measured[-1] if run.measured else None
        now = [line for line in run.operands if line["step"] == step]
        who = f"{run.name}: " if len(runs) > 1 else ""
        for key, limit, says in _LIMITS:
            beyond = [line for line in now if line[key] is not None and abs(line[key]) > limit]
            if beyond:
                worst = max(beyond, key=lambda line: abs(line[key]))
                where = f"{tables.slot_title(worst['role'], worst['operand'])} of {worst['layer']}"
                more = f", and {len(beyond) - 1} more operands" if len(beyond) > 1 else ""
                found.append(
                    f"{who}{says.format(worst[key] * (100 if key == 'bias' else 1))} in {where}{more}."
                )
        aligned = [x for x in run.gradients if x["step"] == step and x["cosine"] is not None]
        low = [x for x in aligned if x["cosine"] < _COSINE]
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
    """Write the page and its Markdown into a folder, each in one piece, and return their paths.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    name = REPORT if len(runs) == 1 else COMPARISON
    paths = folder / f"{name}.html", folder / f"{name}.md"
    with explained(FileFormatError, f"write to {folder}", "free some space, or choose another --out"):
        make_folder(folder)
        for path, text in zip(paths, (html(runs), markdown(runs)), strict=True):
            replace_text(path, text)
    return paths


def html(runs: Sequence[Run]) -> str:
    """Return the page."""
    measured = [run for run in runs if run.operands]
    alone = ["run"] if len(runs) == 1 else []
    config, recipe, machine = tables.settings(runs)
    text = template("runs/run.html.j2").render(
        title=_title(runs),
        lead=_lead(runs),
        several=len(runs) > 1,
        facts=facts(runs[0]),
        overview=tables.overview(runs).without("best_val_loss", *alone),
        colour=plots.run_colours(runs),
        curves=plots.curves_svg(runs),
        progress=plots.progress_svg(runs),
        measured=bool(measured),
        steps=_steps(measured),
        without=_without(runs),
        signs=signs(runs) if measured else [],
        summary=tables.summary(measured).without("step", *(alone or ["snr_layer"])) if measured else None,
        lines=plots.lines_svg(measured) if measured else "",
        cosine=plots.cosine_svg(aligned) if (aligned := [run for run in runs if run.gradients]) else "",
        alignment=tables.alignment(runs, 2 if len(runs) > 1 else 5).without("step", *alone),
        heat=[(m.title, plots.heat_svg(measured, m)) for m in METRICS] if measured else [],
        recipes=tables.recipes(runs).without(*alone),
        census=tables.census(runs).without("step", *alone),
        differences=[tables.differing(table) for table in (config, recipe, machine)],
        machine=machine,
        texts=[(run.name, dumps(run.config), dumps(run.recipe)) for run in runs],
    )
    return printable(text)


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


def markdown(runs: Sequence[Run]) -> str:
    """Return the report as Markdown, without figures."""
    parts = [
        f"# {markdown_text(_title(runs))}",
        "",
        markdown_text(_lead(runs)),
        "",
        *markdown_table(tables.overview(runs)),
    ]
    measured = [run for run in runs if run.operands]
    parts += ["", "## Telemetry", ""]
    if note := _without(runs):
        parts += [markdown_text(note), ""]
    if measured:
        parts += [
            *(f"- {markdown_text(sign)}" for sign in signs(runs)),
            "",
            *markdown_table(tables.summary(measured)),
            "",
        ]
        parts += markdown_table(tables.alignment(runs))
    parts += ["", "## Recipe" + "s" * (len(runs) > 1), "", *markdown_table(tables.recipes(runs))]
    census = tables.census(runs)
    if census.rows:
        parts += ["", "## GEMMs that ran", "", *markdown_table(census)]
    settings = tables.settings(runs)
    if len(runs) > 1:
        for heading, table in zip(("Configuration", "Recipe", "Environment"), settings, strict=True):
            own = tables.differing(table)
            parts += ["", f"## {heading}: differences", ""]
            parts += markdown_table(own) if own.rows else ["None."]
    else:
        parts += ["", "## Environment", "", *markdown_table(settings[2])]
        parts += ["", "## Configuration", "", "```toml", dumps(runs[0].config).strip(), "```"]
    return "\n".join(parts) + "\n"
