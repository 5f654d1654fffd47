"""Checkpoints: their files, how they are written, verified and read, and which of them stay.

`checkpoints/step-N/` holds a safetensors file for each of `GROUPS` and each rank that wrote: `model.safetensors` of one
rank, `model-1-of-2.safetensors` of several. `state.json` has everything else, and `manifest.json` size and SHA-256 of
each file. The folder is written under a temporary name and renamed. Any number of ranks reads it. Nothing is pickled.
`run_state` says what a run puts in, and `shards` how ranks share the tensors.

A rank that cannot go on raises its error and ends. The others wait for it in the next collective, and stop there
(`distributed.failing`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import (
    clean,
    explained,
    file_sha256,
    make_folder,
    publish,
    remove,
    replace_text,
    sync,
    temporary,
)
from mxref_training.errors import CheckpointError, start_over
from mxref_training.shards import Box, boxes_to_write, fill, opened, whole, write_boxes

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


def _verify(folder: Path, names: Iterable[str], facts: Facts) -> None:
    """Raise ValueError, which names the file, unless files are those of a manifest."""
    for name in names:
        if facts.get(name) != file_facts(folder / name):
            raise ValueError(f"{name} does not have the size and SHA-256 that {MANIFEST} records")


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint under its temporary name."""

    step: int
    state: Mapping[str, Any]
    folder: Path
    files: dict[str, dict[str, Box]]
    """The boxes that this rank writes, by file."""

    def write(self) -> Facts:
        """Write this rank's files, which no other host can sync, and return their entries of the manifest."""
        for name, boxes in self.files.items():
            write_boxes(self.folder / name, boxes)
            sync(self.folder / name)
        return {name: file_facts(self.folder / name) for name in self.files}


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    `save`, `begin`, `finish`, and `load` with `into` are collective: every rank calls them.
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
        return self.finish(unfinished, unfinished.write)

    def begin(self, snapshot: Snapshot) -> Unfinished:
        """Make the temporary folder of a checkpoint, and decide what each rank writes.

        Raises:
            CheckpointError: as of `save`.
        """
        step, ranks = snapshot.step, self.ranks
        partial = temporary(self.path(step))
        with self._writing(step):
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

    def finish(self, unfinished: Unfinished, write: Callable[[], Facts]) -> Path:
        """Give a checkpoint its name when every rank has written its part, and delete what it replaces.

        Args:
            unfinished: the checkpoint.
            write: returns this rank's entries of the manifest once its files are on the disk.

        Raises:
            CheckpointError: as of `save`.
        """
        step, partial, ranks = unfinished.step, unfinished.folder, self.ranks
        try:
            with self._writing(step):
                try:
                    own = write()
                finally:
                    ranks.gather(None)  # all have ended, so the first one can remove what they wrote
                facts = {name: fact for other in ranks.gather(own) for name, fact in other.items()}
                if ranks.first:
                    text = json.dumps(unfinished.state, indent=1, allow_nan=False) + "\n"
                    (partial / STATE).write_text(text, encoding="utf-8")
                    write_manifest(partial, facts | {STATE: file_facts(partial / STATE)})
                    publish(partial, self.path(step))
                    self._replace_others(step)
            ranks.gather(None)
        except Exception:
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
            CheckpointError: as of `save`; or it is damaged, and older ones would be deleted.
        """
        if len(self.steps()) > self.keep:
            with self._reading(step):
                _, facts = self._read(step)
                _verify(self.path(step), facts, facts)
        with self._writing(step):
            self._replace_others(step)

    def clean(self) -> None:
        """Remove the unfinished checkpoint of a killed process."""
        clean(self.folder, "step-*")
        clean(self.folder, LATEST)

    def drop(self) -> None:
        """Delete all checkpoints, and keep the folder, which may be a link."""
        self.clean()
        remove(self.folder / LATEST)
        for step in self.steps():
            remove(self.path(step))

    def _writing(self, step: int) -> AbstractContextManager[None]:
        newest = self.latest()
        good = (
            "there is no earlier one"
            if newest is None
            else f"the last good checkpoint is {self.path(newest)}"
        )
        way_out = f"free some space or choose another --out ({good})"
        return explained(CheckpointError, f"write the checkpoint {self.path(step)}", way_out)

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
            CheckpointError: another version of mxref wrote it, or a file is missing or damaged; the message names the
                file and the previous checkpoint.
        """
        ranks, folder = (SOLE if into is None else self.ranks), self.path(step)
        with self._reading(step):
            state, facts = self._read(step)
            world = state["ranks"]
            files = {group: [file_name(group, rank, world) for rank in range(world)] for group in groups}
            # All ranks together read each byte once.
            every = [name for names in files.values() for name in names]
            _verify(folder, every[ranks.rank :: ranks.world], facts)
        ranks.gather(None)  # nothing is used before all of it is verified
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for group, names in files.items():
            wanted = (into or {}).get(group)
            with opened([folder / name for name in names]) as held:
                if wanted is None or not held:
                    tensors[group] = {name: whole(boxes) for name, boxes in sorted(held.items())}
                    continue
                for name, tensor in wanted.items():
                    fill(tensor, held[name])
                tensors[group] = dict(wanted)
        return Snapshot(step, tensors, state)

    def state(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds except tensors, verified as in `load`."""
        with self._reading(step):
            return self._read(step)[0]

    def _read(self, step: int) -> tuple[dict[str, Any], Facts]:
        """Return the state with the manifest, which lists the files of a checkpoint and no others."""
        path = self.path(step)
        try:
            facts = dict(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        except ValueError as err:
            raise ValueError(f"{MANIFEST} cannot be read ({err})") from err
        _verify(path, [STATE], facts)
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} was written by another version of mxref: its format is {state['format']}, and "
                f"this version reads {FORMAT}; go on with that version, or begin with the weights that its "
                f"`mxref export` writes (run.init_from); else choose another --out, or {start_over(self.folder.parent)}"
            )
        world = state["ranks"]
        if facts.keys() != {STATE, *(file_name(g, rank, world) for g in GROUPS for rank in range(world))}:
            raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")
        return state, facts

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, ValueError) as err:
            path, earlier = self.path(step), [known for known in self.steps() if known < step]
            reason = f"{err.strerror}: {err.filename}" if isinstance(err, OSError) else str(err)
            way_out = f"there is no earlier one: restore it, or {start_over(self.folder.parent)}"
            if earlier:
                way_out = f"to go on from step-{earlier[-1]} delete {path}"
            raise CheckpointError(f"the checkpoint {path} is damaged: {reason}; {way_out}") from err


class Saver:
    """Saves checkpoints at once, or in the background. Its methods are called on every rank.

    In the background the state is copied into the host's memory, and a thread writes the copy. Ranks meet in the main
    thread only: after each step they see whether all have written, and the first one then names the checkpoint. Until
    then the one before it is the newest.
    As a context manager it completes the last checkpoint at the end of the block.
    """

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self._store, self._background = store, background
        self._late: tuple[Unfinished, Future[Facts]] | None = None
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
        writer = ThreadPoolExecutor(1, "checkpoint")
        self._late = unfinished, writer.submit(unfinished.write)
        writer.shutdown(wait=False)  # its thread ends with the checkpoint

    def poll(self) -> None:
        """Complete the checkpoint in the background if all ranks have written it; called after each step.

        Raises:
            CheckpointError: this rank could not write it.
        """
        if self._late is not None and not self._store.ranks.any(not self._late[1].done()):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete, if there is one.

        Raises:
            CheckpointError: this rank could not write it.
        """
        if self._late is not None:
            (unfinished, written), self._late = self._late, None
            self._store.finish(unfinished, written.result)

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
        for file, boxes in unfinished.files.items():
            for name, box in boxes.items():
                source, key = box.tensor, (file, name)
                if key not in self._copies:
                    # Pages that are locked are copied several times as fast from a GPU.
                    self._copies[key] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
                boxes[name] = replace(box, tensor=self._copies[key].copy_(source, non_blocking=True))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
