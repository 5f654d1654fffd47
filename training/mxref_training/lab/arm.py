"""One run of one arm: its directory, its fingerprint and its training.

`OUT/arms/NAME/` is the directory of the run. `arm.json` is written there before training; it holds the fingerprint of
everything that the result depends on. `result.json` is written when the arm is done. A result is valid if its digest
is right, it belongs to the fingerprint, and `metrics.jsonl` is unchanged. So an interrupted ladder resumes at the
unfinished arm, from that arm's checkpoint. An arm whose recipe, configuration, data or code changed is trained again,
and its old directory moves to `OUT/superseded/`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import build, to_table
from mxref_training.config import TrainConfig, config_from_table
from mxref_training.durable import explained, locked, make_folder, replace_text, sync
from mxref_training.errors import ConfigError, DivergedError
from mxref_training.lab.fingerprint import changes, is_longer
from mxref_training.lab.ladder import Arm
from mxref_training.run.metrics_log import file_sha256, read_lines

if TYPE_CHECKING:
    from mxref_training.run.loop import TrainResult

_KEY = "arm.json"
_RESULT = "result.json"
_LOCK = "arm.lock"

Record = dict[str, Any]


class Trainer(Protocol):
    """The training loop, as `mxref_training.run.loop.train`."""

    def __call__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        out: Path,
        *,
        backend: Backend,
        corpus: Any,
        label: str,
        progress: Any,
        resume: bool,
    ) -> TrainResult:
        """Train, or resume from the checkpoint in `out`."""


@dataclass(frozen=True)
class ArmRun:
    """One run of one arm, and its directory."""

    out: Path
    """Directory of the ladder."""
    arm: Arm
    seed: int
    """Number of the repetition."""
    config: TrainConfig
    """With the seeds of this run."""
    recipe: Recipe
    key: dict[str, Any]
    """Its fingerprint."""

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.arm.name if self.seed == 0 else f"{self.arm.name}.seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The directory of this run."""
        return self.out / "arms" / self.name

    def finished(self) -> Record | None:
        """Return the record of a finished run that is still valid."""
        if self._stored_key() != plain(self.key):
            return None
        found = _read_json(self.folder / _RESULT) or {}
        record = found.get("record")
        if not isinstance(record, dict) or found != self._sealed(record):
            return None
        return record

    def _sealed(self, record: Record) -> dict[str, Any]:
        """Return the content of `result.json`: a record, and digests that reveal an edit."""
        metrics = self.folder / "metrics.jsonl"
        table = {
            "fingerprint": _digest(self.key),
            "metrics": file_sha256(metrics) if metrics.exists() else "",
            "record": plain(record),
        }
        return table | {"sha256": _digest(table)}

    def finish(self, record: Record) -> Record:
        """Write the record of a finished run, and return it as JSON gives it back."""
        sealed = self._sealed(record)
        write_json(self.folder / _RESULT, sealed)
        found: Record = sealed["record"]
        return found

    def prepare(self) -> str:
        """Prepare the directory, and move one with another fingerprint aside. Return what will happen, and why.

        Raises:
            ConfigError: another process is training there, or the directory cannot be written.
        """
        if self.finished():
            return "finished before, kept"
        with self._explained():
            make_folder(self.folder)
            with self.alone():
                stored = self._stored_key()
                if stored == plain(self.key):
                    if (self.folder / _RESULT).exists():
                        return "result.json or metrics.jsonl was changed later: the result is read again from the run"
                    return "resumes where it stopped"
                if stored and is_longer(stored, plain(self.key)):
                    (self.folder / _RESULT).unlink(missing_ok=True)
                    write_json(self.folder / _KEY, self.key)
                    return f"goes on from {stored['run']['steps']:,} to {self.key['run']['steps']:,} steps"
                if stored is None and not (self.folder / "run.json").exists():
                    write_json(self.folder / _KEY, self.key)
                    return "starts"
                changed = (
                    ", ".join(changes(stored, plain(self.key))) if stored else "its fingerprint is missing"
                )
                aside = self._move_aside()
            make_folder(self.folder)
            with self.alone():
                write_json(self.folder / _KEY, self.key)
        return f"starts anew, because {changed} (the old run is in {aside})"

    def _move_aside(self) -> Path:
        aside = _free_name(self.out / "superseded" / self.folder.name)
        make_folder(aside.parent)
        self.folder.rename(aside)
        for folder in (aside.parent, self.folder.parent):
            sync(folder)
        # A process that waits for the lock then notices that the directory was replaced.
        (aside / _LOCK).unlink()
        return aside

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the existing directory against other processes; ConfigError if another process holds the lock.

        Two processes that write the same run would damage it silently. The other process may be the same command,
        given twice. It may also be a child of a killed ladder, which ends after its current step.
        """

        def busy(holder: str) -> ConfigError:
            return ConfigError(f"{holder} is training in {self.folder}: wait until it has ended, or stop it")

        with ExitStack() as held:
            with self._explained():
                held.enter_context(locked(self.folder / _LOCK, busy))
            yield

    def _explained(self) -> Any:
        return explained(ConfigError, f"write to {self.folder}", "free some space, or choose another --out")

    def to_table(self) -> dict[str, Any]:
        """Return this run as JSON values."""
        return {"out": str(self.out), "seed": self.seed, "key": plain(self.key)} | {
            name: to_table(getattr(self, name)) for name in ("arm", "config", "recipe")
        }

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> ArmRun:
        """Return the run that `to_table` wrote."""
        return cls(
            Path(table["out"]),
            build(Arm, table["arm"], "arm"),
            table["seed"],
            config_from_table(table["config"]),
            recipe_from_table(table["recipe"]),
            table["key"],
        )

    def _stored_key(self) -> dict[str, Any] | None:
        return _read_json(self.folder / _KEY)


class Watch(Protocol):
    """Receives what happens to the runs of a ladder."""

    def begin(self, run: ArmRun) -> None:
        """Prepare a run's directory; called just before the run trains."""

    def done(self, run: ArmRun, record: Record) -> None:
        """Receive the record of a finished run."""

    def failed(self, run: ArmRun, reason: str) -> None:
        """Receive the reason why a run ended without a result."""


class Runner(Protocol):
    """Trains runs, and starts them in order."""

    def __call__(self, runs: Sequence[ArmRun], watch: Watch) -> None:
        """Train all runs, or raise the error that stopped them."""


def train_arm(run: ArmRun, trainer: Trainer, backend: Backend, corpus: Any, progress: Any) -> Record:
    """Train or resume a run in its prepared directory; write its record there and return it.

    Raises:
        ConfigError: another process is training in the directory.
        Interrupted: the trainer raises it. Its other errors pass too, except divergence, which is a result.
    """
    with run.alone():
        record: Record = {
            "arm": run.arm.name,
            "pair": run.seed,
            "seed": run.config.run.seed,
            "data_seed": run.config.run.data_seed,
        }
        try:
            result = trainer(
                run.config,
                run.recipe,
                run.folder,
                backend=backend,
                corpus=corpus,
                label=run.arm.label,
                progress=progress,
                resume=True,
            )
        except DivergedError as err:
            # Divergence is a result, with the curve up to that point: some arms exist to show it. A curve that rises
            # again without this error is judged when the results are assembled.
            record |= {"diverged": True, "reason": str(err), "losses": _logged_losses(run.folder)}
        else:
            record |= {
                "diverged": False,
                "reason": "",
                "losses": result.losses,
                "train_losses": result.train_losses,
                "seconds": result.seconds,
                "tokens": result.tokens,
                "skipped_steps": result.skipped_steps,
            }
        facts = _read_json(run.folder / "run.json") or {}
        kept = ("started", "parameters", "flops_per_token", "versions", "platform", "hardware")
        record |= {"environment": {key: facts[key] for key in kept if key in facts}}
        return run.finish(record)


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as JSON, with null for numbers that JSON lacks; ConfigError if it cannot be written."""
    text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
    with explained(ConfigError, f"write {path}", "free some space, or choose another --out"):
        make_folder(path.parent)
        replace_text(path, text)


def plain(value: Any) -> Any:
    """Return the value as JSON gives it back, with null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _logged_losses(folder: Path) -> list[tuple[int, float | None]]:
    lines = read_lines(folder / "metrics.jsonl")
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, independent of the order of its keys."""
    text = json.dumps(plain(value), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
