"""The report of a ladder: a table for the terminal, a page in one file, and the same as Markdown.

Everything is read from `results.json`; nothing is measured or judged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref.tomlio import dumps
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.report.ladder.answers import answer_lines, answers, counts_line, reach_line
from mxref_training.report.ladder.exploratory import exploratory_line, exploratory_table, flag_line
from mxref_training.report.ladder.last import caption, last_tables
from mxref_training.report.ladder.plots import colours, curves_svg, overheads_svg, short_names
from mxref_training.report.probe.section import probe_markdown, section
from mxref_training.report.table import markdown_table
from mxref_training.report.templates import template
from mxref_training.report.text import escaped, markdown_text

if TYPE_CHECKING:
    from rich.table import Table

HTML, MARKDOWN = "report.html", "report.md"
WIDE = 108
"""Columns of a terminal that the whole table takes."""

_STYLES = {"reproduced": "green", "not reproduced": "red", "underpowered": "yellow"}

Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One arm as the tables show it, every cell as text."""

    stage: str
    label: str
    tokens: str
    overhead: str
    interval: str
    paper: str
    gap_reference: str
    gap_high_precision: str
    verdict: str
    """A verdict; or, if the paper claims nothing about the arm, its purpose."""
    reason: str
    arm: dict[str, Any]


def rows(results: Results) -> list[Row]:
    """Return the table's rows in the ladder's order."""
    return [_row(arm) for arm in results["arms"]]


def _row(arm: dict[str, Any]) -> Row:
    verdict = arm["verdict"] or {}
    found = arm["overhead"]
    role = {"reference": "reference", "noise": "noise", "arm": "no claim"}[arm["role"]]
    overhead = found["text"].replace("-", "−") if found else "–"
    if found and found["reach"] == "crossed":
        interval = "± ?" if found["half_width"] is None else f"± {found['half_width']:.1f}"
    else:
        interval = ""
    return Row(
        stage=arm["stage"],
        label=arm["label"],
        tokens=_count(arm["tokens_to_target"]),
        overhead="0 %" if arm["role"] == "reference" else overhead,
        interval=interval,
        paper=arm["paper"]["overhead"] if arm["paper"] else "–",
        gap_reference=_nats(arm["gap_reference"]),
        gap_high_precision=_nats(arm["gap_high_precision"]),
        verdict=verdict.get("verdict", role),
        reason=verdict.get("reason", ""),
        arm=arm,
    )


def headline(results: Results) -> str:
    """Return the outcome in one or two sentences."""
    counts = results["verdicts"]
    total = sum(counts.values())
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    text = f"Of {total} claim{'s' * (total != 1)}: {said}." if total else "No arm carries a claim."
    runs = max(
        (arm["overhead"]["runs"] for arm in results["arms"] if arm["verdict"] and arm["overhead"]), default=0
    )
    if total and runs < results["min_runs"]:
        text += (
            f" At most {runs} run{'s' * (runs != 1)} stand{'s' * (runs == 1)} behind an interval; a verdict needs "
            f"{results['min_runs']} (--seeds {results['min_runs']})."
        )
    text = f"{text} {counts_line(results)}".rstrip()
    counted = results.get("runs")  # which results of earlier versions do not have
    if counted and counted["finished"] < counted["planned"]:
        text += f" Not final: {counted['finished']} of {counted['planned']} planned runs have ended."
    if results["unfinished"]:
        text += f" Not run yet: {', '.join(results['unfinished'])}."
    return f"{text} {flag_line(results)}".rstrip()


def noise_line(results: Results) -> str:
    """Return the effect of another seed alone, in one sentence."""
    noise = results["noise"]
    if noise["runs"] < 2:
        return "The reference ran with one seed only: what another seed does is unknown."
    spread = (
        ""
        if noise["loss_spread"] is None
        else f"; their final losses lie {noise['loss_spread']:.4f} nats apart"
    )
    if noise["half_width"] is None:
        return f"{noise['runs']} runs of the reference, not all of them with a crossing: the noise is unknown{spread}."
    return (
        f"{noise['runs']} runs of the reference with different seeds: a pair of runs must differ by more than "
        f"{noise['half_width']:.1f} % in tokens before it says anything{spread}."
    )


def target_line(results: Results) -> str:
    """Return the target in one sentence."""
    target = results["target"]
    losses = [loss for loss in target["losses"].values() if loss is not None]
    if not losses:
        return "There is no target: the reference diverged, or was not evaluated around it."
    said = " / ".join(f"{loss:.4f}" for loss in losses)
    if "loss" in target:
        return f"Target: validation loss {said}."
    fraction = f"{100 * target['fraction']:.0f} %"
    return f"Target: validation loss {said}, that of {_label(results)} at {fraction} of its tokens."


def table(results: Results, width: int = WIDE) -> Table:
    """Return the table for a terminal; below `WIDE` columns it leaves out tokens and the second gap."""
    from rich.table import Table
    from rich.text import Text

    from mxref.terminal import BOX, HEAD, QUIET

    wide = width >= WIDE
    names = short_names(results["arms"])
    gaps = (f"Δ {_label(results)}", *([f"Δ {_second(results)}"] * (_has(results) and wide)))
    out = Table(title=results["title"], title_justify="left", title_style="bold", box=BOX, header_style=HEAD)
    out.caption = f"{reach_line(results)}\n{target_line(results)}\n{noise_line(results)}\n{headline(results)}"
    out.caption_justify, out.caption_style, out.padding = "left", "", (0, 1, 0, 0)
    if wide:
        out.add_column("stage", style=QUIET, no_wrap=True)
    out.add_column("arm", no_wrap=True)
    for name in (*["tokens"] * wide, "overhead", "± 95 %", "paper", *gaps):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("verdict", no_wrap=True)
    stage = ""
    for row in rows(results):
        shown, stage = row.stage if row.stage != stage else "", row.stage
        out.add_row(
            *((shown, row.label, row.tokens) if wide else (names[row.arm["name"]],)),
            *(row.overhead, row.interval.removeprefix("± "), row.paper),
            *(row.gap_reference, row.gap_high_precision)[: len(gaps)],
            Text(row.verdict, _STYLES.get(row.verdict, QUIET)),
        )
    return out


def markdown(results: Results) -> str:
    """Return the report as Markdown, without charts."""
    last, again = last_tables(results), exploratory_table(results)  # whose cells `markdown_table` escapes
    results = escaped(results, markdown_text)
    second = [f"gap to {_second(results)}"] * _has(results)
    head = [
        "stage",
        "arm",
        "tokens to target",
        "overhead, 95 %",
        "paper",
        f"gap to {_label(results)}",
        *second,
        "verdict",
    ]
    names = short_names(results["arms"])
    lines = [f"# {results['title']}", "", reach_line(results), "", results["description"], ""]
    lines += [f"**{headline(results)}**", "", *answer_lines(results, names)]
    lines += [
        target_line(results),
        noise_line(results),
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in rows(results):
        gaps = [row.gap_reference, *([row.gap_high_precision] * _has(results))]
        verdict = f"{row.verdict} ({row.reason})" if row.reason else row.verdict
        cells = [
            row.stage,
            row.label,
            row.tokens,
            f"{row.overhead} {row.interval}".strip(),
            row.paper,
            *gaps,
            verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Gaps are in nats per token, at equal tokens.", ""]
    if again:
        lines += ["## Exploratory", "", exploratory_line(results), "", *markdown_table(again), ""]
    for found in last:
        lines += [caption(found, _label(results)), "", *markdown_table(found), ""]
    lines += [
        "## How to read this",
        "",
        how_to_read(results),
        "",
    ]
    lines += [f"- {rule}" for rule in results["rules"].values()]
    lines += ["", "## Recipes", "", "| arm | digest | Fprop | Dgrad | Wgrad |", "|---|---|---|---|---|"]
    for arm in results["arms"]:
        treatment = " | ".join(text for _, text in arm["recipe"]["treatment"])
        lines.append(f"| {names[arm['name']]} | `{arm['recipe']['digest']}` | {treatment} |")
    lines += ["", "## Provenance", ""]
    lines += [f"- {name}: {value}" for name, value in provenance(results)]
    return "\n".join(lines) + "\n"


def how_to_read(results: Results) -> str:
    """Return the paragraph about what such a comparison can and cannot show."""
    return (
        f"Every arm starts from the same weights as {_label(results)} and sees the same data in the same order, so "
        "what differs is the arithmetic. Even so, another seed alone moves the tokens to target, by several per cent "
        "in published runs of the full size. Runs of the reference with different seeds show that noise here: a "
        "difference within it is no finding, in either direction, and a short run carries only what that noise "
        "allows. An underpowered arm has neither failed nor succeeded: it takes more seeds, more evaluations or more "
        "tokens to tell. A verdict is about this model, these data and this budget, not about the paper's own runs."
    )


def provenance(results: Results) -> list[tuple[str, str]]:
    """Return the provenance of the numbers: software, hardware, data, size and time."""
    model, run = results["config"]["model"], results["config"]["run"]
    shape = (
        f"{model['layers']} layers, width {model['width']}, FFN {model['ffn']}, vocabulary {model['vocab']:,}"
    )
    lines = [
        ("mxref", f"{results['mxref']}, backend {results['backend']}"),
        ("Model", shape),
        (
            "Tokens per arm",
            f"{results['tokens']:,} ({run['steps']} steps of {run['batch']} × {run['seq_len']})",
        ),
        ("Data", results["data"]["report"]),
        *([("Deterministic", "no kernel was chosen by its time")] if run.get("deterministic") else []),
        *((f"SHA-256, {side}", sha) for side, sha in results["data"]["hashes"].items()),
        ("Training time, all arms", f"{sum(arm['seconds'] for arm in results['arms']):,.0f} s"),
    ]
    # Arms may have run on different machines: each distinct value is shown.
    seen: dict[str, list[str]] = {}
    for arm in results["arms"]:
        for one in arm["runs"]:
            for name, value in _facts(one["environment"]):
                values = seen.setdefault(name, [])
                values += [value] if value not in values else []
    return lines + [(name, "; ".join(values)) for name, values in seen.items()]


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for part in ("versions", "hardware"):
        value = environment.get(part)
        if isinstance(value, dict):
            facts.append((part.capitalize(), ", ".join(f"{k} {v}" for k, v in value.items())))
        elif value:
            facts.append((part.capitalize(), str(value)))
    return facts


def write_report(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` into a folder, made if need be, each in one piece; return their paths.

    Raises:
        FileFormatError: a file cannot be written; an older one is left as it was.
    """
    shown = escaped(results, printable)
    page = template("ladder/page.html.j2").render(
        r=shown,
        rows=rows(shown),
        colour=colours(shown["arms"]),
        names=short_names(shown["arms"]),
        headline=headline(shown),
        reach=reach_line(shown),
        answers=answers(shown, short_names(shown["arms"])),
        target=target_line(shown),
        noise=noise_line(shown),
        how_to_read=how_to_read(shown),
        provenance=provenance(shown),
        config=dumps(shown["config"]),
        reference=_label(shown),
        second=_second(shown) if _has(shown) else "",
        curves=curves_svg(shown),
        overheads=overheads_svg(shown),
        again=exploratory_table(shown),
        again_line=exploratory_line(shown),
        last=[(caption(table, _label(shown)), table) for table in last_tables(shown)],
        probe=section(folder, printable),
    )
    paths = folder / HTML, folder / MARKDOWN
    way_out = f"the numbers are in results.json, and 'mxref report {folder}' makes the report again"
    with explained(FileFormatError, f"write to {folder}", way_out):
        make_folder(folder)
    for path, text in zip(paths, (page, markdown(results) + probe_markdown(folder)), strict=True):
        with explained(FileFormatError, f"write {path}", way_out):
            replace_text(path, text)
    return paths


def _named(results: Results, name: str) -> str | None:
    return next((arm["label"] for arm in results["arms"] if arm["name"] == name), None)


def _label(results: Results) -> str:
    return _named(results, results["target"]["reference"]) or str(results["target"]["reference"])


def _second(results: Results) -> str:
    return _named(results, results["target"]["high_precision"]) or ""


def _has(results: Results) -> bool:
    return bool(_second(results))


def _count(tokens: float | None) -> str:
    if tokens is None:
        return "–"
    for unit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.2f} {suffix}"
    return f"{tokens:.0f}"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}".replace("-", "−")
