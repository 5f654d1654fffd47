"""The tables and figures of docs/explanation/ablation-results.rst and of its appendix, from docs/records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure

from ablations import branches, conclusions, curves, formats, front, probes
from ablations.ladders import LADDERS, Results, intervals, reference_of, results_of
from ablations.strip import strip
from bench.plot import WIDE, charts
from mxref_training.report.ladder.page import headline, target_line
from mxref_training.report.ladder.tables import answers_table, provenance
from rst_table import csv_table

SOURCES = ("Model", "Tokens per arm", "Data", "Versions")
"""What the page repeats of the results' provenance."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def parts() -> dict[str, str]:
    """Return the text of each file that the page includes, by its name."""
    found: dict[str, str] = {}
    known: dict[str, str] = {}
    for name in LADDERS:
        results = results_of(name)
        found[f"ablation_{name}.inc"] = "\n".join(_sections(name, results, known)) + "\n"
        known = known or dict(provenance(results))
        found |= charts(f"ablation_{name}", partial(figure, results))
        found |= charts(f"ablation_{name}_curves", partial(curves.figure, results))
    sizes = {name: results_of(name) for name in front.SIZES}
    found["ablation_paper_table.inc"] = _cells(front.table(sizes), "ablation-paper") + "\n"
    found["ablation_steps.inc"] = _cells(conclusions.table(sizes), "ablation-steps") + "\n"
    titled = {front.SIZES[name]: results for name, results in sizes.items()}
    found |= charts("ablation_steps", partial(curves.steps, titled))
    found |= charts("ablation_branches", partial(branches.figure, branches.branches_of("readings")))
    found |= {
        f"formats_{name}.inc": _cells(of(results_of(formats.LADDER)), "ablation-formats") + "\n"
        for name, of in (("arms", formats.arms_table), ("answers", formats.answers_table))
    }
    if probed := probes.record():
        found |= {f"ablation_probe_{name}": svg for name, svg in probes.figures(probed).items()}
    return found


def _cells(rows: Iterable[Iterable[str]], kind: str) -> str:
    """Return a table whose numbers stay whole, with breaks before intervals alone; words wrap."""
    head, *body = rows
    return _table(head, [[_number(cell) for cell in row] for row in body], kind)


def _number(cell: str) -> str:
    number, mark, rest = cell.partition("; ")
    return _broken(number) + mark + rest if cell[:1] in "+−>≤0123456789" else cell


def _sections(name: str, results: Results, known: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield the lines of a ladder's part; facts of its provenance that are `known` are left out."""
    yield headline(results)
    yield ""
    yield f".. image:: /_measured/ablation_{name}.svg"
    reference = reference_of(results)["label"]
    yield f"   :alt: Validation loss of each arm less that of {reference}, with its interval"
    yield ""
    yield f"The loss less that of {reference} over the tokens, averaged over the seeds and five evaluations:"
    yield ""
    yield f".. image:: /_measured/ablation_{name}_curves.svg"
    yield f"   :alt: Curves of the validation loss of each arm less that of {reference}"
    yield ""
    yield "Declared contrasts, p-values corrected for their number:\n"
    yield _table(
        ("contrast", "loss, nats (95 %)", "p", "answer"),
        (
            (arms, _broken(loss), _whole(p), _answer(row))
            for row, (arms, loss, p, *_) in zip(results["contrasts"], answers_table(results).rows, strict=True)
        ),
        "ablation-contrasts",
    )  # fmt: skip
    yield ""
    yield target_line(results)
    yield _spread_line(results["spread"])
    yield ""
    yield from (
        f"| {key}: {value}"
        for key, value in provenance(results)
        if key in SOURCES and known.get(key) != value
    )
    devices = {run["environment"]["hardware"]["device"] for arm in results["arms"] for run in arm["runs"]}
    yield f"| Device: {', '.join(sorted(devices))}"


def _answer(row: dict[str, Any]) -> str:
    """Return the outcome, the seeds that would decide it, and the mark of pairs that scatter."""
    said: str = row["outcome"].capitalize()
    if row["pairs_to_decide"]:
        said += f"; {row['pairs_to_decide']} seeds"
    return said + ("; its pairs scatter" if row["loss"] and row["loss"]["noisy"] else "")


def _spread_line(spread: dict[str, dict[str, Any]]) -> str:
    loss, tokens = spread["loss"], spread["tokens"]
    if not loss["freedom"]:
        return "No spread is known, because each arm has one run: there are no intervals and no verdicts."
    left = ", ".join(sorted({*loss["outside"], *tokens["outside"]}))
    return (
        f"Pooled spread of a paired difference: {loss['nats']:.4f} nats ({loss['freedom']} degrees of freedom) and "
        f"{tokens['percent']:.1f} % of the tokens ({tokens['freedom']})."
    ) + (f" Arms that left the pool: {left}." if left else "")


def _whole(text: str) -> str:
    """Return a cell that stays on one line."""
    return text.replace(" ", NO_BREAK)


def _broken(text: str) -> str:
    """Return an estimate and its interval as a cell that breaks between the two alone."""
    return _whole(text).replace(f"{NO_BREAK}(", " (")


def _table(head: Iterable[str], body: Iterable[Iterable[str]], kind: str) -> str:
    return csv_table(tuple(head), body, f"ablation {kind}").rstrip()


def figure(results: Results, width: float = WIDE) -> Figure:
    """Return a figure of the loss of every arm less that of the reference, with 95 % intervals."""
    reference = reference_of(results)["label"]
    label = f"validation loss less that of {reference}, nats per token (95 %, not corrected)"
    return strip(intervals(results), label, width)
