"""Checkpoints: their files, how they are written, verified and read, and which of them stay.

`checkpoints/step-N/` holds a safetensors file for each of `GROUPS` and each rank that wrote: `model.safetensors` of one
rank, `model-1-of-2.safetensors` of several. `state.json` has everything else, and `manifest.json` size and SHA-256 of
each file. The folder is written under a temporary name and renamed. Any number of ranks reads it. Nothing is pickled.
`run_state` says what a run puts in, and `shards` how ranks share the tensors.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import (
    clean,
    explained,
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
from mxref_training.parallel import LAYOUT
from mxref_training.shards import Box, boxes_to_write, opened, write_boxes
from mxref_training.wording import counted

FORMAT = "mxref.checkpoint.4"
EARLIER = ("mxref.checkpoint.2", "mxref.checkpoint.3")
"""Formats that are read too. The first is of one process: its state does not say `ranks`."""
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
    tensors: Mapping[str, dict[str, Tensor]]
    """Named tensors of each of `GROUPS`; no two may share memory. A DTensor is this rank's part."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""

    def resharded(self, ranks: Ranks, identity: Mapping[str, Any]) -> str:
        """Return a note if ranks in another number or layout resume this than wrote it; else nothing.

        Args:
            ranks: of the run that resumes it.
            identity: of that run; its `LAYOUT` is how the ranks share the work.
        """
        wrote = int(self.state.get("ranks", 1))
        layout, own = (held.get(LAYOUT) for held in (self.state["identity"], identity))
        if wrote != ranks.world:
            said = f"resumes on {counted(ranks.world, 'rank')} what {counted(wrote, 'rank')} wrote"
        elif layout != own:
            said = f"resumes on ranks in the layout {own} what the layout {layout} wrote"
        else:
            return ""
        return f"{said}: losses may differ in the last bits, because sums have another order"


def file_name(group: str, rank: int = 0, world: int = 1) -> str:
    """Return the name of the file that holds a rank's part of a group."""
    return f"{group}.safetensors" if world == 1 else f"{group}-{rank + 1}-of-{world}.safetensors"


def group_files(group: str, world: int) -> list[str]:
    """Return the names of all files of a group."""
    return [file_name(group, rank, world) for rank in range(world)]


def file_facts(path: Path) -> dict[str, Any]:
    """Return the entry of a manifest for a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def write_manifest(folder: Path, facts: Facts) -> None:
    """Write the manifest of a checkpoint."""
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _read_manifest(folder: Path) -> Facts:
    """Return the entries of the manifest; ValueError if it cannot be read."""
    try:
        facts: Facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if any(set(facts[name]) != {"bytes", "sha256"} for name in (STATE, *facts)):
            raise ValueError("an entry is not that of a file")
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{MANIFEST} cannot be read ({err})") from err
    return facts


def _verify_file(path: Path, facts: Facts) -> None:
    """Raise ValueError, which names the file, unless the file matches the manifest."""
    wanted, size = facts[path.name], path.stat().st_size
    if size != wanted["bytes"]:
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
            if not self.folder.is_dir():
                raise OSError(errno.ENOENT, "the folder that rank 0 made is not there: --out must be shared")
            for name, boxes in self.files.items():
                write_boxes(self.folder / name, boxes)
                self.facts[name] = file_facts(self.folder / name)
            for name in self.files:
                sync(self.folder / name)
        except Exception as err:
            self.problem = err


@contextmanager
def _agreed(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks the CheckpointError that the block raises on one of them."""
    problem = None
    try:
        yield
    except CheckpointError as err:
        problem = err
    texts = ranks.gather(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for text in texts:
        if text is not None:
            raise CheckpointError(text)


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
        step, ranks, final = snapshot.step, self.ranks, self.path(snapshot.step)
        partial = temporary(final)
        with _agreed(ranks):
            if ranks.first:
                if final.exists() or final.is_symlink():
                    raise CheckpointError(
                        f"{final} exists already, and this run did not resume from it: delete this folder"
                    )
                with self._writing(step):
                    make_folder(self.folder)
                    self.clean()
                    partial.mkdir()
        named = {f"{group}/{name}": t for group in GROUPS for name, t in snapshot.tensors[group].items()}
        files: dict[str, dict[str, Box]] = {file_name(group, ranks.rank, ranks.world): {} for group in GROUPS}
        for name, box in boxes_to_write(named, ranks).items():
            group, _, own = name.partition("/")
            files[file_name(group, ranks.rank, ranks.world)][own] = box
        state = {"format": FORMAT, "step": step, "ranks": ranks.world, **snapshot.state}
        return Unfinished(step, state, partial, files)

    def finish(self, unfinished: Unfinished) -> Path:
        """Give a checkpoint that every rank has written its name, and delete what it replaces.

        Raises:
            CheckpointError: as of `save`.
        """
        step, partial, ranks = unfinished.step, unfinished.folder, self.ranks
        try:
            with _agreed(ranks), self._writing(step):
                if unfinished.problem is not None:
                    raise unfinished.problem
            facts = {name: fact for own in ranks.gather(unfinished.facts) for name, fact in own.items()}
            with _agreed(ranks), self._writing(step):
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
        if self._named() != (name := self.path(newest).name):
            path = self.folder / LATEST
            way_out = f"{self.path(newest)} is complete; free some space"
            with explained(CheckpointError, f"write {path}", way_out):
                replace_text(path, f"{name}\n")
        steps = self.steps()
        known = [step for step in steps if step <= newest]
        for step in [*known[: -self.keep], *steps[len(known) :]]:
            what = f"delete {self.path(step)}, which {self.path(newest)} replaces"
            with explained(CheckpointError, what, "delete this folder"):
                remove(self.path(step))

    def settle(self, step: int) -> None:
        """Finish what a killed process left undone for the newest checkpoint, that of `step`.

        Raises:
            CheckpointError: it is damaged and others would be deleted, or one of those cannot be deleted.
        """
        if self.ranks.first:
            if len(self.steps()) > self.keep:
                self.verify(step)
            self._replace_others(step)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Turn an error that prevents the block from writing a checkpoint into CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, SafetensorError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            where = f" (rank {self.ranks.rank})" if self.ranks.several else ""
            left = [known for known in self.steps() if known < step]
            good = f"the last good checkpoint is {self.path(left[-1])}" if left else "there is no earlier one"
            raise CheckpointError(
                f"cannot write the checkpoint {self.path(step)}: {reason}{where}; "
                f"{remedy(err, 'free some space or choose another --out')} ({good})"
            ) from err

    # --- read ---

    def load(
        self,
        step: int,
        groups: Sequence[str] = GROUPS,
        into: Mapping[str, Mapping[str, Tensor]] | None = None,
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
        ranks = SOLE if into is None else self.ranks
        with _agreed(ranks):
            state, facts = self._state(step)
        files = {group: group_files(group, int(state.get("ranks", 1))) for group in groups}
        with _agreed(ranks), self._reading(step):
            # All ranks together read each byte once.
            for name in [name for names in files.values() for name in names][ranks.rank :: ranks.world]:
                _verify_file(self.path(step) / name, facts)
        tensors: dict[str, dict[str, Tensor]] = {}
        with _agreed(ranks), self._reading(step):
            for group, names in files.items():
                with opened([self.path(step) / name for name in names]) as boxes:
                    wanted = (into or {}).get(group)
                    if wanted is None or not boxes.held:
                        tensors[group] = boxes.whole()
                        continue
                    try:
                        boxes.fill(wanted)
                    except LookupError as err:
                        raise CheckpointError(
                            f"the checkpoint of step {step} does not fit the model: {err}"
                        ) from err
                    tensors[group] = dict(wanted)
        return Snapshot(step, tensors, state)

    def verify(self, step: int) -> None:
        """Raise CheckpointError, as `load` does, unless every byte of a checkpoint is as it was written."""
        _, facts = self._state(step)
        with self._reading(step):
            for name in facts:
                _verify_file(self.path(step) / name, facts)

    def state(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds except tensors, verified as in `load`."""
        return self._state(step)[0]

    def _state(self, step: int) -> tuple[dict[str, Any], Facts]:
        """Return the state with the facts of the manifest, which has the files of a checkpoint and no others."""
        path = self.path(step)
        with self._reading(step):
            facts = _read_manifest(path)
            _verify_file(path / STATE, facts)
            state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
            version = str(state["format"])
            if version in (FORMAT, *EARLIER):
                if state["step"] != step:
                    raise ValueError(f"{STATE} is not the state of step {step}")
                world = int(state.get("ranks", 1))
                if set(facts) != {STATE, *(name for group in GROUPS for name in group_files(group, world))}:
                    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")
                return state, facts
        raise CheckpointError(
            f"the checkpoint {path} was written by another version of mxref: its format is {version}, and this "
            f"version reads {', '.join((*EARLIER, FORMAT))}; go on with that version, choose another --out, or "
            f"{start_over(self.folder.parent)}"
        )

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turn an error that prevents the block from reading a checkpoint into CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as err:
            if isinstance(err, FileNotFoundError) and not self.path(step).exists() and self.steps():
                raise CheckpointError(f"{self.path(step)} is gone; there is step-{self.latest()}") from err
            reason = f"{err.strerror}: {err.filename}" if isinstance(err, OSError) else str(err)
            earlier = [s for s in self.steps() if s < step]
            way_out = (
                f"to go on from {self.path(earlier[-1]).name} delete {self.path(step)}"
                if earlier
                else f"there is no earlier one: restore it, or {start_over(self.folder.parent)}"
            )
            raise CheckpointError(
                f"the checkpoint {self.path(step)} is damaged: {reason}; {way_out}"
            ) from err

    # --- the names ---

    def _named(self) -> str | None:
        """Return which checkpoint `LATEST` names; None if there is no such file."""
        try:
            return (self.folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def lost(self) -> str:
        """Return a note if `latest` names a checkpoint that is not there; else nothing. A run takes the newest one."""
        name, newest = self._named(), self.latest()
        if name is None or newest is None or (self.folder / name / MANIFEST).is_file():
            return ""
        return f"{self.folder / LATEST} names {name!r}, which is not there: the newest is step-{newest}"

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
