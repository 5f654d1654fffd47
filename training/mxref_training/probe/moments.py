"""The checkpoints that a probe reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref.tomlio import read_toml
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import TrainConfig
from mxref_training.config_files import recorded_config
from mxref_training.durable import file_sha256
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.run_folder import RunFolder

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Moment:
    """A checkpoint of a run of `mxref train`."""

    name: str
    """As figures show it; no other checkpoint of the probe has it."""
    run: Path
    """The run's folder."""
    step: int
    """Optimizer steps taken."""
    record: Mapping[str, Any]
    """`run.json`."""
    identity: Mapping[str, Any]
    """Everything that determines the run's numbers, as stored in the checkpoint."""

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints of the run."""
        return RunFolder(self.run, 1).store

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.store.path(self.step)

    @property
    def seed(self) -> int:
        """Seed of the run's random bits."""
        return int(self.identity["run"]["seed"])

    def config(self, overrides: Sequence[Mapping[str, Any]] = ()) -> TrainConfig:
        """Return the run's configuration, tables laid over it in order.

        Raises:
            CheckpointError: `config.toml` is missing or damaged.
            ConfigError: a value that does not fit.
        """
        from mxref.tomlio import merge

        path = self.run / "config.toml"
        try:
            table: Mapping[str, Any] = read_toml(path)
        except FileFormatError as err:
            raise CheckpointError(
                f"{err}; the command that trained the run writes config.toml again"
            ) from err
        for override in overrides:
            table = merge(table, override)
        return recorded_config(table, str(path))

    def facts(self) -> dict[str, Any]:
        """Return the description of the checkpoint for the results."""
        table = self.identity["run"]
        return {
            "name": self.name,
            "checkpoint": str(self.path),
            "step": self.step,
            "tokens": self.step * int(table["batch"]) * int(table["seq_len"]),
            "seed": self.seed,
            "label": self.record.get("label", ""),
            "trained_by": self.record.get("recipe_digest", ""),
            "model_sha256": self._weights_sha256(),
        }

    def _weights_sha256(self) -> str:
        """Return the SHA-256 of the file of weights; of several ranks' files, that of their SHA-256."""
        digests = [file_sha256(file) for file in sorted(self.path.glob("model*.safetensors"))]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def find_moments(paths: Sequence[Path]) -> list[Moment]:
    """Return the checkpoints of some paths: `RUN/checkpoints/step-N`, or a run's folder for its newest one.

    Raises:
        CheckpointError: a path that holds no checkpoint, or a damaged one.
        ConfigError: the same checkpoint twice, or checkpoints of different models or tokenizers.
    """
    found = [_find(path) for path in paths]
    first = found[0]
    for i, (path, moment) in enumerate(zip(paths, found, strict=True)):
        if any(moment.path.resolve() == other.path.resolve() for other in found[:i]):
            raise ConfigError(f"{path} names the checkpoint {moment.path} a second time")
        for what, mine, theirs in (
            ("model", moment.identity["model"], first.identity["model"]),
            ("tokenizer", moment.identity["data"]["tokenizer"], first.identity["data"]["tokenizer"]),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"{moment.path} has another {what} than {first.path}: one batch cannot serve both; probe them "
                    "one by one"
                )
    several = len({moment.run.resolve() for moment in found}) > 1
    names = [f"{m.run.resolve().name}, step {m.step:,}" if several else f"step {m.step:,}" for m in found]
    if len(set(names)) < len(names):
        names = [f"{m.run}, step {m.step:,}" for m in found]
    return [Moment(name, m.run, m.step, m.record, m.identity) for name, m in zip(names, found, strict=True)]


def _find(path: Path) -> Moment:
    named = _STEP.fullmatch(path.resolve().name)
    run = path.resolve().parent.parent if named else path
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; name a run's folder, the --out of `mxref train`, or RUN/checkpoints/step-N"
        )
    folder = RunFolder(run, 1)
    record = folder.record()
    if record is None:
        raise CheckpointError(
            f"{run} is no run of `mxref train`: it has no run.json; name a run's folder, or RUN/checkpoints/step-N"
        )
    step = int(named[1]) if named else folder.store.latest()
    if step is None:
        raise CheckpointError(f"{run} has no checkpoint yet: train on, or set run.checkpoint_every")
    state = folder.store.state(step)
    try:
        identity = state["identity"]
        Moment("", run, step, record, identity).facts()
        if not isinstance(identity["data"]["tokenizer"], str):
            raise ValueError("the identity has no tokenizer")
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(
            f"the checkpoint {folder.store.path(step)} is damaged: its state lacks {err}; take another one"
        ) from err
    return Moment("", run, step, record, identity)
