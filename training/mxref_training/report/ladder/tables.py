"""The tables of a ladder: results, contrasts, the second analysis, last checkpoints, and all numbers for CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mxref_training.report.ladder.plots import colours, short_names
from mxref_training.report.ladder.words import label_of, provenance
from mxref_training.report.table import Column, Table, VerdictCell, plain, written

Results = dict[str, Any]
OWN, VALIDATION = "own", "validation"
"""How a last checkpoint's evaluations name the run's own recipe and its own text."""


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
    """Return the arms in the ladder's order."""
    return [_row(arm) for arm in results["arms"]]


def _row(arm: dict[str, Any]) -> Row:
    verdict = arm["verdict"] or {}
    found = arm["overhead"]
    role = {"reference": "reference", "noise": "noise", "arm": "no claim"}[arm["role"]]
    overhead = found["text"].replace("-", "−") if found else "–"
    interval = ""
    if found and found["reach"] == "crossed":
        interval = "± ?" if found["half_width"] is None else f"± {found['half_width']:.1f}"
    return Row(
        stage=arm["stage"],
        label=arm["label"],
        tokens=_count(arm["tokens_to_target"]),
        overhead="0 %" if arm["role"] == "reference" else overhead,
        interval=interval,
        paper=arm["paper"]["overhead"] if arm["paper"] else "–",
        gap_reference=written(arm["gap_reference"], "+.4f"),
        gap_high_precision=written(arm["gap_high_precision"], "+.4f"),
        verdict=verdict.get("verdict", role),
        reason=verdict.get("reason", ""),
        arm=arm,
    )


def _count(tokens: float | None) -> str:
    for unit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens is not None and tokens >= unit:
            return f"{tokens / unit:.2f} {suffix}"
    return written(tokens, ".0f")


def results_table(results: Results) -> Table:
    """Return a row for each arm: what it needs to the target, and what it loses at equal tokens."""
    reference, second = (label_of(results, which) for which in ("reference", "high_precision"))
    names, shade = short_names(results["arms"]), colours(results["arms"])
    columns = [
        Column("arm", "arm", left=True),
        Column("overhead", "overhead"),
        Column("interval", "± 95 %"),
        Column("tokens", "tokens"),
        Column("paper", "paper"),
        Column("gap_reference", f"Δ {reference}"),
        Column("gap_high_precision", f"Δ {second}"),
        Column("verdict", "verdict", left=True),
    ]
    found = [
        (
            names[row.arm["name"]],
            row.overhead,
            row.interval.removeprefix("± "),
            row.tokens,
            row.paper,
            row.gap_reference,
            row.gap_high_precision,
            VerdictCell(row.verdict, row.reason),
        )
        for row in rows(results)
    ]
    table = Table("results", columns, found, [shade[row.arm["name"]] for row in rows(results)])
    return table if second else table.without("gap_high_precision")


@dataclass(frozen=True)
class Answer:
    """One contrast as the report shows it, every cell as text."""

    question: str
    answer: str
    arms: str
    loss: str
    """Difference in nats with its interval."""
    tokens: str
    """Difference in tokens to target with its interval, or a bound."""
    p: str
    """Corrected p-value."""
    pairs: str
    predictions: str
    """Each with its verdict."""


def answers(results: Results) -> list[Answer]:
    """Return the contrasts in the ladder's order; none for results of an older version."""
    names = short_names(results["arms"])
    return [_answer(row, names) for row in results.get("contrasts") or []]


def _answer(row: dict[str, Any], names: Mapping[str, str]) -> Answer:
    loss, tokens = row["loss"], row["tokens"]
    arm, against = (names.get(row[key], row[key]) for key in ("arm", "against"))
    p = loss["corrected_p"] if loss else None
    said = [f"{one['verdict']} ({one['says']}: {one['source']})" for one in row["predictions"]]
    return Answer(
        question=row["question"],
        answer=row["answer"],
        arms=f"{arm} less {against}",
        loss="–" if loss is None else written(loss["nats"], "+.4f") + _span(loss, "+.4f"),
        tokens=_tokens(tokens),
        p="< 0.0001" if p is not None and p < 0.0001 else written(p, ".4f"),
        pairs=str(row["pairs"]),
        predictions="; ".join(said) or "–",
    )


def _tokens(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    percent = f"{written(found['percent'], '+.1f')} %"
    return f"{found['bound']} {percent}" if found["bound"] else percent + _span(found, "+.1f")


def _span(found: dict[str, Any], form: str) -> str:
    if found["low"] is None or found["high"] is None:
        return ""
    return f" ({written(found['low'], form)} to {written(found['high'], form)})"


def answers_table(results: Results) -> Table:
    """Return the numbers of the contrasts."""
    columns = [
        Column("contrast", "contrast", left=True),
        Column("loss", "loss, nats\n(95 %)"),
        Column("p", "corrected p"),
        Column("tokens", "tokens to target\n(95 %)"),
        Column("pairs", "pairs"),
        Column("predictions", "predictions", left=True),
    ]
    found = [(one.arms, one.loss, one.p, one.tokens, one.pairs, one.predictions) for one in answers(results)]
    return Table("answers", columns, found)


_EXPLORATORY = (
    Column("contrast", "contrast", left=True),
    Column("declared", "declared", left=True),
    Column("nats", "loss, nats", "+.4f"),
    Column("low", "95 %\nfrom", "+.4f"),
    Column("high", "\nto", "+.4f"),
    Column("corrected_p", "p,\ncorrected", ".4f"),
    Column("pairs", "pairs"),
    Column("same_sign", "of the\nsame sign"),
    Column("slope", "slope, nats\nper e-fold", "+.4f"),
    Column("slope_low", "95 %\nfrom", "+.4f"),
    Column("slope_high", "\nto", "+.4f"),
)


def exploratory_table(results: Results) -> Table | None:
    """Return the contrasts of the second analysis; None for results of an older version, or without contrasts."""
    found = (results.get("exploratory") or {}).get("contrasts")
    return contrasts_table("exploratory", found, results) if found else None


def contrasts_table(name: str, found: Sequence[Mapping[str, Any]], results: Results) -> Table:
    """Return contrasts with their slopes, of one ladder or of several; the arms have the names of `results`."""
    names = short_names(results["arms"])
    return Table(name, _EXPLORATORY, [_exploratory(row, names) for row in found])


def _exploratory(row: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, ...]:
    loss, slope = row["loss"], row["slope"]
    pairs = [one[1] if isinstance(one, list) else one for one in loss["pairs"]]
    return (
        f"{names[row['arm']]} less {names[row['against']]}",
        "before the runs" if row["declared"] else "after",
        *(loss[key] for key in ("nats", "low", "high", "corrected_p")),
        len(pairs),
        sum(value * fmean(pairs) > 0 for value in pairs),
        *(slope[key] for key in ("nats", "low", "high")),
    )


def last_tables(results: Results) -> list[Table]:
    """Return the losses on the run's own text by recipe, and those with its own recipe by text; none without them.

    Each cell is the mean over the seeds of the loss less the reference's, and the lowest and highest of them.
    """
    arms = [arm for arm in results["arms"] if arm["runs"] and all("last" in run for run in arm["runs"])]
    reference = next((arm for arm in arms if arm["role"] == "reference"), None)
    if reference is None:
        return []
    first = reference["runs"][0]["last"]
    recipes, texts = list(first["losses"]), list(first["texts"])
    head = [Column("stage", "Stage", left=True, once=True), Column("arm", "Arm", left=True)]
    others = [arm for arm in arms if arm["role"] == "arm"]
    tables = []
    if len(recipes) > 1:
        found = [
            (arm["stage"], arm["label"], *(_said(gaps(arm, reference, name, VALIDATION)) for name in recipes))
            for arm in others
        ]
        own = {OWN: "the arm's own recipe"}
        columns = [Column(name, f"Evaluated in {own.get(name, name)}") for name in recipes]
        tables.append(Table("last_by_recipe", [*head, *columns], found))
    if len(texts) > 1:
        losses = [run["last"]["losses"][OWN] for run in reference["runs"]]
        known = ([loss[name] for loss in losses if loss[name] is not None] for name in texts)
        found = [
            (
                reference["stage"],
                f"{reference['label']}, its loss",
                *(written(fmean(values) if values else None, ".3f") for values in known),
            )
        ]
        found += [
            (arm["stage"], arm["label"], *(_said(gaps(arm, reference, OWN, name)) for name in texts))
            for arm in others
        ]
        tables.append(Table("last_by_text", [*head, *(Column(name, name) for name in texts)], found))
    return tables


def caption(table: Table, reference: str) -> str:
    """Return what a table of `last_tables` shows, in a sentence."""
    what = {
        "last_by_recipe": "Each run's last checkpoint on its own validation text, evaluated with several recipes",
        "last_by_text": "Each run's last checkpoint on other text too, with the arm's own recipe",
    }[table.name]
    return f"{what}: loss less that of {reference} in nats, mean over the seeds (lowest to highest)."


def gaps(arm: dict[str, Any], reference: dict[str, Any], recipe: str, text: str) -> list[float]:
    """Return the losses of an arm less those of the reference at equal seeds, in nats.

    A loss that was not finite gives none.
    """
    base = {run["pair"]: run["last"]["losses"][recipe][text] for run in reference["runs"]}
    pairs = [(run["last"]["losses"][recipe][text], base.get(run["pair"])) for run in arm["runs"]]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def _said(found: Sequence[float]) -> str:
    if not found:
        return "–"
    low, mean, high = (written(value, "+.3f") for value in (min(found), fmean(found), max(found)))
    return f"{mean} ({low} to {high})" if len(found) > 1 else mean


def recipes_table(results: Results) -> Table:
    """Return the treatment of the three GEMMs of each arm."""
    names, shade = short_names(results["arms"]), colours(results["arms"])
    columns = [Column("arm", "Arm", left=True), Column("digest", "Recipe", left=True)]
    columns += [Column(role, role, left=True) for role in ("Fprop", "Dgrad", "Wgrad")]
    found = [
        (names[arm["name"]], arm["recipe"]["digest"], *(text for _, text in arm["recipe"]["treatment"]))
        for arm in results["arms"]
    ]
    return Table("treatments", columns, found, [shade[arm["name"]] for arm in results["arms"]])


def ladder_tables(results: Results) -> list[Table]:
    """Return the arms, their validation curves, their recipes and where the numbers come from, for CSV files.

    Args:
        results: the content of `results.json`.
    """
    arms = results["arms"]
    return [
        plain("arms", _ARM, [_arm(arm) for arm in arms]),
        plain(
            "curves",
            ("arm", "pair", "seed", "tokens", "val_loss", "diverged"),
            [
                (arm["name"], run["pair"], run.get("seed"), tokens, loss, run["diverged"])
                for arm in arms
                for run in arm["runs"]
                for tokens, loss in run["curve"]
            ],
        ),
        plain(
            "recipes",
            ("arm", "digest", "role", "treatment"),
            [
                (arm["name"], arm["recipe"]["digest"], role, text)
                for arm in arms
                for role, text in arm["recipe"]["treatment"]
            ],
        ),
        plain("contrasts", _CONTRAST, [_contrast(row) for row in results.get("contrasts") or []]),
        *(table for table in [exploratory_table(results)] if table),
        plain("provenance", ("key", "value"), provenance(results)),
    ]


_ARM = (
    "arm", "stage", "label", "role", "digest", "tokens_to_target", "overhead_percent", "overhead_low", "overhead_high",
    "reach", "paper", "final_loss", "gap_reference", "gap_high_precision", "tokens_per_second", "verdict", "reason",
)  # fmt: skip


def _arm(arm: dict[str, Any]) -> tuple[Any, ...]:
    found, verdict = arm["overhead"] or {}, arm["verdict"] or {}
    return (
        *(arm[key] for key in ("name", "stage", "label", "role")),
        arm["recipe"]["digest"],
        arm["tokens_to_target"],
        *(found.get(key) for key in ("percent", "low", "high", "reach")),
        arm["paper"]["overhead"] if arm["paper"] else None,
        *(arm[key] for key in ("final_loss", "gap_reference", "gap_high_precision", "tokens_per_second")),
        verdict.get("verdict"),
        verdict.get("reason"),
    )


_CONTRAST = (
    "contrast", "arm", "against", "question", "outcome", "pairs", "nats", "nats_low", "nats_high", "p", "corrected_p",
    "equal_p", "tokens_percent", "tokens_low", "tokens_high", "tokens_bound",
)  # fmt: skip


def _contrast(row: dict[str, Any]) -> tuple[Any, ...]:
    loss, tokens = row["loss"] or {}, row["tokens"] or {}
    return (
        *(row[key] for key in ("name", "arm", "against", "question", "outcome", "pairs")),
        *(loss.get(key) for key in ("nats", "low", "high", "p", "corrected_p", "equal_p")),
        *(tokens.get(key) for key in ("percent", "low", "high", "bound")),
    )
