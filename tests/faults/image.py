"""What a disk may hold after a power cut, computed from a record of file operations.

The model is that of ALICE (Pillai et al., OSDI 2014) for a file system that promises little: bytes are safe once their
file was synced, and a name once its folder was. Until then each change of a folder may or may not have arrived, in any
order; a rename arrives whole. A file that was not synced may be empty, complete, cut in half, or full of zeros.

A rename by a raw system call escapes the shim. It is inferred from the inode, which next appears under another name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from faults.shim import Kind, Operation


class Content(StrEnum):
    """What is there of bytes that were written and not synced."""

    LOST = "lost"
    ZEROS = "zeros"
    HALF = "half"
    WHOLE = "whole"


@dataclass(frozen=True, eq=False)
class Held:
    """The bytes of a file."""

    data: bytes

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of the bytes."""
        return hashlib.sha256(self.data).digest()


Tree = dict[str, Held | None]
"""What is below a folder, by path: the bytes of a file, None for a folder."""

Key = frozenset[tuple[str, bytes]]


@dataclass(eq=False)
class Node:
    """A file or a folder: what the disk surely holds, and what the processes see."""

    is_folder: bool
    disk: bytes = b""
    now: bytes = b""
    disk_names: dict[str, Node] = field(default_factory=dict)
    names: dict[str, Node] = field(default_factory=dict)
    held: dict[Content, Held] = field(default_factory=dict)

    def put(self, now: bytes) -> None:
        """Change what the processes see."""
        self.now, self.held = now, {}

    def sync(self) -> None:
        """Have the disk hold what the processes see."""
        self.disk, self.held = self.now, {}

    def after_a_cut(self, content: Content) -> Held:
        """Return what a file holds after the cut."""
        if self.disk == self.now:
            content = Content.LOST
        if content not in self.held:
            self.held[content] = Held(self._bytes(content))
        return self.held[content]

    def _bytes(self, content: Content) -> bytes:
        match content:
            case Content.LOST:
                return self.disk
            case Content.ZEROS:
                return self.disk[: len(self.now)].ljust(len(self.now), b"\0")
            case Content.HALF:
                return self.now[: (len(self.disk) + len(self.now)) // 2]
            case Content.WHOLE:
                return self.now


@dataclass(frozen=True)
class Change:
    """One change of names, which arrives whole: what each folder then holds, None for nothing."""

    edits: tuple[tuple[Node, str, Node | None], ...]


class Disk:
    """A folder's tree while operations are applied to it."""

    def __init__(self, root: Path) -> None:
        """Take the tree as it is, all of it safe."""
        self.root, self.pending = root, list[Change]()
        self.by_inode: dict[int, Node] = {}
        self.top = self._read(root)

    def _read(self, path: Path) -> Node:
        node = Node(path.is_dir())
        if node.is_folder:
            node.names = {child.name: self._read(child) for child in path.iterdir()}
            node.disk_names = dict(node.names)
        else:
            node.disk = node.now = path.read_bytes()
        self.by_inode[path.lstat().st_ino] = node
        return node

    def _at(self, path: Path) -> Node:
        node = self.top
        for name in path.relative_to(self.root).parts:
            node = node.names[name]
        return node

    def _change(self, *edits: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in edits:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self.pending.append(Change(edits))

    def _found(self, op: Operation) -> Node:
        """Return the node of an operation on something that exists, once a rename that nobody saw is made up for."""
        node, folder = self.by_inode[op.inode], self.top if op.path == self.root else self._at(op.path.parent)
        if op.path != self.root and folder.names.get(op.path.name) is not node:
            old = next(name for name, child in folder.names.items() if child is node)
            self._change((folder, old, None), (folder, op.path.name, node))
        return node

    def apply(self, op: Operation) -> None:
        """Do one operation."""
        if not op.changed:
            return
        match op.kind:
            case Kind.CREATE | Kind.MKDIR:
                node = Node(op.kind is Kind.MKDIR)
                self.by_inode[op.inode] = node
                self._change((self._at(op.path.parent), op.path.name, node))
            case Kind.WRITE:
                node = self._found(op)
                start = node.now[: op.offset].ljust(op.offset, b"\0")
                node.put(start + op.data + node.now[op.offset + len(op.data) :])
            case Kind.TRUNCATE:
                node = self._found(op)
                node.put(node.now[: op.offset].ljust(op.offset, b"\0"))
            case Kind.SYNC:
                self._sync(self._found(op))
            case Kind.RENAME:
                node = self._found(op)
                old, new = self._at(op.path.parent), self._at(op.other.parent)
                self._change((old, op.path.name, None), (new, op.other.name, node))
            case Kind.UNLINK | Kind.RMDIR:
                self._found(op)
                self._change((self._at(op.path.parent), op.path.name, None))

    def _sync(self, node: Node) -> None:
        if not node.is_folder:
            node.sync()
            return
        arrived = [c for c in self.pending if any(folder is node for folder, _, _ in c.edits)]
        self.pending = [c for c in self.pending if c not in arrived]
        for change in arrived:
            for folder, name, child in change.edits:
                _edit(folder.disk_names, name, child)

    def after_a_cut(self) -> Iterator[Tree]:
        """Yield what the disk may hold if the power goes now."""
        for content in Content:
            yield self._tree((), content)
            yield self._tree(self.pending, content)
        for change in self.pending:
            yield self._tree([change], Content.LOST)
            yield self._tree([c for c in self.pending if c is not change], Content.LOST)

    def seen(self) -> Tree:
        """Return what the processes see."""
        return self._tree(self.pending, Content.WHOLE)

    def _tree(self, arrived: Iterable[Change], content: Content) -> Tree:
        names: dict[Node, dict[str, Node]] = {}
        for change in arrived:
            for folder, name, child in change.edits:
                _edit(names.setdefault(folder, dict(folder.disk_names)), name, child)
        found: Tree = {}

        def walk(folder: Node, prefix: str) -> None:
            for name, node in sorted(names.get(folder, folder.disk_names).items()):
                found[prefix + name] = None if node.is_folder else node.after_a_cut(content)
                if node.is_folder:
                    walk(node, f"{prefix}{name}/")

        walk(self.top, "")
        return found


def _edit(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def key(tree: Tree) -> Key:
    """Return what tells a tree from every other."""
    return frozenset((name, held.digest if held else b"") for name, held in tree.items())


def write(tree: Tree, root: Path) -> None:
    """Make the files of a tree in an empty folder."""
    for name, held in tree.items():
        if held is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(held.data)
