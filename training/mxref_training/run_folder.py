"""The folder of a run: its lock, its record, and the checks before a run resumes.

A folder with `run.json` holds a run, and one without it does not. `config.toml` and `recipe.toml` are copies for
readers; missing ones are written again. Clock times are only in `timing.jsonl` and `run.json`, so a resumed run has the
metrics of a run that never stopped. `docs/reference/durability.rst` has all rules.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.tomlio import dumps
from mxref_training.checkpoint import CheckpointStore
from mxref_training.distributed.connect import restarted
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import clean, explained, locked, make_folder, remove, replace_text, sync
from mxref_training.errors import CheckpointError, ConfigError, start_over
from mxref_training.identity import unlike_entries

FORMAT = "mxref.run.2"
_FAMILY = "mxref.run."
_DELETED = ".run.json.deleted"
"""`run.json` gets this name before a run is deleted. If the name is found, the deletion has to be completed."""
_LOCK = "run.lock"
_LEASE = 120.0
"""Seconds after which servers of NFSv4 release the locks of a host that is down; 90 in Linux by default."""
_OWN = (
    "config.toml", "recipe.toml", "metrics.jsonl", "timing.jsonl", "telemetry.jsonl", "spikes.jsonl", "tensorboard",
    "profile", "shadow.npz", "checkpoints", "run.json",
)  # fmt: skip
LOG = "log.txt"
"""Tracebacks of a run, and in a ladder what it prints. It may be there before `run.json`."""


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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder, made if it is missing, and remove what killed processes left.

        Ranks that `torchrun` started again wait for the lock of a host that went down.

        Raises:
            ConfigError: another process trains there, or the folder holds files that belong to no run.
            CheckpointError: the folder cannot be made or written.
        """

        def busy(holder: str) -> ConfigError:
            said = f"{holder} is training in {self.path}: wait until it has ended, stop it, or choose another --out"
            if not holder.endswith(f" on {socket.gethostname()}"):
                said += f" (if that host is down and its lock stays, delete {self.path / _LOCK})"
            return ConfigError(said)

        with self._explained():
            self._refuse_strangers()
            existed = self.path.exists()
        try:
            with ExitStack() as held:
                with self._explained():
                    make_folder(self.path)
                    patience = _LEASE if restarted() else 0.0
                    held.enter_context(locked(self.path / _LOCK, busy, patience))
                    for name in _OWN:
                        clean(self.path, f"{name}*")
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
        """Return the content of `run.json`; None if there is no run yet.

        Raises:
            CheckpointError: it is damaged, or another version of mxref wrote it.
        """
        return read_record(self.path, self._way_out)

    def _way_out(self, text: str) -> str:
        """Return how to start over. The user has to delete what `--no-resume` must not delete."""
        if _is_ours(text):
            return start_over(self.path)
        names = [name for name in _OWN if (self.path / name).exists()]
        return f"start over: delete {', '.join(names)} in {self.path}"

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
        with self._explained():
            make_folder(self.store.folder)
            replace_text(self.path / "run.json", json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")
            (self.path / _DELETED).unlink(missing_ok=True)

    def require_checkpoints(self) -> None:
        """Raise CheckpointError if the folder of the checkpoints is missing: the run would start over silently."""
        folder = self.store.folder
        if not folder.is_dir():
            what = "is a link without a target" if folder.is_symlink() else "is missing"
            raise CheckpointError(
                f"{folder} {what}: put the checkpoints back (is their disk mounted?), or {start_over(self.path)}"
            )

    def describe(self, **tables: Any) -> None:
        """Write `NAME.toml` for each table, as for `config` and `recipe`, if it is missing or differs."""
        with self._explained():
            for name, table in tables.items():
                path, text = self.path / f"{name}.toml", dumps(table)
                if not path.exists() or path.read_bytes() != text.encode():
                    replace_text(path, text)

    def clear(self) -> None:
        """Delete the files of the run in this folder; other files stay.

        Raises:
            CheckpointError: mxref did not write `run.json`, or a file cannot be deleted.
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
        """Delete the files of a run whose `run.json` was renamed. The renamed file stays until a new `run.json`
        exists.
        """
        if (self.path / "run.json").exists():
            (self.path / _DELETED).unlink()
            return
        self.store.clear()
        for name in (*_OWN, LOG):
            path = self.path / name
            if name != "checkpoints":
                remove(path)
        sync(self.path)


def read_record(folder: Path, way_out: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the content of a folder's `run.json`; None if there is no run yet.

    Args:
        folder: of the run.
        way_out: given the text of a file that cannot be read, says what to do.

    Raises:
        CheckpointError: it is damaged, or another version of mxref wrote it.
    """
    path = folder / "run.json"
    with explained(CheckpointError, f"read {path}", "choose another folder"):
        if not path.exists():
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads(text)
        version = str(found["format"])
        if version == FORMAT and not isinstance(found["identity"], dict):
            raise ValueError("identity is no table")
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path} is damaged ({err}): restore it, or {way_out(text)}") from err
    if version != FORMAT:
        raise CheckpointError(
            f"{path} was written by another version of mxref: its format is {version}, and this version reads "
            f"{FORMAT}; choose another folder, or {way_out(text)}"
        )
    table: dict[str, Any] = found
    return table


def _is_ours(text: str) -> bool:
    """Return whether a text begins like a `run.json` of mxref, even if the rest is damaged."""
    return text.startswith(f'{{\n "format": "{_FAMILY}')
