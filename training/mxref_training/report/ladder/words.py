"""The sentences of a ladder's report: what it found, how large the noise is, and what such a ladder can show."""

from __future__ import annotations

from typing import Any

from mxref_training.report.ladder.plots import short_names
from mxref_training.report.table import facts_of
from mxref_training.wording import counted

Results = dict[str, Any]


def noise(results: Results) -> float | None:
    """Return the 95 % half-width of an overhead in percent; None if it is unknown.

    It comes from the spread that is pooled over the arms with two or more seeds, else from the reference's repetitions
    with other seeds. An arm that left the pool has an interval of its own.
    """
    outside = results["spread"]["tokens"]["outside"]
    widths = [
        arm["overhead"]["half_width"]
        for arm in results["arms"]
        if arm["overhead"] and arm["overhead"]["reach"] == "crossed" and arm["name"] not in outside
    ]
    alone: float | None = results["noise"]["half_width"]
    return max((width for width in widths if width is not None), default=alone)


def noise_line(results: Results) -> str:
    """Return how large the noise is, and what a ladder of this length and these seeds cannot show."""
    width = noise(results)
    if width is None:
        return (
            "Noise unknown: one seed can show that every recipe trains, and not which is better, because nobody knows "
            "what another seed alone does."
        )
    claims = [arm["paper"]["range"] for arm in results["arms"] if arm["paper"] and arm["paper"]["range"]]
    least = min((low for low, _ in claims), default=width)
    return (
        f"Noise ± {width:.1f} % in tokens to the target: this ladder shows no smaller difference"
        + (f", such as the least that is claimed, {least:g} %" if least < width else "")
        + ". Arms whose intervals overlap are not ranked."
    )


def headline(results: Results) -> str:
    """Return the outcome in a few sentences."""
    counts = results["verdicts"]
    total = sum(counts.values())
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    parts = [f"Of {counted(total, 'claim')}: {said}." if total else "No arm carries a claim."]
    least = results["min_runs"]
    runs = max((a["overhead"]["runs"] for a in results["arms"] if a["verdict"] and a["overhead"]), default=0)
    if total and runs < least:
        stands = "stands" if runs == 1 else "stand"
        parts.append(
            f"At most {counted(runs, 'run')} {stands} behind an interval; a verdict needs {least} (--seeds {least})."
        )
    parts.append(counts_line(results))
    of = results["runs"]
    if of["finished"] < of["planned"]:
        parts.append(f"Not final: {of['finished']} of {of['planned']} planned runs have ended.")
    if results["unfinished"]:
        parts.append(f"Not run yet: {', '.join(results['unfinished'])}.")
    parts.append(flag_line(results))
    return " ".join(part for part in parts if part)


def counts_line(results: Results) -> str:
    """Return how many contrasts have which outcome, and what their seeds can find; empty without contrasts."""
    rows = results["contrasts"]
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
    return f"Target: validation loss {said}, that of {label_of(results, 'reference')} at {fraction} of its tokens."


def label_of(results: Results, which: str) -> str:
    """Return the label of the target's `reference` or `high_precision` arm; its name, or nothing, if it did not run."""
    name = str(results["target"][which])
    found = next((arm["label"] for arm in results["arms"] if arm["name"] == name), None)
    return found or (name if which == "reference" else "")


def exploratory_line(results: Results) -> str:
    """Return on which spread the second analysis stands; empty if it stands on none."""
    found = results["exploratory"]
    if found["pools"][0]["nats"] is None:
        return ""
    pools = found["pools"]
    spreads = [f"{pool['nats']:.4f} nats ({pool['freedom']:g} degrees of freedom)" for pool in pools]
    p = "" if found["noisy_p"] is None else f" (F test, p = {found['noisy_p']:.2g})"
    if len(pools) == 1:
        return f"Spread of a paired difference: {spreads[0]}, of all arms{p and f', one pool{p}'}."
    arms = ", ".join(short_names(results["arms"])[name] for name in found["noisy"])
    own = f"{spreads[1]} for {arms}, which have a pool of their own{p}"
    return f"Spread of a paired difference: {spreads[0]}, and {own}."


def flag_line(results: Results) -> str:
    """Return the runs that are flagged, the reference's first; empty if none is."""
    found = results["flagged"]
    if not found:
        return ""
    names = short_names(results["arms"])
    text = "; ".join(f"{names[one['arm']]}, pair {one['pair']}: {one['reason']}" for one in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    reference = "The reference itself is flagged, so nothing is compared with a run that learned. "
    return f"{reference if found[0]['reference'] else ''}Flagged: {text}{more}."


def how_to_read(results: Results) -> str:
    """Return the paragraph about what such a comparison can and cannot show."""
    return (
        f"Every arm starts from the same weights as {label_of(results, 'reference')} and sees the same data in the "
        "same order, so what differs is the arithmetic. Another seed alone moves the tokens to target by several per "
        "cent in published runs of the full size. A difference within that noise is no finding, in either direction. "
        "An underpowered arm has neither failed nor succeeded: it takes more seeds, more evaluations or more tokens to "
        "tell. A verdict is about this model, these data and this budget, not about the paper's own runs."
    )


def provenance(results: Results) -> list[tuple[str, str]]:
    """Return the provenance of the numbers: software, hardware, data, size and time."""
    model, run = results["config"]["model"], results["config"]["run"]
    lines = {
        "mxref": f"{results['mxref']}, backend {results['backend']}",
        "Model": f"{model['layers']} layers, width {model['width']}, FFN {model['ffn']}, vocabulary {model['vocab']:,}",
        "Tokens per arm": f"{results['tokens']:,} ({run['steps']} steps of {run['batch']} × {run['seq_len']})",
        "Data": results["data"]["report"],
    }
    if run.get("deterministic"):
        lines["Deterministic"] = "no kernel was chosen by its time"
    lines |= {f"SHA-256, {side}": sha for side, sha in results["data"]["hashes"].items()}
    lines["Training time, all arms"] = f"{sum(arm['seconds'] for arm in results['arms']):,.0f} s"
    environments = [run["environment"] for arm in results["arms"] for run in arm["runs"]]
    for part in ("versions", "hardware"):
        # Arms may have run on different machines: each distinct value is shown.
        said = [facts_of(one[part]) for one in environments if one.get(part)]
        if said:
            lines[part.capitalize()] = "; ".join(dict.fromkeys(said))
    return list(lines.items())
