"""The numbers of a ladder as tables for CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxref_training.report.ladder.exploratory import exploratory_table
from mxref_training.report.ladder.page import provenance
from mxref_training.report.table import Column, Table


def ladder_tables(results: dict[str, Any]) -> list[Table]:
    """Return the arms, their validation curves, their recipes and where the numbers come from.

    Args:
        results: the content of `results.json`.
    """
    arms = results["arms"]
    return [
        _table("arms", _ARM, [_arm(arm) for arm in arms]),
        _table(
            "curves",
            ("arm", "pair", "seed", "tokens", "val_loss", "diverged"),
            [
                (arm["name"], run["pair"], run.get("seed"), tokens, loss, run["diverged"])
                for arm in arms
                for run in arm["runs"]
                for tokens, loss in run["curve"]
            ],
        ),
        _table(
            "recipes",
            ("arm", "digest", "role", "treatment"),
            [
                (arm["name"], arm["recipe"]["digest"], role, text)
                for arm in arms
                for role, text in arm["recipe"]["treatment"]
            ],
        ),
        _table("contrasts", _CONTRAST, [_contrast(row) for row in results.get("contrasts") or []]),
        *(table for table in [exploratory_table(results)] if table),
        _table("provenance", ("key", "value"), provenance(results)),
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


def _table(name: str, keys: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return Table(name, [Column(key, key) for key in keys], rows)
