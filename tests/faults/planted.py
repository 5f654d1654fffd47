"""Planted faults, each of which breaks the rule of `docs/reference/durability.rst`; the tests must see every one."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mxref_training import checkpoint, durable, log_files
from mxref_training.checkpoint import CheckpointStore, Snapshot


def files_are_not_synced() -> None:
    _sync_only(stat.S_ISDIR)


def folders_are_not_synced() -> None:
    _sync_only(stat.S_ISREG)


def _sync_only(wanted: Callable[[int], bool]) -> None:
    real = os.fsync
    os.fsync = lambda descriptor: real(descriptor) if wanted(os.fstat(descriptor).st_mode) else None


def the_name_of_a_checkpoint_is_not_synced() -> None:
    real = durable.publish

    def publish(partial: Path, final: Path) -> None:
        kept, durable.sync = durable.sync, lambda path: None if path == final.parent else kept(path)
        real(partial, final)
        durable.sync = kept

    checkpoint.publish = publish


def the_name_comes_before_the_data() -> None:
    def publish(partial: Path, final: Path) -> None:
        partial.rename(final)
        durable.sync(final.parent)
        for path in sorted(final.iterdir()):
            durable.sync(path)
        durable.sync(final)

    checkpoint.publish = publish


def the_old_checkpoint_goes_first() -> None:
    real = CheckpointStore.save

    def save(self: CheckpointStore, snapshot: Snapshot, *others: Any) -> Path:
        for step in self.steps():
            durable.remove(self.path(step))
        return real(self, snapshot, *others)

    CheckpointStore.save = save  # type: ignore[method-assign]


def the_log_is_not_synced_before_the_checkpoint() -> None:
    log_files.LogFile.length = lambda self: self.path.stat().st_size  # type: ignore[method-assign]


def files_are_written_in_place() -> None:
    def in_place(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        durable.sync(path)
        durable.sync(path.parent)

    _replace_everywhere("replace_text", in_place)


def a_short_write_counts_as_whole() -> None:
    log_files.write_all = os.write  # type: ignore[assignment]


def what_dead_processes_left_stays() -> None:
    _replace_everywhere("clean", lambda folder, pattern: None)


def the_log_goes_on_where_it_ended() -> None:
    seek = os.lseek
    os.lseek = lambda descriptor, offset, how: seek(descriptor, 0, os.SEEK_END)
    os.ftruncate = lambda descriptor, size: None


def nobody_asks_for_a_lock() -> None:
    _replace_everywhere("locked", lambda *_: nullcontext())


def a_folder_is_deleted_in_place() -> None:
    def remove(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    _replace_everywhere("remove", remove)


def _replace_everywhere(name: str, new: object) -> None:
    from mxref_training import run_folder
    from mxref_training.lab import arm, result_file
    from mxref_training.report import page

    for module in (durable, checkpoint, run_folder, arm, result_file, page):
        if hasattr(module, name):
            setattr(module, name, new)
