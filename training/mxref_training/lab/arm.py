"""One run of one arm: its directory, its fingerprint, and its training, in which divergence is a result.

`OUT/arms/NAME/` is the directory of the run. `arm.json` is written there before training; it holds the fingerprint of
everything that the result depends on. `result.json` is written when the arm is done. A result is valid if its digest
is right, it belongs to the fingerprint, and `metrics.jsonl` is unchanged. A result alone, collected from another
machine, is valid too. So an interrupted ladder resumes at the unfinished arm, from that arm's checkpoint. An arm whose
recipe, configuration, data or code changed is trained again, and its old directory moves to `OUT/superseded/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import build, to_table
from mxref_training import environment
from mxref_training.branch_start import begin_branch
from mxref_training.checkpoint import CheckpointStore
from mxref_training.config import TrainConfig
from mxref_training.config_files import config_from_table
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import explained, locked, make_folder, sync
from mxref_training.errors import ConfigError, DivergedError
from mxref_training.identity import identity
from mxref_training.lab import result_file
from mxref_training.lab.ladder import SEED, Arm
from mxref_training.lab.last_checkpoint import Extra, evaluate_last, release
from mxref_training.lab.result_file import Record, Table, read_json, write_json
from mxref_training.log import read_result

if TYPE_CHECKING:
    from mxref_training.log import TrainResult

DESIGN = "design"
"""A part of a fingerprint beside those of `fingerprint`: where a run starts and ends, if it is not a whole one."""

_KEY = "arm.json"
_RESULT = result_file.NAME
_LOCK = "arm.lock"


def run_name(arm: str, seed: int) -> str:
    """Return the name of a run's directory: that of its arm, and which repetition it is, counted from 0."""
    return f"{arm}{SEED}{seed}" if seed else arm


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
    key: Table = field(default_factory=dict)
    """Its fingerprint, as JSON gives it back; empty as long as the tokens are not known."""
    corpus: str = ""
    """One line about the documents."""
    keep_checkpoints: bool = True
    """Whether its checkpoints stay when it is finished."""
    trunk: Path | None = None
    """Folder of the run that it branches off; None: it starts at step 0."""
    first: int = 0
    """The step at which it starts, of which the trunk has a checkpoint."""
    stops: tuple[int, ...] = ()
    """Steps of which it keeps a checkpoint; it ends after the last. Empty: it ends after `config.run.steps`."""
    extra: Extra = field(default=Extra())
    """Further evaluations of its last checkpoint."""

    @property
    def name(self) -> str:
        """Name of the directory."""
        return run_name(self.arm.name, self.seed)

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"{self.name} from step {self.first}" if self.trunk else self.name

    @property
    def steps(self) -> int:
        """The steps that it takes."""
        return (self.stops[-1] if self.stops else self.config.run.steps) - self.first

    @property
    def tokens(self) -> int:
        """The tokens of its steps."""
        return self.steps * self.config.run.step_tokens

    @property
    def folder(self) -> Path:
        """The directory of this run."""
        return self.out / "arms" / self.name

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / "checkpoints", self.config.run.keep)

    def finished(self) -> Record | None:
        """Return the record of a finished run that is still valid."""
        found = result_file.read(self.folder / _RESULT)
        if not found or found["key"] != self.key or not self.has_begun():
            return None
        # A collected result has no run beside it.
        alone = not any((self.folder / name).exists() for name in ("metrics.jsonl", "run.json"))
        record: Record = found["record"]
        return record if alone or found["metrics"] == result_file.metrics_digest(self.folder) else None

    def finish(self, record: Record) -> Record:
        """Write the record of a finished run, and return it as JSON gives it back."""
        facts = {
            "name": self.name,
            "label": self.arm.label,
            "recipe": self.recipe.digest,
            "key": self.key,
            "config": to_table(self.config),
            "corpus": self.corpus,
            "metrics": result_file.metrics_digest(self.folder),
            "record": record,
        }
        written: Table = write_json(self.folder / _RESULT, result_file.sealed(facts))
        self.drop_checkpoints()
        found: Record = written["record"]
        return found

    def drop_checkpoints(self) -> None:
        """Delete the checkpoints of a finished run, unless they are kept."""
        if not self.keep_checkpoints:
            with _written(self.folder):
                self._store.drop()  # an empty folder shows that no checkpoint is missing

    def prepare(self) -> str:
        """Prepare the directory, and move one with another fingerprint aside. Return what will happen, and why.

        Raises:
            ConfigError: another process is training there, or the directory cannot be written.
        """
        if self.finished():
            return "finished before, kept"
        with _written(self.folder):
            make_folder(self.folder)
            with self.alone():
                stored = self._stored_key()
                if stored == self.key:
                    if (self.folder / _RESULT).exists():
                        return "result.json or metrics.jsonl was changed later: the result is read again from the run"
                    return "resumes where it stopped"
                said = self._make_room(stored)
            make_folder(self.folder)
            with self.alone():
                write_json(self.folder / _KEY, self.key)
        return said

    def _make_room(self, stored: Table | None) -> str:
        """Keep a run that only has to go on for more steps, and move another one aside; return what will happen."""
        if stored and is_longer(stored, self.key):
            began = (self.folder / _KEY).exists()
            (self.folder / _RESULT).unlink(missing_ok=True)
            before, steps = stored["run"]["steps"], self.key["run"]["steps"]
            if began and (self._store.latest() is not None or not (self.folder / "run.json").exists()):
                return f"goes on from {before:,} to {steps:,} steps"
            return f"starts anew, for {steps:,} steps: the run of {before:,} steps has no checkpoint here"
        if not stored and not (self.folder / "run.json").exists():
            return "starts"
        changed = ", ".join(changes(stored, self.key)) if stored else "its fingerprint is missing"
        return f"starts anew, because {changed} (the old run is in {set_aside(self.out, self.folder)})"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the existing directory against other processes; ConfigError if another process holds the lock.

        It may be the same command, given twice, or a child of a killed ladder, which ends after its current step.
        """

        def busy(holder: str) -> ConfigError:
            return ConfigError(f"{holder} is training in {self.folder}: wait until it has ended, or stop it")

        with ExitStack() as held:
            with _written(self.folder):  # the lock alone: what the block does has errors of its own
                held.enter_context(locked(self.folder / _LOCK, busy))
            yield

    def to_table(self) -> Table:
        """Return this run as JSON values."""
        return {**to_table(self), "out": str(self.out), "trunk": str(self.trunk) if self.trunk else None}

    @classmethod
    def from_table(cls, table: Table) -> ArmRun:
        """Return the run that `to_table` wrote."""
        made = {
            "out": Path(table["out"]),
            "arm": build(Arm, table["arm"], "arm"),
            "config": config_from_table(table["config"]),
            "recipe": recipe_from_table(table["recipe"]),
            "trunk": Path(table["trunk"]) if table["trunk"] else None,
            "stops": tuple(table["stops"]),
            "extra": build(Extra, table["extra"], "extra"),
        }
        return cls(**(table | made))

    def has_begun(self) -> bool:
        """Return whether this run, and no other, is in its directory."""
        return self._stored_key() == self.key

    def progress(self) -> float:
        """Return the part of the run that its newest checkpoint holds."""
        return min(1.0, ((self._store.latest() or self.first) - self.first) / self.steps)

    def _stored_key(self) -> Table | None:
        """Return the fingerprint of the run in the directory; a collected result holds its own."""
        return read_json(self.folder / _KEY) or (result_file.read(self.folder / _RESULT) or {}).get("key")


def set_aside(out: Path, folder: Path) -> Path:
    """Move the directory of a run to `out/superseded`, and return its new place."""
    names = (out / "superseded" / f"{folder.name}-{number}" for number in count(1))
    aside = next(path for path in names if not path.exists())
    with _written(folder):
        make_folder(aside.parent)
        folder.rename(aside)
        for parent in (aside.parent, folder.parent):
            sync(parent)
        # A process that waits for the lock then notices that the directory was replaced.
        (aside / _LOCK).unlink(missing_ok=True)
    return aside


def _written(folder: Path) -> Any:
    """Explain an error of the disk while the block writes to a run's directory."""
    return explained(ConfigError, f"write to {folder}", "free some space, or choose another --out")


# ---- training ----


def train_arm(
    run: ArmRun,
    trainer: Callable[..., TrainResult],
    backend: Backend,
    corpus: Any,
    progress: Any,
    ranks: Ranks = SOLE,
) -> Record:
    """Train or resume a run in its prepared directory; the first rank writes its record there, and returns it.

    `trainer` is `mxref_training.trainer.train`, or stands for it.

    Raises:
        ConfigError: another process is training in the directory.
        Interrupted: the trainer raises it. Its other errors pass too, except divergence, which is a result.
    """
    config, recipe, folder = run.config, run.recipe, run.folder
    with run.alone() if ranks.first else nullcontext():
        shared: dict[str, Any] = {"backend": backend, "corpus": corpus, "label": run.arm.label}
        diverged = ""
        try:
            if run.trunk:
                begin_branch(config, recipe, folder, trunk=run.trunk, step=run.first, **shared)
            more = {"progress": progress, "resume": True, "ranks": ranks}
            for stop in run.stops or (None,):
                release(backend)
                result = trainer(config, recipe, folder, stop_after=stop, **more, **shared)
        except DivergedError as err:
            diverged = str(err)
        if not ranks.first:
            return {}
        record: Record = {
            "arm": run.arm.name,
            "pair": run.seed,
            "seed": config.run.seed,
            "data_seed": config.run.data_seed,
            "diverged": bool(diverged),
            "reason": diverged,
        }
        if diverged:
            # Divergence is a result, with the curve up to that point: some arms exist to show it. A curve that rises
            # again without this error is judged when the results are assembled.
            record["losses"] = read_result(folder).losses
        else:
            # A branch counts its tokens from step 0, but the first of them took the trunk's time.
            tokens = result.tokens - run.first * config.run.step_tokens
            record |= {
                "losses": result.losses,
                "seconds": result.seconds,
                "tokens": result.tokens,
                "tokens_per_second": tokens / result.seconds if result.seconds else None,
                "skipped_steps": result.skipped_steps,
            }
            if run.extra:
                record["last"] = evaluate_last(
                    config, recipe, folder, run.extra, backend=backend, corpus=corpus
                )
        record["train_curve"] = result_file.train_curve(folder)
        record["evaluation_seconds"] = result_file.evaluation_seconds(folder)
        facts = read_json(folder / "run.json") or {}
        kept = ("started", "parameters", "flops_per_token", "versions", "platform", "hardware")
        record["environment"] = {key: facts[key] for key in kept if key in facts}
        return run.finish(record)


# ---- fingerprints ----


def fingerprint(
    config: TrainConfig, recipe: Recipe, backend: Backend, corpus: Any, code: str, ranks: int = 1
) -> Table:
    """Return everything that an arm's result depends on, by part, so that a change can be named."""
    parts = identity(config, recipe, backend, corpus)
    several = {"ranks": ranks} if ranks > 1 else {}
    key = parts | {"run": parts["run"] | {"steps": config.run.steps}, "code": code} | several
    found: Table = result_file.plain(key)
    return found


def is_longer(old: Table, new: Table) -> bool:
    """Return whether the new fingerprint differs only in a larger number of steps, so that the old run can continue."""
    before, now = old["run"].get("steps", 0), new["run"]["steps"]
    return before < now and old | {"run": old["run"] | {"steps": now}} == new


def changes(old: Table, new: Table) -> list[str]:
    """Return what differs between two fingerprints, in words."""
    found = []
    for part, value in new.items():
        before = old.get(part)
        if isinstance(value, dict) and isinstance(before, dict):
            if keys := differences(before, value):
                found.append(f"{part} {', '.join(keys[:3])}{' and more' * (len(keys) > 3)} changed")
        elif value != before:
            found.append(f"the {part} changed")
    return found or ["its fingerprint changed"]


def differences(old: Table, new: Table) -> list[str]:
    """Return the keys in which two tables differ, each with the keys of the tables around it, in order."""
    return sorted(key for key, _, _ in environment.differences(old, new))
