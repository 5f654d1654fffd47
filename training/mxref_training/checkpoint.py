"""Checkpoints: their files, how they are written, verified and read, and which of them stay.

`checkpoints/step-N/` holds a safetensors file for each of `GROUPS` and each rank that wrote: `model.safetensors` of one
rank, `model-1-of-2.safetensors` of several. `state.json` has everything else, and `manifest.json` size and SHA-256 of
each file. The folder is written under a temporary name and renamed. Any number of ranks reads it. Nothing is pickled.
`run_state` says what a run puts in, and `shards` how ranks share the tensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError

from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import (
    clean,
    file_sha256,
    make_folder,
    publish,
    remedy,
    remove,
    replace_text,
    sync,
    temporary,
)
from mxref_training.errors import CheckpointError, start_over
from mxref_training.shards import Box, boxes_to_write, opened, write_boxes

FORMAT = "mxref.checkpoint.4"
GROUPS = ("model", "optimizer", "rng")
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"
"""A text file that names the newest checkpoint, for scripts."""
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")

Facts = dict[str, dict[str, Any]]
"""Entries of a manifest, by the names of files: `bytes` and `sha256`."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to resume after `step` optimizer steps."""

    step: int
    tensors: Mapping[str, dict[str, torch.Tensor]]
    """Named tensors of each of `GROUPS`; no two may share memory. A DTensor is this rank's part."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""


def file_name(group: str, rank: int = 0, world: int = 1) -> str:
    """Return the name of the file that holds a rank's part of a group."""
    return f"{group}.safetensors" if world == 1 else f"{group}-{rank + 1}-of-{world}.safetensors"


def file_facts(path: Path) -> dict[str, Any]:
    """Return the entry of a manifest for a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write the manifest of a checkpoint."""
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _verify_file(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the file, unless the file is that of an entry of a manifest."""
    if (size := path.stat().st_size) != wanted["bytes"]:
        raise ValueError(f"{path.name} has {size:,} bytes, not {wanted['bytes']:,}")
    if file_sha256(path) != wanted["sha256"]:
        raise ValueError(f"{path.name} does not have the SHA-256 that was recorded")


@dataclass
class Unfinished:
    """A checkpoint under its temporary name."""

    step: int
    state: Mapping[str, Any]
    folder: Path
    files: dict[str, dict[str, Box]]
    """The boxes that this rank writes, by file."""
    facts: Facts = field(default_factory=dict)
    """The files that it has written."""
    problem: Exception | None = None
    """Why it could not write them."""

    def write(self) -> None:
        """Write and sync this rank's files; no other rank is waited for. An exception is kept in `problem`."""
        try:
            for name, boxes in self.files.items():
                write_boxes(self.folder / name, boxes)
                self.facts[name] = file_facts(self.folder / name)
            for name in self.files:  # another host cannot sync them
                sync(self.folder / name)
        except Exception as err:
            self.problem = err


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    `save`, `begin`, `finish`, and `load` with `into` are collective: every rank calls them. If one cannot go on, all
    raise the same error.
    """

    folder: Path
    keep: int
    """How many checkpoints stay."""
    ranks: Ranks = SOLE

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for p in self.folder.iterdir() if (found := _NAME.fullmatch(p.name)))

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint, from which a run resumes; None if there is none."""
        return max(self.steps(), default=None)

    # --- write ---

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint. Then delete the oldest ones beyond `keep`, and all of later steps.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk; existing checkpoints stay.
        """
        unfinished = self.begin(snapshot)
        unfinished.write()
        return self.finish(unfinished)

    def begin(self, snapshot: Snapshot) -> Unfinished:
        """Make the temporary folder of a checkpoint, and decide what each rank writes.

        Raises:
            CheckpointError: as of `save`.
        """
        step, ranks = snapshot.step, self.ranks
        partial = temporary(self.path(step))
        with self._agreed(ranks, step, self._unwritten):
            if ranks.first:
                make_folder(self.folder)
                self.clean()
                partial.mkdir()
        files = {
            file_name(group, ranks.rank, ranks.world): boxes_to_write(snapshot.tensors[group], ranks)
            for group in GROUPS
        }
        state = {"format": FORMAT, "step": step, "ranks": ranks.world, **snapshot.state}
        return Unfinished(step, state, partial, files)

    def finish(self, unfinished: Unfinished) -> Path:
        """Give a checkpoint that every rank has written its name, and delete what it replaces.

        Raises:
            CheckpointError: as of `save`.
        """
        step, partial, ranks = unfinished.step, unfinished.folder, self.ranks
        try:
            with self._agreed(ranks, step, self._unwritten):
                if unfinished.problem is not None:
                    raise unfinished.problem
            facts = {name: fact for own in ranks.gather(unfinished.facts) for name, fact in own.items()}
            with self._agreed(ranks, step, self._unwritten):
                if ranks.first:
                    text = json.dumps(unfinished.state, indent=1, allow_nan=False) + "\n"
                    (partial / STATE).write_text(text, encoding="utf-8")
                    write_manifest(partial, facts | {STATE: file_facts(partial / STATE)})
                    publish(partial, self.path(step))
                    self._replace_others(step)
        except CheckpointError:
            if ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.path(step)

    def _replace_others(self, newest: int) -> None:
        """Name the newest checkpoint, and delete the oldest ones beyond `keep` and all of later steps."""
        replace_text(self.folder / LATEST, f"{self.path(newest).name}\n")
        steps = self.steps()
        known = [step for step in steps if step <= newest]
        for step in [*known[: -self.keep], *steps[len(known) :]]:
            remove(self.path(step))

    def settle(self, step: int) -> None:
        """Finish what a killed process left undone for the newest checkpoint, that of `step`; of the first rank.

        Raises:
            CheckpointError: it is damaged and others would be deleted, or one of those cannot be deleted.
        """
        if len(self.steps()) > self.keep:
            self.verify(step)
        with self._agreed(SOLE, step, self._unwritten):
            self._replace_others(step)

    # --- read ---

    def load(
        self,
        step: int,
        groups: Sequence[str] = GROUPS,
        into: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> Snapshot:
        """Return a checkpoint after verifying every byte of it, or of the groups that are asked for.

        Args:
            step: its step.
            groups: those to read.
            into: tensors to fill, of any placement, by group and name; each rank fills its parts. A group that is empty
                in the checkpoint fills none, and one that is not given is made of whole tensors on the CPU. Without
                this argument ranks do not meet.

        Raises:
            CheckpointError: another version of mxref wrote it, a file is missing or damaged, or a tensor to fill has
                another name, shape or dtype; the message names the file and the previous checkpoint.
        """
        ranks, folder = (SOLE if into is None else self.ranks), self.path(step)
        with self._agreed(ranks, step, self._unreadable):
            state, facts = self._read(step)
            files = {
                g: [file_name(g, rank, state["ranks"]) for rank in range(state["ranks"])] for g in groups
            }
            # All ranks together read each byte once.
            for name in [name for names in files.values() for name in names][ranks.rank :: ranks.world]:
                _verify_file(folder / name, facts[name])
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        with self._agreed(ranks, step, self._unreadable):
            for group, names in files.items():
                with opened([folder / name for name in names]) as boxes:
                    wanted = (into or {}).get(group)
                    if wanted is None or not boxes.held:
                        tensors[group] = boxes.whole()
                    elif unlike := boxes.difference(wanted):
                        raise CheckpointError(
                            f"the checkpoint of step {step} does not fit the model: {unlike}"
                        )
                    else:
                        boxes.fill(wanted)
                        tensors[group] = dict(wanted)
        return Snapshot(step, tensors, state)

    def verify(self, step: int) -> None:
        """Raise CheckpointError, as `load` does, unless every byte of a checkpoint is as it was written."""
        with self._agreed(SOLE, step, self._unreadable):
            for name, wanted in self._read(step)[1].items():
                _verify_file(self.path(step) / name, wanted)

    def state(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds except tensors, verified as in `load`."""
        with self._agreed(SOLE, step, self._unreadable):
            return self._read(step)[0]

    def _read(self, step: int) -> tuple[dict[str, Any], Facts]:
        """Return the state with the facts of the manifest, which has the files of a checkpoint and no others."""
        path = self.path(step)
        try:
            table = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            facts = {name: {key: table[name][key] for key in ("bytes", "sha256")} for name in (STATE, *table)}
        except (ValueError, LookupError, TypeError) as err:
            raise ValueError(f"{MANIFEST} cannot be read ({err})") from err
        _verify_file(path / STATE, facts[STATE])
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} was written by another version of mxref: its format is {state['format']}, and "
                f"this version reads {FORMAT}; go on with that version, or begin with the weights that its "
                f"`mxref export` writes (run.init_from); else choose another --out, or {start_over(self.folder.parent)}"
            )
        if state["step"] != step:
            raise ValueError(f"{STATE} is not the state of step {step}")
        world = state["ranks"]
        if facts.keys() != {STATE, *(file_name(g, rank, world) for g in GROUPS for rank in range(world))}:
            raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")
        return state, facts

    # --- errors ---

    @contextmanager
    def _agreed(self, ranks: Ranks, step: int, said: Callable[[int, Exception], str]) -> Iterator[None]:
        """Raise CheckpointError on all ranks if the block fails on one of them; `said` tells what an error means."""
        problem: CheckpointError | None = None
        try:
            yield
        except CheckpointError as err:
            problem = err
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as err:
            problem = CheckpointError(said(step, err))
            problem.__cause__ = err
        for text in ranks.gather(problem and str(problem)):
            if text is not None:
                raise problem or CheckpointError(text)

    def _unwritten(self, step: int, err: Exception) -> str:
        reason, newest = getattr(err, "strerror", None) or str(err), self.latest()
        where = f" (rank {self.ranks.rank})" if self.ranks.several else ""
        good = (
            "there is no earlier one"
            if newest is None
            else f"the last good checkpoint is {self.path(newest)}"
        )
        way_out = remedy(err, "free some space or choose another --out")
        return f"cannot write the checkpoint {self.path(step)}: {reason}{where}; {way_out} ({good})"

    def _unreadable(self, step: int, err: Exception) -> str:
        path, earlier = self.path(step), [known for known in self.steps() if known < step]
        if isinstance(err, FileNotFoundError) and not path.exists() and self.steps():
            return f"{path} is gone; there is step-{self.latest()}"
        reason = f"{err.strerror}: {err.filename}" if isinstance(err, OSError) else str(err)
        way_out = f"there is no earlier one: restore it, or {start_over(self.folder.parent)}"
        if earlier:
            way_out = f"to go on from step-{earlier[-1]} delete {path}"
        return f"the checkpoint {path} is damaged: {reason}; {way_out}"

    # --- names ---

    def lost(self) -> str:
        """Return a note if `latest` names a checkpoint that is not there; else nothing. A run takes the newest one."""
        path, newest = self.folder / LATEST, self.latest()
        if newest is None or not path.is_file():
            return ""
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if (self.folder / name / MANIFEST).is_file():
            return ""
        return f"{path} names {name!r}, which is not there: the newest is step-{newest}"

    def clean(self) -> None:
        """Remove the unfinished checkpoint of a killed process."""
        clean(self.folder, "step-*")
        clean(self.folder, LATEST)

    def drop(self) -> None:
        """Delete all checkpoints, and keep the folder."""
        remove(self.folder / LATEST)
        for step in self.steps():
            remove(self.path(step))

    def clear(self) -> None:
        """Delete all checkpoints. A folder that is a link stays, and so do files that mxref did not write."""
        self.clean()
        self.drop()
        if self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir()):
            self.folder.rmdir()


class Saver:
    """Saves checkpoints at once, or in the background. Its methods are called on every rank.

    In the background the state is copied into the host's memory, and a thread writes the copy. Ranks meet in the main
    thread only: after each step they see whether all have written, and the first one then names the checkpoint. Until
    then the one before it is the newest.
    As a context manager it completes the last checkpoint at the end of the block.
    """

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self._store, self._background = store, background
        self._late: tuple[Unfinished, Thread] | None = None
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

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
        thread = Thread(target=unfinished.write, name="checkpoint", daemon=True)
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
