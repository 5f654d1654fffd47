"""The answers of a ladder in plain words: what it can show, and the outcome of each contrast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mxref_training.wording import counted

Results = dict[str, Any]


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
    predictions: tuple[tuple[str, str], ...]
    """Each with its verdict."""


def reach_line(results: Results) -> str:
    """Return what a ladder of this length and these seeds can show, and what it cannot."""
    length = f"A ladder of {results['tokens']:,} tokens an arm"
    width = _resolved(results)
    if width is None:
        return (
            f"{length} and one seed can show that every recipe trains. It cannot show which is better: what another "
            "seed alone does is unknown."
        )
    can = f"{length} can show that every recipe trains, and differences above {width:.1f} % in tokens to the target."
    claims = [arm["paper"]["range"] for arm in results["arms"] if arm["paper"] and arm["paper"]["range"]]
    small = [low for low, _ in claims if low < width]
    if not small:
        return can
    later = any(arm["paper"] and arm["paper"]["range"] is None for arm in results["arms"])
    return (
        f"{can} It cannot show differences as small as the claimed ones, which begin at {min(small):g} %"
        + (", nor a divergence that comes later than its runs end." if later else ".")
    )


def _resolved(results: Results) -> float | None:
    """Return the half-width of the widest interval in percent of the tokens; None if there is none."""
    found = [arm["overhead"] for arm in results["arms"] if arm["overhead"]]
    widths = [one["half_width"] for one in found if one["reach"] == "crossed"]
    known = [width for width in widths if width is not None]
    noise: float | None = results["noise"]["half_width"]
    return max(known, default=noise)


def counts_line(results: Results) -> str:
    """Return how many contrasts have which outcome, and what their seeds can find; empty without contrasts."""
    rows = results.get("contrasts") or []
    if not rows:
        return ""
    outcomes = [row["outcome"] for row in rows]
    said = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    text = f"Of {counted(len(rows), 'contrast')}: {said}."
    power = results["power"]
    smallest = [value for value in power["smallest_nats"].values() if value is not None]
    if smallest and power["spread"] is not None:
        low, high = min(smallest), max(smallest)
        span = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
        source = f", from a pilot of {power['runs']} runs" if power["source"] == "pilot" else ""
        text += (
            f" The planned seeds find a difference of {span} nats in 80 % of cases (spread of a pair "
            f"{power['spread']:.4f} nats{source})."
        )
    return text


def answers(results: Results, names: dict[str, str]) -> list[Answer]:
    """Return the contrasts in the ladder's order; none for results of an older version.

    Args:
        results: the content of `results.json`.
        names: how the report calls each arm.
    """
    return [_answer(row, names) for row in results.get("contrasts") or []]


def _answer(row: dict[str, Any], names: dict[str, str]) -> Answer:
    loss, tokens = row["loss"], row["tokens"]
    arm, against = (names.get(row[key], row[key]) for key in ("arm", "against"))
    return Answer(
        question=row["question"],
        answer=row["answer"],
        arms=f"{arm} less {against}",
        loss="–" if loss is None else _signed(loss["nats"], 4) + _span(loss, 4),
        tokens=_tokens(tokens),
        p="–" if loss is None or loss["corrected_p"] is None else _probability(loss["corrected_p"]),
        pairs=str(row["pairs"]),
        predictions=tuple(
            (f"{one['says']}: {one['source']}", str(one["verdict"])) for one in row["predictions"]
        ),
    )


def _tokens(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    if found["bound"]:
        return f"{found['bound']} {_signed(found['percent'], 1)} %"
    return f"{_signed(found['percent'], 1)} %{_span(found, 1)}"


def _span(found: dict[str, Any], digits: int) -> str:
    if found["low"] is None or found["high"] is None:
        return ""
    return f" ({_signed(found['low'], digits)} to {_signed(found['high'], digits)})"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _probability(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def answer_lines(results: Results, names: dict[str, str]) -> list[str]:
    """Return the section of the contrasts as lines of Markdown; none without contrasts.

    Args:
        results: with texts that Markdown shows as they are.
        names: how the report calls each arm.
    """
    found = answers(results, names)
    if not found:
        return []
    lines = ["## Questions", "", *(f"- {one.question} **{one.answer}**" for one in found), ""]
    lines += [
        "| contrast | loss, nats (95 %) | corrected p | tokens to target (95 %) | pairs | predictions |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        said = "; ".join(f"{text}: {verdict}" for text, verdict in one.predictions) or "–"
        lines.append(f"| {one.arms} | {one.loss} | {one.p} | {one.tokens} | {one.pairs} | {said} |")
    return [*lines, ""]
