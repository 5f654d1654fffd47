"""The folder of a run: what it was, what it wrote, and whether it may go on.

`run.json` is the first file to appear: with it the folder is a run, without it it is none. `config.toml` and
`recipe.toml` are copies for readers and are made again where they are missing. `metrics.jsonl` and `timing.jsonl` are
logs, and count up to the length that the newest checkpoint records. Clock readings are in `timing.jsonl` and `run.json`
alone, so the metrics of a resumed run equal those of one that never stopped. `docs/durability.rst` has the whole rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.tomlio import dumps, to_table
from mxref_training.config import Compile, Schedule, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.durable import clean, explained, locked, make_folder, remove, replace_text, sync
from mxref_training.errors import CheckpointError, ConfigError, start_over
from mxref_training.run.backend_code import backend_identity
from mxref_training.run.checkpoint import CheckpointStore
from mxref_training.run.metrics_log import Mark, MetricsLog
from mxref_training.run.telemetry import environment

FORMAT = "mxref.run.2"
_FAMILY = "mxref.run."
_DELETED = ".run.json.deleted"
"""What `run.json` is renamed to before a run is deleted: with it, the files of the run are rubbish."""
_LOCK = "run.lock"
_OWN = ("config.toml", "recipe.toml", "metrics.jsonl", "timing.jsonl", "checkpoints", "run.json")


def identity(config: TrainConfig, recipe: Recipe, backend: Backend, corpus: TokenCorpus) -> dict[str, Any]:
    """Return everything that decides a run's numbers, as plain tables; a resumed run must have the same."""
    run = config.run
    kept: dict[str, Any] = {
        "seed": run.seed,
        "data_seed": run.order_seed,
        "batch": run.batch,
        "micro_batch": run.sequences,
        "seq_len": run.seq_len,
        "eval_every": run.eval_every,
        "eval_tokens": run.eval_tokens,
        "log_every": run.log_every,
    }
    if run.compile is not Compile.NONE:
        kept["compile"] = run.compile
    if run.capture:
        kept["capture"] = True
    if config.optim.schedule is Schedule.COSINE and not config.optim.decay_steps:
        kept["steps"] = run.steps  # it sets where the cosine ends
    table = {
        "model": to_table(config.model),
        "optim": to_table(config.optim),
        "run": kept,
        "recipe": to_table(recipe),
        "data": corpus.hashes,
        "backend": backend_identity(backend),
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other process out of the folder, which is made where it is missing, and clear up after dead ones.

        Raises:
            ConfigError: another process trains there, or the folder holds files of other origin.
            CheckpointError: the folder cannot be made or written.
        """

        def busy(holder: str) -> ConfigError:
            return ConfigError(
                f"{holder} is training in {self.path}: wait until it has ended, stop it, or choose another --out"
            )

        with self._explained():
            self._refuse_strangers()
            existed = self.path.exists()
        try:
            with ExitStack() as held:
                with self._explained():
                    make_folder(self.path)
                    held.enter_context(locked(self.path / _LOCK, busy))
                    for name in _OWN:
                        clean(self.path, name)
                    self.store.clean()
                    if (self.path / _DELETED).exists():
                        self._finish_deletion()
                yield
        finally:
            if not existed:
                with suppress(OSError):  # it holds something
                    self.path.rmdir()

    def _refuse_strangers(self) -> None:
        if any((self.path / name).exists() for name in ("run.json", _DELETED)):
            return
        for name in _OWN:
            path = self.path / name
            if path.is_dir() and not any(path.iterdir()):
                continue  # made before `run.json`
            if path.exists():
                raise ConfigError(
                    f"{self.path / name} exists, but {self.path / 'run.json'} does not: this is not the folder of a "
                    "run, choose another --out"
                )

    def _explained(self) -> Any:
        return explained(CheckpointError, f"write to {self.path}", "free some space, or choose another --out")

    def record(self) -> dict[str, Any] | None:
        """Return `run.json`; None where there is no run yet.

        Raises:
            CheckpointError: it is damaged, or of another version of mxref.
        """
        path = self.path / "run.json"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise CheckpointError(f"cannot read {path}: {err.strerror or err}; choose another --out") from err
        try:
            found = json.loads(text)
            version = str(found["format"])
            if version == FORMAT and not isinstance(found["identity"], dict):
                raise ValueError("identity is no table")
        except (ValueError, KeyError, TypeError) as err:
            raise CheckpointError(f"{path} is damaged ({err}): restore it, or {self._way_out(text)}") from err
        if version != FORMAT:
            whose = "another version of mxref" if version.startswith(_FAMILY) else "another program"
            raise CheckpointError(
                f"{path} was written by {whose}: its format is {version}, and this version reads {FORMAT}; "
                f"choose another --out, or {self._way_out(text)}"
            )
        table: dict[str, Any] = found
        return table

    def _way_out(self, text: str) -> str:
        """Return how to start over: what `--no-resume` may not delete, the user has to."""
        if _is_ours(text):
            return start_over(self.path)
        names = [name for name in _OWN if (self.path / name).exists()]
        return f"start over: delete {', '.join(names)} in {self.path}"

    def require(self, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming the first difference, unless the run here is the one that is wanted."""
        if differences := _differences(wanted, found):
            key, mine, theirs = differences[0]
            more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
            raise CheckpointError(
                f"{self.path} holds another run: {key} is {theirs} there and {mine} here{more}; "
                f"choose another --out, or {start_over(self.path)}"
            )

    def create(self, recipe: Recipe, corpus: TokenCorpus, device: str, facts: Mapping[str, Any]) -> None:
        """Write `run.json`, with `facts` and the device's name: from here on the folder is a run."""
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
        with self._explained():
            make_folder(self.store.folder)
            replace_text(self.path / "run.json", json.dumps(record, indent=1) + "\n")
            (self.path / _DELETED).unlink(missing_ok=True)

    def require_checkpoints(self) -> None:
        """Raise CheckpointError where the folder of the checkpoints is gone: a run would start over unasked."""
        folder = self.store.folder
        if not folder.is_dir():
            what = "leads nowhere" if folder.is_symlink() else "is missing"
            raise CheckpointError(
                f"{folder} {what}: put the checkpoints back (is their disk mounted?), or {start_over(self.path)}"
            )

    def describe(self, config: TrainConfig, recipe: Recipe) -> None:
        """Write `config.toml` and `recipe.toml` where they are missing or say something else."""
        with self._explained():
            for name, text in (("config.toml", dumps(config)), ("recipe.toml", dumps(recipe))):
                path = self.path / name
                if not path.exists() or path.read_bytes() != text.encode():
                    replace_text(path, text)

    def verify_logs(self, step: int) -> None:
        """Cut the logs back to what the checkpoint of a step knew; CheckpointError where that was changed since."""
        for name, mark in log_marks(self.store.state(step)).items():
            MetricsLog(self.path / f"{name}.jsonl", mark).close()

    def clear(self) -> None:
        """Delete the files of the run that is here; other files stay.

        Raises:
            CheckpointError: `run.json` is not one of mxref's, or a file cannot be deleted.
        """
        path = self.path / "run.json"
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        if not _is_ours(text):
            raise CheckpointError(
                f"{path} is no record of a run, or is damaged: choose another --out, or {self._way_out(text)}"
            )
        with self._explained():
            path.rename(self.path / _DELETED)
            sync(self.path)
            self._finish_deletion()

    def _finish_deletion(self) -> None:
        """Delete what a run left, its `run.json` being gone; the mark stays until there is a new one."""
        if (self.path / "run.json").exists():
            (self.path / _DELETED).unlink()
            return
        self.store.clear()
        for name in _OWN:
            path = self.path / name
            if name != "checkpoints":
                remove(path)
        sync(self.path)


def log_marks(state: Mapping[str, Any]) -> dict[str, Mark]:
    """Return what a checkpoint's state says of each log, by its name."""
    return {name: Mark(**mark) for name, mark in state["logs"].items()}


def _is_ours(text: str) -> bool:
    """Return whether a file begins as `run.json` does, whatever became of the rest."""
    return text.startswith(f'{{\n "format": "{_FAMILY}')


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
