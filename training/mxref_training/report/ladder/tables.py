"""The tables of a ladder: results, contrasts, the second analysis, last checkpoints, and all numbers for CSV files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from mxref_training.report.table import Column, Table, facts_of, plain, written

Results = dict[str, Any]
Record = Mapping[str, Any]
OWN, VALIDATION = "own", "validation"
"""How a last checkpoint's evaluations name the run's own recipe and its own text."""
_PURPOSES = {"reference": "reference", "noise": "noise", "arm": "no claim"}


def short_names(arms: Sequence[Record]) -> dict[str, str]:
    """Return each arm's label by its name, with its stage where two arms share the label."""
    labels = [arm["label"] for arm in arms]
    return {
        arm["name"]: f"{arm['stage']}: {arm['label']}" if labels.count(arm["label"]) > 1 else arm["label"]
        for arm in arms
    }


def label_of(results: Results, which: str) -> str:
    """Return the label of the target's `reference` or `high_precision` arm; its name, or nothing, if it did not run."""
    name = str(results["target"][which])
    found = next((arm["label"] for arm in results["arms"] if arm["name"] == name), None)
    return found or (name if which == "reference" else "")


def _arms(results: Results, name: str, *columns: Column) -> Table:
    """Return a table with a row for each arm, which begins with its name in the figures."""
    names = short_names(results["arms"])
    arm = Column("arm", of=lambda arm: names[arm["name"]], left=True)
    return Table.of(name, [arm, *columns], results["arms"])


def results_table(results: Results) -> Table:
    """Return a row for each arm: what it needs to the target, and what it loses at equal tokens."""
    reference, second = (label_of(results, which) for which in ("reference", "high_precision"))
    table = _arms(
        results,
        "results",
        Column("overhead", of=overhead),
        Column("interval", "± 95 %", of=half_width),
        Column("tokens", of=lambda arm: _count(arm["tokens_to_target"])),
        Column("paper", of="paper.overhead"),
        Column("gap_reference", f"Δ {reference}", "+.4f"),
        Column("gap_high_precision", f"Δ {second}", "+.4f"),
        Column("verdict", of=verdict, left=True),
        Column("reason", of="verdict.reason", left=True),
    )
    left_out = [] if second else ["gap_high_precision"]
    if not any(arm["paper"] for arm in results["arms"]):
        left_out += ["paper", "reason"]
    elif runs_behind_claims(results) < results["min_runs"]:
        left_out += ["verdict", "reason"]
    return table.without(*left_out)


def runs_behind_claims(results: Results) -> int:
    """Return the largest number of runs behind the interval of an arm with a claim: below `min_runs` none is judged."""
    return max((a["overhead"]["runs"] for a in results["arms"] if a["verdict"] and a["overhead"]), default=0)


def overhead(arm: Record) -> str:
    """Return the tokens to the target beyond the reference's, as a text."""
    if arm["role"] == "reference":
        return "0 %"
    return arm["overhead"]["text"].replace("-", "−") if arm["overhead"] else "–"


def half_width(arm: Record) -> str:
    """Return the half-width of the overhead's interval: `?` if it is unknown, nothing if the target was not reached."""
    found = arm["overhead"]
    if not found or found["reach"] != "crossed":
        return ""
    return "?" if found["half_width"] is None else f"{found['half_width']:.1f}"


def verdict(arm: Record) -> str:
    """Return the verdict on a claim; the arm's purpose, if the paper claims nothing about it."""
    return str(arm["verdict"]["verdict"] if arm["verdict"] else _PURPOSES[arm["role"]])


def _count(tokens: float | None) -> str:
    for unit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens is not None and tokens >= unit:
            return f"{tokens / unit:.2f} {suffix}"
    return written(tokens, ".0f")


def recipes_table(results: Results) -> Table:
    """Return the treatment of the three GEMMs of each arm."""
    roles = [
        Column(role, of=lambda arm, role=role: dict(arm["recipe"]["treatment"])[role], left=True)  # type: ignore[misc] # mypy knows no default of a lambda
        for role in ("Fprop", "Dgrad", "Wgrad")
    ]
    return _arms(results, "recipes", Column("digest", "recipe", of="recipe.digest", left=True), *roles)


def answers_table(results: Results) -> Table:
    """Return the numbers of the contrasts."""
    columns = [
        Column("contrast", of=_contrast_of(results), left=True),
        Column("loss", "loss, nats\n(95 %)", of=lambda row: _between(row["loss"], "nats", "+.4f")),
        Column("p", "corrected p", of=_p),
        Column("tokens", "tokens to target\n(95 %)", of=_tokens),
        Column("pairs"),
        Column("predictions", of=_predictions, left=True),
    ]
    return Table.of("answers", columns, results["contrasts"])


def _contrast_of(results: Results) -> Callable[[Record], str]:
    names = short_names(results["arms"])
    return lambda row: " less ".join(names.get(row[key]) or str(row[key]) for key in ("arm", "against"))


def _p(row: Record) -> str:
    p = row["loss"]["corrected_p"] if row["loss"] else None
    return "< 0.0001" if p is not None and p < 0.0001 else written(p, ".4f")


def _tokens(row: Record) -> str:
    found = row["tokens"]
    if found and found["bound"]:
        return f"{found['bound']} {written(found['percent'], '+.1f')} %"
    return _between(found, "percent", "+.1f", " %")


def _predictions(row: Record) -> str:
    said = [f"{one['verdict']} ({one['says']}: {one['source']})" for one in row["predictions"]]
    return "; ".join(said) or "–"


def _between(found: Record | None, key: str, form: str, unit: str = "") -> str:
    """Return a number with its interval, if it has one."""
    if found is None:
        return "–"
    text = written(found[key], form) + unit
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text} ({written(found['low'], form)} to {written(found['high'], form)})"


def exploratory_table(results: Results) -> Table:
    """Return the contrasts of the second analysis."""
    return contrasts_table("exploratory", results["exploratory"]["contrasts"], results)


def contrasts_table(name: str, found: Sequence[Record], results: Results) -> Table:
    """Return contrasts with their slopes, of one ladder or of several; the arms have the names of `results`."""
    columns = [
        Column("contrast", of=_contrast_of(results), left=True),
        Column("declared", of=lambda row: "before the runs" if row["declared"] else "after", left=True),
        Column("nats", "loss, nats", "+.4f", "loss.nats"),
        Column("low", "95 %\nfrom", "+.4f", "loss.low"),
        Column("high", "\nto", "+.4f", "loss.high"),
        Column("corrected_p", "p,\ncorrected", ".4f", "loss.corrected_p"),
        Column("pairs", of=lambda row: len(row["loss"]["pairs"])),
        Column("slope", "slope, nats\nper e-fold", "+.4f", "slope.nats"),
        Column("slope_low", "95 %\nfrom", "+.4f", "slope.low"),
        Column("slope_high", "\nto", "+.4f", "slope.high"),
    ]
    return Table.of(name, columns, found)


def last_table(results: Results) -> Table | None:
    """Return the losses of the last checkpoints less those of the reference; None without further evaluations.

    Each cell is the mean over the seeds, and the lowest and highest of them.
    """
    arms = [arm for arm in results["arms"] if all("last" in run for run in arm["runs"])]
    reference = next((arm for arm in arms if arm["role"] == "reference"), None)
    if reference is None:
        return None
    first = reference["runs"][0]["last"]

    def gap(recipe: str, text: str, key: str, title: str) -> Column:
        return Column(key, title, of=lambda arm: _said(gaps(arm, reference, recipe, text)))

    names = short_names(results["arms"])
    columns = [
        Column("arm", of=lambda arm: names[arm["name"]], left=True),
        *(gap(OWN, text, text, f"{text},\nown recipe") for text in first["texts"]),
        *(
            gap(name, VALIDATION, f"in {name}", f"{VALIDATION},\nin {name}")
            for name in first["losses"]
            if name != OWN
        ),
    ]
    return Table.of("last", columns, [arm for arm in arms if arm["role"] == "arm"])


def gaps(arm: Record, reference: Record, recipe: str, text: str) -> list[float]:
    """Return the losses of an arm less those of the reference at equal seeds, in nats, where both are finite."""
    base = {run["pair"]: run["last"]["losses"][recipe][text] for run in reference["runs"]}
    pairs = [(run["last"]["losses"][recipe][text], base.get(run["pair"])) for run in arm["runs"]]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def _said(found: Sequence[float]) -> str:
    if not found:
        return "–"
    low, mean, high = (written(value, "+.3f") for value in (min(found), fmean(found), max(found)))
    return f"{mean} ({low} to {high})" if len(found) > 1 else mean


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


def ladder_tables(results: Results) -> list[Table]:
    """Return the arms, their validation curves, their recipes and where the numbers come from, for CSV files."""
    arms = results["arms"]
    points = [
        run | {"arm": arm["name"], "tokens": tokens, "val_loss": loss}
        for arm in arms
        for run in arm["runs"]
        for tokens, loss in run["curve"]
    ]
    tables = [
        plain("arms", _ARM, arms),
        plain("curves", "arm pair seed tokens val_loss diverged", points),
        recipes_table(results),
        plain("contrasts", _CONTRAST, results["contrasts"]),
        exploratory_table(results),
        Table("provenance", [Column("key"), Column("value")], provenance(results)),
    ]
    last = last_table(results)
    return [*tables, last] if last else tables


_ARM = """
arm=name stage label role digest=recipe.digest tokens_to_target overhead_percent=overhead.percent
overhead_low=overhead.low overhead_high=overhead.high reach=overhead.reach paper=paper.overhead final_loss gap_reference
gap_high_precision tokens_per_second verdict=verdict.verdict reason=verdict.reason
"""
_CONTRAST = """
contrast=name arm against question outcome pairs nats=loss.nats nats_low=loss.low nats_high=loss.high p=loss.p
corrected_p=loss.corrected_p equal_p=loss.equal_p tokens_percent=tokens.percent tokens_low=tokens.low
tokens_high=tokens.high tokens_bound=tokens.bound
"""
