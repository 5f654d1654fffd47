"""The folder of a run: its lock, its record, and the checks before a run resumes.

A folder with `run.json` holds a run, and one without it does not. `config.toml` and `recipe.toml` are copies for
readers, and are written at each start. Clock times are only in `timing.jsonl` and `run.json`, so a resumed run has the
metrics of a run that never stopped. `docs/reference/durability.rst` has all rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.tomlio import dumps
from mxref_training.checkpoint import CheckpointStore
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import (
    clean,
    explained,
    locked,
    make_folder,
    remove,
    replace_text,
    sync,
    temporary,
)
from mxref_training.errors import CheckpointError, ConfigError, start_over
from mxref_training.identity import unlike_entries

FORMAT = "mxref.run.2"
_FAMILY = "mxref.run."
_LOCK = "run.lock"
LOG = "log.txt"
"""Tracebacks of a run, and in a ladder what it prints. It may be there before `run.json`."""
_OWN = (
    "config.toml", "recipe.toml", "metrics.jsonl", "timing.jsonl", "telemetry.jsonl", "spikes.jsonl", "tensorboard",
    "profile", "shadow.npz", "checkpoints", "run.json",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path
    keep: int
    ranks: Ranks = SOLE
    """The ranks, which save and load checkpoints together; the first rank does everything else."""

    @property
    def metrics(self) -> Path:
        """Losses by step."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Tracebacks."""
        return self.path / LOG

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints."""
        return CheckpointStore(self.path / "checkpoints", self.keep, self.ranks)

    @property
    def _record(self) -> Path:
        return self.path / "run.json"

    @property
    def _deleted(self) -> Path:
        """The name of `run.json` in a run that is being deleted; the next `run.json` replaces it."""
        return temporary(self._record)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder, made if it is missing, and remove what killed processes left.

        Raises:
            ConfigError: another process trains there, or the folder holds files that belong to no run.
            CheckpointError: the folder cannot be made or written.
        """

        def busy(holder: str) -> ConfigError:
            return ConfigError(
                f"{holder} is training in {self.path}: wait until it has ended, stop it, or choose another --out (if "
                f"its host is down and the lock stays, delete {self.path / _LOCK})"
            )

        try:
            with ExitStack() as held:
                with self._writing():
                    self._refuse_strangers()
                    make_folder(self.path)
                    held.enter_context(locked(self.path / _LOCK, busy))
                    if self._deleted.exists() and not self._record.exists():
                        self._delete()
                    for name in _OWN:
                        clean(self.path, f"{name}*")
                    self.store.clean()
                yield
        finally:
            with suppress(OSError):  # it holds a run, as a rule
                self.path.rmdir()

    def _refuse_strangers(self) -> None:
        if self._record.exists() or self._deleted.exists():
            return
        for path in (self.path / name for name in _OWN):
            # The folder of the checkpoints is made before `run.json`.
            if path.exists() and not (path.is_dir() and not any(path.iterdir())):
                raise ConfigError(
                    f"{path} exists, but {self._record} does not: this is not the folder of a run, choose another --out"
                )

    def _writing(self) -> AbstractContextManager[None]:
        return explained(CheckpointError, f"write to {self.path}", "free some space, or choose another --out")

    def record(self) -> dict[str, Any] | None:
        """Return the content of `run.json`; None if there is no run yet.

        Raises:
            CheckpointError: it is damaged, or another version of mxref wrote it.
        """
        return read_record(self.path)

    def require(self, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Raise CheckpointError, which names the first difference, unless the folder holds the wanted run.

        It may have been on other ranks.
        """
        if unlike := unlike_entries(wanted, found):
            key, here, there = unlike[0]
            more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            raise CheckpointError(
                f"{self.path} holds another run: {key} is {there} there and {here} here{more}; "
                f"choose another --out, or {start_over(self.path)}"
            )

    def create(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json` with `facts`, as of `identity.run_facts`. From then on the folder holds a run."""
        with self._writing():
            make_folder(self.store.folder)
            replace_text(self._record, json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")

    def require_checkpoints(self) -> None:
        """Raise CheckpointError if the folder of the checkpoints is missing: the run would start over silently."""
        if not self.store.folder.is_dir():
            raise CheckpointError(
                f"{self.store.folder} is missing, or is a link without a target: put the checkpoints back (is their "
                f"disk mounted?), or {start_over(self.path)}"
            )

    def describe(self, **tables: Any) -> None:
        """Write `NAME.toml` for each table, as for `config` and `recipe`."""
        with self._writing():
            for name, table in tables.items():
                replace_text(self.path / f"{name}.toml", dumps(table))

    def clear(self) -> None:
        """Delete the files of the run in this folder; other files stay.

        Raises:
            CheckpointError: mxref did not write `run.json`, or a file cannot be deleted.
        """
        if not self._record.exists():
            return
        if _FAMILY not in self._record.read_text(encoding="utf-8", errors="replace"):
            raise CheckpointError(
                f"{self._record} is no record of a run: choose another --out, or delete {self.path}"
            )
        with self._writing():
            self._record.rename(self._deleted)
            sync(self.path)
            self._delete()
            remove(self.log)

    def _delete(self) -> None:
        """Delete the files of a run whose `run.json` was renamed."""
        self.store.drop()
        for name in _OWN:
            if name != "checkpoints":
                remove(self.path / name)
        sync(self.path)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's `run.json`; None if there is no run yet.

    Raises:
        CheckpointError: it is damaged, or another version of mxref wrote it.
    """
    path = folder / "run.json"
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = str(found["format"])
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path} is damaged ({err}): restore it, or {start_over(folder)}") from err
    if version != FORMAT:
        raise CheckpointError(
            f"{path} was written by another version of mxref: its format is {version}, and this version reads "
            f"{FORMAT}; go on with that version, choose another folder, or {start_over(folder)}"
        )
    return found
