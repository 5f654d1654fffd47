"""What every disk after a power cut must hold, whether or not the command is given again.

The same command, given again, repeats lost work, and ends with the same bytes even if a finished checkpoint was lost.
These promises state that nothing disappears that was finished once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

from faults.image import Disk, Held, Key, Tree, key
from faults.shim import Kind, Operation

_STEP = re.compile(r"(.*)/checkpoints/step-(\d+)")
_FREE = re.compile(r"/(metrics|timing)\.jsonl$|\.lock$|/\.[^/]+(/|$)")
"""Logs, locks, and what bears a temporary name: these may be there in part."""

Runs = dict[tuple[str, bytes], int]
"""The newest checkpoint of each run, by its folder and the digest of its run.json."""


@dataclass
class Survey:
    """All disks that a power cut during a command may leave."""

    cuts: list[tuple[int, Tree]]
    """Each distinct one, with the number of the operation after which it came first."""
    last: list[Tree]
    """Those after the last operation."""
    broken: list[str]
    """Promises that one of them breaks."""


def survey(disk: Disk, operations: Sequence[Operation]) -> Survey:
    """Apply operations to a disk, and look at what a power cut after each would leave."""
    promises, found = _Promises(disk.seen()), Survey([], [], [])
    looked: dict[Key, Runs] = {}
    for number, op in enumerate(operations, 1):
        found.broken += (f"at operation {number}: {said}" for said in promises.learn(op, disk))
        disk.apply(op)
        reached: Runs = {}
        found.last = list(disk.after_a_cut())
        for tree in found.last:
            if (which := key(tree)) not in looked:
                looked[which] = _reached(tree)
                found.cuts.append((number, tree))
                found.broken += (
                    f"after operation {number}: {said}" for said in promises.broken(tree, looked[which])
                )
            for run, step in looked[which].items():
                reached[run] = min(step, reached.get(run, step))
        found.broken += (f"after operation {number}: {said}" for said in promises.lost(reached))
    return found


class _Promises:
    """What the disk may hold under each name, and how far each run has surely come."""

    def __init__(self, start: Tree) -> None:
        self._versions: dict[str, set[Key]] = {}
        self._sure: Runs = {}
        self._renamed: dict[PurePath, PurePath] = {}
        for name, held in start.items():
            if held or _STEP.fullmatch(name):
                self._allow(name, _version(start, name))

    def _allow(self, name: str, version: Key) -> None:
        if not _FREE.search(f"/{name}"):
            self._versions.setdefault(name, set()).add(version)

    def learn(self, op: Operation, disk: Disk) -> Iterator[str]:
        """Take note of what an operation is about to give its name to; yield names that it should have waited for."""
        if op.kind is Kind.SYNC:
            self._renamed.pop(op.path, None)
        elif self._renamed:
            yield f"{op.kind.name} {op.path} comes before {list(self._renamed.values())} had reached the disk"
            self._renamed.clear()
        if op.kind is Kind.RENAME and op.changed:
            old, new = (str(path.relative_to(disk.root)) for path in (op.path, op.other))
            self._renamed |= {op.path.parent: op.other, op.other.parent: op.other}
            seen = disk.seen()
            for name in seen:
                if name == old or name.startswith(f"{old}/"):
                    self._allow(new + name.removeprefix(old), _version(seen, name))

    def lost(self, reached: Runs) -> Iterator[str]:
        """Take how far the runs have come on the worst disk; yield those that are further back than they were."""
        for run, step in reached.items():
            if step < self._sure.get(run, 0):
                yield f"{run[0]} is back at step {step}, though step {self._sure[run]} was safe"
            self._sure[run] = max(step, self._sure.get(run, 0))

    def broken(self, tree: Tree, reached: Runs) -> Iterator[str]:
        """Yield what is wrong with a disk, on which the runs have come so far."""
        for name, held in tree.items():
            whole = (held or name in self._versions) and not _FREE.search(f"/{name}")
            if whole and _version(tree, name) not in self._versions.get(name, ()):
                yield f"{name} is there in part"
        for (run, _), step in reached.items():
            yield from _log_too_short(run, step, tree)


def _reached(tree: Tree) -> Runs:
    found: Runs = {}
    for name, held in tree.items():
        if held and f"/{name}".endswith("/run.json"):
            run = str(PurePosixPath(name).parent)
            found[run, held.digest] = _newest(run, tree)
    return found


def _version(tree: Tree, name: str) -> Key:
    """Return what a file holds, or a folder and all below it."""
    held = tree[name]
    if held:
        return frozenset({("", held.digest)})
    prefix = f"{name}/"
    return frozenset(
        (path.removeprefix(prefix), inner.digest if inner else b"")
        for path, inner in tree.items()
        if path.startswith(prefix)
    )


def _newest(run: str, tree: Tree) -> int:
    steps = (found for name in tree if (found := _STEP.fullmatch(name)) and found[1] == run)
    return max((int(found[2]) for found in steps), default=0)


def _lines(data: bytes) -> bool:
    """Return whether data are whole lines of JSON."""
    try:
        return [json.loads(line) for line in data.splitlines()] != [] and data.endswith(b"\n")
    except ValueError:
        return False


def _log_too_short(run: str, step: int, tree: Tree) -> Iterator[str]:
    state = tree.get(f"{run}/checkpoints/step-{step}/state.json")
    try:
        logs = json.loads(state.data)["logs"] if state else {}
    except ValueError:
        return  # said above
    for name, length in logs.items():
        log = tree.get(f"{run}/{name}.jsonl") or Held(b"")
        if len(log.data) < length or not _lines(log.data[:length]):
            yield f"{run}/{name}.jsonl does not hold what the checkpoint of step {step} relies on"
