"""Ladders in this process: small ladders, a trainer with synthetic loss curves, and a corpus without tokens.

`run_ladder` and `run_branches` are those of the product, whose runs a trainer of the test trains here, one by one.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.tomlio import build
from mxref_training.config import TrainConfig
from mxref_training.config_files import load_config
from mxref_training.errors import DivergedError
from mxref_training.lab import branches, study
from mxref_training.lab.arm import train_arm
from mxref_training.lab.ladder import Ladder
from mxref_training.progress import ProgressSink


@dataclass(frozen=True)
class FakeCorpus:
    hashes: dict[str, str] = field(default_factory=lambda: {"train": "aa", "val": "bb", "tokenizer": "cc"})
    report: str = "synthetic curves"


@dataclass(frozen=True)
class FakeResult:
    losses: list[tuple[int, float]]
    train_losses: list[float] = field(default_factory=list)
    seconds: float = 2.0
    tokens: int = 1000
    diverged: bool = False
    skipped_steps: int = 0
    stopped: str = ""


@dataclass
class FakeTrainer:
    """Losses of a power law whose tokens are stretched by an arm's overhead and a little by the seed."""

    slowdown: dict[str, float] = field(default_factory=dict)
    """By label; 0.1 is 10 % more tokens to any loss."""
    diverging: Sequence[str] = ()
    interrupt: Callable[[str], None] = lambda label: None
    calls: list[tuple[str, int]] = field(default_factory=list)
    configs: dict[str, TrainConfig] = field(default_factory=dict)
    """By label."""

    def __call__(self, config: TrainConfig, recipe: Any, out: Path, *, label: str, **_: Any) -> FakeResult:
        assert (out / "arm.json").exists()
        self.calls.append((label, config.run.seed))
        self.configs[label] = config
        self.interrupt(label)
        steps = range(config.run.eval_every, config.run.steps + 1, config.run.eval_every)
        stretch = (1 + self.slowdown.get(label, 0.0)) * (1 + 0.01 * math.sin(config.run.seed))
        losses = [(step, 2 + 6 * (step / stretch) ** -0.25) for step in steps]
        if label in self.diverging:
            lines = (
                {"step": 10, "tokens": 5120, key: value} for key, value in (("loss", 6.0), ("val_loss", 5.5))
            )
            (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            raise DivergedError("loss is not finite at step 17")
        return FakeResult(losses, tokens=config.run.steps * config.run.batch * config.run.seq_len)


def tiny(*overrides: str) -> TrainConfig:
    return load_config("tiny", ["run.steps=100", "run.eval_every=10", *overrides])


def table(**changes: Any) -> dict[str, Any]:
    return {
        "title": "three arms",
        "train": {"preset": "tiny"},
        "recipe": {"dialect": "amd", "all": {"format": "fp8"}},
        "target": {"high_precision": ""},
        "arm": [
            {"name": "fp8", "label": "FP8"},
            {"name": "fp8-seed2", "label": "FP8 again", "seed_offset": 7},
            {"name": "h16", "label": "H16", "recipe": {"all": {"format": "mxfp4", "hadamard": 16}}},
            {"name": "bad", "label": "bad", "recipe": {"all": {"format": "mxfp4"}}},
        ],
        **changes,
    }


def ladder(**changes: Any) -> Ladder:
    return build(Ladder, table(**changes), "test.toml")


def in_process(trainer: Any, backend: Backend, progress: Any = None) -> study.Runner:
    def run(runs: Sequence[Any], tally: study.Tally, corpus: Any) -> None:
        gc.freeze()  # each run collects garbage first, which goes through all that this process holds
        for one in runs:
            tally.begin(one)
            tally.done(one, train_arm(one, trainer, backend, corpus, progress or ProgressSink()))

    return run


def run_ladder(
    lad: Ladder, config: TrainConfig, out: Path, *, single: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    return study.run_ladder(_study(lad, config, out, **{"seeds": 1, **options}), single=single)


def run_branches(lad: Ladder, config: TrainConfig, out: Path, **options: Any) -> dict[str, Any]:
    return branches.run_branches(_study(lad, config, out, **options))


def _study(
    *given: Any, backend: Backend, trainer: Any = None, progress: Any = None, **options: Any
) -> study.Study:
    """A study whose runs `trainer` trains here, unless the options name a runner."""
    return study.Study(
        *given, backend=backend, **{"runner": in_process(trainer, backend, progress), **options}
    )
