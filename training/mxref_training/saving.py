"""Checkpoints that are written while training goes on.

The state is copied into the host's memory, and a thread writes the copy. Ranks meet in the main thread only: after each
step they see whether all have written, and the first one then names the checkpoint. Until then the one before it is the
newest.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from mxref_training.checkpoint import CheckpointStore, Snapshot, Unfinished
from mxref_training.errors import CheckpointError


class Saver:
    """Saves checkpoints at once, or in the background. Its methods are called on every rank.

    As a context manager it completes the last checkpoint at the end of the block.
    """

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self._store, self._background = store, background
        self._late: tuple[Unfinished, Thread] | None = None
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self, snapshot: Snapshot) -> None:
        """Save a checkpoint; in the background, after the one before it is complete.

        Raises:
            CheckpointError: as of `CheckpointStore.save`, for this checkpoint or the one before it.
        """
        if not self._background:
            self._store.save(snapshot)
            return
        self.wait()
        unfinished = self._store.begin(snapshot)
        self._copy(unfinished)
        thread = Thread(target=unfinished.write, name=_thread_name(self._store.folder), daemon=True)
        thread.start()
        self._late = unfinished, thread

    def poll(self) -> None:
        """Complete the checkpoint in the background if it is written; called after each step.

        Raises:
            CheckpointError: a rank could not write it.
        """
        if self._late is None:
            return
        unfinished, thread = self._late
        states = self._store.ranks.gather_numbers([thread.is_alive(), unfinished.problem is not None])
        if any(failed for _, failed in states) or not any(busy for busy, _ in states):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete, if there is one.

        Raises:
            CheckpointError: a rank could not write it.
        """
        if self._late is not None:
            unfinished, thread = self._late
            thread.join()
            self._late = None
            self._store.finish(unfinished)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the checkpoint in the background. After an error one process does so too, if it can.

        Several ranks leave it incomplete after an error, as after a kill, because others may wait for something else.
        """
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception) and not self._store.ranks.several:
            with suppress(CheckpointError):
                self.wait()

    def _copy(self, unfinished: Unfinished) -> None:
        """Replace what is to be written by copies in the host's memory, which the next checkpoint uses again."""
        devices = set()
        for file, boxes in unfinished.files.items():
            for name, box in boxes.items():
                source = box.tensor
                held = self._copies.get((file, name))
                if held is None or held.shape != source.shape or held.dtype != source.dtype:
                    # Only pages that are locked are copied beside the GPU's work.
                    held = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    self._copies[file, name] = held
                held.copy_(source, non_blocking=True)
                devices.add(source.device)
                boxes[name] = replace(box, tensor=held)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _thread_name(folder: Path) -> str:
    return f"checkpoint {os.path.realpath(folder)}"


def wait_for_writers(folder: Path) -> None:
    """Wait until no thread of this process writes a checkpoint into a folder.

    A KeyboardInterrupt leaves such a thread behind. A notebook then goes on in the same process.
    """
    for thread in threading.enumerate():
        if thread.name == _thread_name(folder):
            thread.join()
