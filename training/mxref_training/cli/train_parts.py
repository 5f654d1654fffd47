"""What the words of `mxref train` name, and what the command says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.discovery import get_backend
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe
from mxref.terminal import echo
from mxref_training.config import TrainConfig
from mxref_training.config_files import load_config
from mxref_training.device import default_backend
from mxref_training.distributed.ranks import Ranks
from mxref_training.log import TrainResult
from mxref_training.wording import clock, counted


def say(ranks: Ranks, text: str) -> None:
    """Say something once, on standard error."""
    if ranks.first:
        echo(text, err=True)


def loaded(
    config: str, recipe: str, overrides: Sequence[str], data: str | None, backend: str | None
) -> tuple[TrainConfig, Recipe, Backend, str]:
    """Return what the command names: configuration, recipe and backend, and why this backend."""
    tables: list[str | dict[str, Any]] = [*overrides]
    if data is not None:
        tables.append({"data": {"train": data}})
    settings = load_config(config, tables)
    name, why = default_backend(backend, settings.run.device)
    return settings, load_recipe(recipe), get_backend(name), why


def print_result(result: TrainResult, folder: Path) -> None:
    """Say how a run ended."""
    rate = result.tokens / result.seconds if result.seconds else 0.0
    skipped = f", {counted(result.skipped_steps, 'step')} skipped" if result.skipped_steps else ""
    echo(
        f"validation loss {result.final_loss:.4f} after {result.tokens:,} tokens in {clock(result.seconds)} "
        f"({rate:,.0f} tokens/s){skipped}; see {folder / 'metrics.jsonl'}"
    )
