"""A run of the training loop that takes a second: its sizes, made-up tokens, and readers of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mxref.discovery import get_backend
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_training.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from mxref_training.data import Tokens
from mxref_training.data.corpus import TokenCorpus
from mxref_training.errors import DataError
from mxref_training.progress import ProgressSink
from mxref_training.trainer import TrainResult, train

VOCAB = 64
CONFIG = TrainConfig(
    model=ModelConfig(layers=1, width=64, heads=2, kv_heads=2, ffn=64, vocab=VOCAB, max_seq=32),
    optim=OptimConfig(lr=5e-3, warmup=2),
    run=RunConfig(steps=6, batch=4, micro_batch=2, seq_len=32, eval_every=2, eval_tokens=64, seed=3),
)
SR = recipe_from_table({"dialect": "amd", "all": {"rounding": "sr"}})


@dataclass(frozen=True)
class Vocabulary:
    """As much of a tokenizer as the loop asks for."""

    vocab_size: int = VOCAB
    sha256: str = "0" * 64

    def check_vocab(self, model_vocab: int) -> None:
        if model_vocab != self.vocab_size:
            raise DataError(f"a vocabulary of {model_vocab}, not {self.vocab_size}")


def text(count: int, seed: int) -> Tokens:
    """Tokens that mostly follow a rule, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, VOCAB, count)
    ids = np.zeros(count, np.uint16)
    for i in range(1, count):
        ids[i] = noise[i] if rng.random() < 0.1 else (5 * int(ids[i - 1]) + 1) % VOCAB
    return Tokens(ids, hashlib.sha256(ids.tobytes()).hexdigest())


CORPUS = TokenCorpus(text(4000, 1), text(200, 2), Vocabulary(), "made up")  # type: ignore[arg-type]


def run(
    out: Path, recipe: Recipe | str = "bf16", config: TrainConfig = CONFIG, **options: Any
) -> TrainResult:
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    given: dict[str, Any] = {
        "backend": get_backend("reference"),
        "corpus": CORPUS,
        "progress": ProgressSink(),
    }
    return train(config, recipe, out, **given | options)


def change(config: TrainConfig = CONFIG, **run_fields: Any) -> TrainConfig:
    return replace(config, run=replace(config.run, **run_fields))


def metrics(out: Path) -> bytes:
    return (out / "metrics.jsonl").read_bytes()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics(out).splitlines()]


def newest(out: Path) -> int:
    """The step of a run's newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))


def weights(out: Path) -> bytes:
    step = out / "checkpoints" / f"step-{newest(out)}"
    return b"".join((step / f"{g}.safetensors").read_bytes() for g in ("model", "optimizer"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Saboteur(ProgressSink):
    """Does something when a step is reported."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step, self._act = step, act
        self.notes: list[str] = []

    def step(self, step: int, loss: float | None) -> None:
        if step == self._step:
            self._act()

    def note(self, text: str) -> None:
        self.notes.append(text)


def crash() -> None:
    raise RuntimeError("the machine died")
