"""The tables and figures of docs/explanation/ablation-results.rst, from the result files in docs/records/ablations.

A folder there has the name of a shipped ladder, and result files at any depth, as `mxref ablate --collect` takes them.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.plot import STYLE
from bench.records import RECORDS
from mxref_training.lab.collect import collect
from mxref_training.lab.comparison import difference
from mxref_training.lab.ladder import load_ladder
from mxref_training.lab.pooling import Pool
from mxref_training.lab.statistics import late_loss
from mxref_training.report.drawing import COLOURS, INK, MUTED
from mxref_training.report.ladder.answers import answers
from mxref_training.report.ladder.page import headline, provenance, rows, target_line
from mxref_training.report.ladder.plots import short_names

FOLDER = RECORDS / "ablations"
NO_BREAK = "\N{NO-BREAK SPACE}"

Results = dict[str, Any]


def ladders(folder: Path = FOLDER) -> list[str]:
    """Return the names of the ladders that have results."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def results_of(name: str, folder: Path = FOLDER) -> Results:
    """Return what `mxref ablate --collect` makes of a ladder's result files."""
    with tempfile.TemporaryDirectory() as out:
        found = collect(load_ladder(name), [folder / name], Path(out), say=lambda _: None).ladder
    assert found is not None
    return found


def parts() -> dict[str, str]:
    """Return the text of each file that the page includes, by its name."""
    found: dict[str, str] = {}
    for name in ladders():
        results = results_of(name)
        found[f"ablation_{name}.inc"] = "\n".join(_sections(name, results)) + "\n"
        found[f"ablation_{name}.svg"] = figure(results)
    return found


def _sections(name: str, results: Results) -> Iterator[str]:
    names = short_names(results["arms"])
    yield headline(results)
    yield ""
    yield f".. image:: /_measured/ablation_{name}.svg"
    yield "   :alt: Validation loss of each arm less that of FP8, with its interval"
    yield ""
    yield "What each arm costs against FP8, at equal tokens and in tokens to the target, and what the paper claims:\n"
    yield _table(
        ("stage", "arm", "seeds", "loss less FP8's", "tokens to target", "paper", "verdict", "recipe"),
        (
            (
                row.stage, row.label, str(len(row.arm["runs"])), row.gap_reference,
                _whole(f"{row.overhead} {row.interval}".strip()), _whole(row.paper), row.verdict,
                f"``{row.arm['recipe']['digest'][:12]}``",
            )
            for row in rows(results)
        ),
        "ablation-arms",
    )  # fmt: skip
    yield ""
    yield "The contrasts that were declared before the runs, p-values corrected for their number:\n"
    yield _table(
        ("contrast", "loss, nats (95 %)", "p", "tokens (95 %)", "pairs", "answer", "predictions"),
        (
            (
                one.arms, _broken(one.loss), _whole(one.p), _broken(one.tokens), one.pairs, _answer(row),
                "; ".join(f"{text}: {verdict}" for text, verdict in one.predictions) or "–",
            )
            for row, one in zip(results["contrasts"], answers(results, names), strict=True)
        ),
        "ablation-contrasts",
    )  # fmt: skip
    yield ""
    yield target_line(results)
    yield _spread_line(results["spread"])
    yield ""
    yield from (f"| {key}: {value}" for key, value in provenance(results))


def _answer(row: dict[str, Any]) -> str:
    """Return the outcome, the seeds that would decide it, and the mark of pairs that scatter."""
    said: str = {"underpowered": "Cannot be told", "missing": "Not run yet"}.get(
        row["outcome"], row["outcome"].capitalize()
    )
    if row["pairs_to_decide"]:
        said += f"; about {row['pairs_to_decide']} seeds would tell"
    return said + ("; its pairs scatter" if row["loss"] and row["loss"]["noisy"] else "")


def _spread_line(spread: dict[str, dict[str, Any]]) -> str:
    loss, tokens = spread["loss"], spread["tokens"]
    left = sorted({*loss["outside"], *tokens["outside"]})
    return (
        f"Pooled spread of a paired difference: {loss['nats']:.4f} nats ({loss['freedom']} degrees of freedom) and "
        f"{tokens['percent']:.1f} % of the tokens ({tokens['freedom']}). "
        f"Arms that left the pool: {', '.join(left) or 'none'}. "
        "“Its pairs scatter” marks a contrast whose own pairs scatter more than twice as much as that."
    )


def _whole(text: str) -> str:
    """Return a cell that stays on one line."""
    return text.replace(" ", NO_BREAK)


def _broken(text: str) -> str:
    """Return an estimate and its interval as a cell that breaks between the two alone."""
    return _whole(text).replace(f"{NO_BREAK}(", " (")


def _table(head: Iterable[str], body: Iterable[Iterable[str]], kind: str) -> str:
    lines = [".. list-table::", "   :header-rows: 1", f"   :class: ablation {kind}", ""]
    for row in (head, *body):
        lines += [f"   {'* -' if not i else '  -'} {cell}".rstrip() for i, cell in enumerate(row)]
    return "\n".join(lines)


def intervals(results: Results) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Yield each arm that was held against the reference, its loss less the reference's, and the interval's half.

    The spread is the one that a contrast of the two has: that of their own pairs if one of them left the pool.
    """
    spread = results["spread"]["loss"]
    pooled = Pool(spread["nats"], spread["freedom"], tuple(spread["outside"]))
    reference = next(arm for arm in results["arms"] if arm["role"] == "reference")
    for arm in results["arms"]:
        if arm["role"] != "arm" or arm["gap_reference"] is None:
            continue
        outside = bool({arm["name"], reference["name"]} & {*pooled.outside})
        losses, against = (
            {run["pair"]: late_loss(run["curve"], results["tokens"]) for run in one["runs"]}
            for one in (arm, reference)
        )
        found = difference(losses, against, pooled, outside)
        if found is not None:
            yield arm, arm["gap_reference"], found.half_width()


def figure(results: Results) -> str:
    """Return an SVG of the loss of every arm less that of the reference, with 95 % intervals."""
    found = list(intervals(results))
    stages = list(dict.fromkeys(arm["stage"] for arm, _, _ in found))
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(8.4, 0.27 * len(found) + 1.0), layout="constrained")
        axes = drawing.subplots()
        for y, (arm, nats, half) in enumerate(found):
            colour = COLOURS[stages.index(arm["stage"]) % len(COLOURS)]
            axes.errorbar(nats, y, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(found)), [f"{arm['stage']}: {arm['label']}" for arm, _, _ in found])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_xlabel("validation loss less that of FP8, nats per token (95 %, not corrected)", color=MUTED)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
