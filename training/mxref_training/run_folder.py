"""The folder of a run: what it was, what it wrote, and whether it may go on.

`config.toml`, `recipe.toml`, `run.json`, `metrics.jsonl`, `timing.jsonl` and `checkpoints/`. Clock readings are
in `timing.jsonl` and `run.json` alone, so the metrics of a resumed run equal those of one that never stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.tomlio import dumps, to_table
from mxref_training.checkpoint import CheckpointStore, replace_text
from mxref_training.config import Schedule, TrainConfig
from mxref_training.corpus import TokenCorpus
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.telemetry import environment

FORMAT = "mxref.run.1"
_OWN = ("config.toml", "recipe.toml", "metrics.jsonl", "timing.jsonl", "checkpoints", "run.json")


def identity(config: TrainConfig, recipe: Recipe, backend: Backend, corpus: TokenCorpus) -> dict[str, Any]:
    """Return everything that decides a run's numbers, as plain tables; a resumed run must have the same."""
    run = config.run
    kept = {
        "seed": run.seed,
        "data_seed": run.order_seed,
        "batch": run.batch,
        "micro_batch": run.sequences,
        "seq_len": run.seq_len,
        "eval_every": run.eval_every,
        "eval_tokens": run.eval_tokens,
        "log_every": run.log_every,
    }
    if config.optim.schedule is Schedule.COSINE and not config.optim.decay_steps:
        kept["steps"] = run.steps  # it sets where the cosine ends
    table = {
        "model": to_table(config.model),
        "optim": to_table(config.optim),
        "run": kept,
        "recipe": to_table(recipe),
        "data": corpus.hashes,
        "backend": backend.name,
    }
    plain: dict[str, Any] = json.loads(json.dumps(table))
    return plain


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path
    keep: int

    @property
    def metrics(self) -> Path:
        """Losses by step."""
        return self.path / "metrics.jsonl"

    @property
    def timing(self) -> Path:
        """Seconds by step."""
        return self.path / "timing.jsonl"

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints."""
        return CheckpointStore(self.path / "checkpoints", self.keep)

    def record(self) -> dict[str, Any] | None:
        """Return `run.json`; None where there is no run yet.

        Raises:
            CheckpointError: it is damaged.
            ConfigError: there is none, but files that a run would overwrite.
        """
        path = self.path / "run.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT or not isinstance(found["identity"], dict):
                raise ValueError(f"format {found['format']!r}")
        except (FileNotFoundError, NotADirectoryError):
            for name in _OWN:
                if (self.path / name).exists():
                    raise ConfigError(
                        f"{self.path / name} exists, but {path} does not: this is not the folder of a run, "
                        "choose another --out"
                    ) from None
            return None
        except OSError as err:
            raise CheckpointError(f"cannot read {path}: {err.strerror or err}; choose another --out") from err
        except (ValueError, KeyError, TypeError) as err:
            raise CheckpointError(
                f"{path} is damaged ({err}): restore it, or start over with --no-resume"
            ) from err
        table: dict[str, Any] = found
        return table

    def require(self, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming the first difference, unless the run here is the one that is wanted."""
        if differences := _differences(wanted, found):
            key, mine, theirs = differences[0]
            more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
            raise CheckpointError(
                f"{self.path} holds another run: {key} is {theirs} there and {mine} here{more}; "
                "choose another --out, or start over with --no-resume"
            )

    def create(
        self, config: TrainConfig, recipe: Recipe, corpus: TokenCorpus, device: str, facts: Mapping[str, Any]
    ) -> None:
        """Write `config.toml`, `recipe.toml` and `run.json`; `facts` join the latter, and the device's name."""
        record = {
            "format": FORMAT,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **facts,
            "recipe_digest": recipe.digest,
            "data": {
                **corpus.hashes,
                "train_tokens": len(corpus.train),
                "val_tokens": len(corpus.val),
                "report": corpus.report,
            },
            **environment(device),
        }
        files = {
            "run.json": json.dumps(record, indent=1) + "\n",
            "config.toml": dumps(config),
            "recipe.toml": dumps(recipe),
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                replace_text(self.path / name, text)
        except OSError as err:
            raise CheckpointError(
                f"cannot write to {self.path}: {err.strerror or err}; choose another --out"
            ) from err

    def clear(self) -> None:
        """Delete the files of the run that is here; other files stay."""
        if self.record() is None:
            return
        for name in _OWN:  # run.json last: what is left of a deletion cut short is still a run
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def changed_environment(record: Mapping[str, Any], device: str) -> list[str]:
    """Return what differs between the machine of a run so far and this one, as `torch 2.12 -> 2.13`."""
    now = environment(device)
    return [
        f"{key} {theirs} -> {mine}"
        for part in ("versions", "hardware")
        for key, mine, theirs in _differences(now[part], record.get(part, {}))
    ]


def _differences(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append((prefix + key, "not set" if a is None else a, "not set" if b is None else b))
    return found
