"""Checkpoints of safetensors and JSON files, written atomically and verified when they are read.

`checkpoints/step-N/` holds `model.safetensors`, `optimizer.safetensors`, `rng.safetensors`, `state.json` and
`manifest.json` with the size and SHA-256 of each. Each of several ranks writes its own files, as in
`model-1-of-2.safetensors`. The folder is written under a temporary name and renamed. A run resumes from its newest
checkpoint, on any number of ranks. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.durable import make_folder, publish, remedy, temporary
from mxref_training.errors import CheckpointError, start_over
from mxref_training.run.checkpoint_files import (
    FORMAT,
    GROUPS,
    MANIFEST,
    SHARDED,
    STATE,
    Facts,
    Part,
    Unfinished,
    file_facts,
    file_name,
    group_files,
    named,
    read_manifest,
    verify_file,
    write_manifest,
)
from mxref_training.run.checkpoint_folder import CheckpointFolder
from mxref_training.run.snapshot import Snapshot

if TYPE_CHECKING:
    from mxref_training.run.shards import SavePlans

Targets = Callable[[str, frozenset[str]], Mapping[str, Tensor] | None]
"""Takes a group and its names, and returns the tensors to fill; None asks for whole tensors."""


@dataclass(frozen=True)
class CheckpointStore(CheckpointFolder):
    """Writes and reads the checkpoints of one run.

    On several ranks `save`, `begin`, `finish`, and `load` with `targets` are collective: every rank calls them. If one
    cannot go on, all raise the same error.
    """

    ranks: Ranks = SOLE

    def save(self, snapshot: Snapshot, plans: SavePlans | None = None) -> Path:
        """Write a checkpoint. Then delete the oldest ones beyond `keep`, and all of later steps.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk; existing checkpoints stay.
        """
        unfinished = self.begin(snapshot, plans)
        unfinished.write(synced=self.ranks.several)
        return self.finish(unfinished)

    def begin(self, snapshot: Snapshot, plans: SavePlans | None = None) -> Unfinished:
        """Make the temporary folder of a checkpoint, and decide what each rank writes.

        Args:
            snapshot: the checkpoint.
            plans: has the plan of the save before.

        Raises:
            CheckpointError: as of `save`.
        """
        step, final = snapshot.step, self.path(snapshot.step)
        partial, ranks = temporary(final), self.ranks
        with self._agreed():
            if ranks.first and (final.exists() or final.is_symlink()):
                raise CheckpointError(
                    f"{final} exists already, and this run did not resume from it: delete this folder"
                )
            if ranks.first:
                with self._writing(step):
                    make_folder(self.folder)
                    self.clean()
                    partial.mkdir()
        state = {"format": FORMAT, "step": step, **snapshot.state}
        if ranks.several:
            from mxref_training.run.shards import SavePlans

            state |= {"format": SHARDED, "ranks": ranks.world}
            parts = (plans or SavePlans()).parts(snapshot.tensors, ranks)
        else:
            parts = {
                group: {name: Part(t, (0,) * t.ndim, tuple(t.shape)) for name, t in named.items()}
                for group, named in snapshot.tensors.items()
            }
        files = {file_name(group, ranks.rank, ranks.world): parts[group] for group in GROUPS}
        return Unfinished(step, state, partial, files)

    def finish(self, unfinished: Unfinished) -> Path:
        """Give a checkpoint that every rank has written its name, and delete what it replaces.

        Raises:
            CheckpointError: as of `save`.
        """
        step, partial = unfinished.step, unfinished.folder
        final = self.path(step)
        try:
            with self._agreed(), self._writing(step):
                if unfinished.problem is not None:
                    raise unfinished.problem
            facts = {name: fact for own in self.ranks.gather(unfinished.facts) for name, fact in own.items()}
            with self._agreed(), self._writing(step):
                if self.ranks.first:
                    text = json.dumps(unfinished.state, indent=1, allow_nan=False) + "\n"
                    (partial / STATE).write_text(text, encoding="utf-8")
                    write_manifest(partial, facts | file_facts([partial / STATE]))
                    publish(partial, final)
        except CheckpointError:
            if self.ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with self._agreed():
            if self.ranks.first:
                self.name_newest(step)
                self.thin_out(step)
        return final

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

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Raise on all ranks the CheckpointError that the block raises on one of them."""
        problem = None
        try:
            yield
        except CheckpointError as err:
            problem = err
        texts = self.ranks.gather(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for text in texts:
            if text is not None:
                raise CheckpointError(text)

    def settle(self, step: int) -> None:
        """Finish what a killed process left undone for the newest checkpoint, that of `step`.

        It is verified. Then the oldest ones beyond `keep` are deleted, and `latest` names it.

        Raises:
            CheckpointError: the checkpoint is damaged, or an old one cannot be deleted.
        """
        if not self.ranks.first:
            return
        if len(self.steps()) > self.keep:
            replace(self, ranks=SOLE).verify(step)
            self.thin_out(step)
        if named(self.folder) != self.path(step).name:
            self.name_newest(step)

    def load(self, step: int, groups: Sequence[str] = GROUPS, targets: Targets | None = None) -> Snapshot:
        """Return a checkpoint after verifying every byte of it, or of the groups that are asked for.

        Args:
            step: its step.
            groups: those to read.
            targets: gives the tensors to fill, of any placement; each rank fills its parts. Without it, whole tensors
                are made on the CPU.

        Raises:
            CheckpointError: another version of mxref wrote it, a file is missing or damaged, or a tensor to fill has
                another name, shape or dtype; the message names the file and the previous checkpoint.
        """
        own = self if targets is not None else replace(self, ranks=SOLE)
        with own._agreed():
            state, facts = own._state(step)
        world = int(state.get("ranks", 1))
        with own._agreed(), own._reading(step):
            names = [name for group in groups for name in group_files(group, world)]
            for name in names[own.ranks.rank :: own.ranks.world]:  # all ranks together read each byte once
                verify_file(self.path(step), name, facts)
        with own._agreed(), own._reading(step):
            tensors = {group: self._read(step, group, world, targets) for group in groups}
        return Snapshot(step, tensors, state)

    def _read(self, step: int, group: str, world: int, targets: Targets | None) -> dict[str, Tensor]:
        files = [self.path(step) / name for name in group_files(group, world)]
        if targets is None and world == 1:
            return load_file(files[0])
        from mxref_training.run.shards import Parts

        with Parts(files) as parts:
            try:
                wanted = None if targets is None else targets(group, parts.names)
                if wanted is None:
                    return parts.whole()
                parts.fill(wanted)
            except LookupError as err:
                raise CheckpointError(f"the checkpoint of step {step} does not fit the model: {err}") from err
            return dict(wanted)

    def verify(self, step: int) -> None:
        """Raise CheckpointError, as `load` does, unless every byte of a checkpoint is as it was written."""
        state, facts = self._state(step)
        with self._reading(step):
            for group in GROUPS:
                for name in group_files(group, int(state.get("ranks", 1))):
                    verify_file(self.path(step), name, facts)

    def state(self, step: int) -> dict[str, Any]:
        """Return everything that a checkpoint holds except tensors, verified as in `load`."""
        return self._state(step)[0]

    def _state(self, step: int) -> tuple[dict[str, Any], Facts]:
        """Return the state with the facts of the manifest."""
        path = self.path(step)
        with self._reading(step):
            facts = read_manifest(path)
            verify_file(path, STATE, facts)
            state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
            version = str(state["format"])
            if version in (FORMAT, SHARDED):
                if state["step"] != step:
                    raise ValueError(f"{STATE} is not the state of step {step}")
                world = int(state["ranks"]) if version == SHARDED else 1
                if set(facts) != {STATE, *(name for group in GROUPS for name in group_files(group, world))}:
                    raise ValueError(f"{MANIFEST} does not list the files of a checkpoint")
                return state, facts
        raise CheckpointError(
            f"the checkpoint {path} was written by another version of mxref: its format is {version}, and this "
            f"version reads {FORMAT} and {SHARDED}; go on with that version, choose another --out, or "
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
