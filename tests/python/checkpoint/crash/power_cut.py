"""What a disk may hold after a power cut, from the operations that a RecordingEnv wrote down.

The model is weaker than any file system in use. Data of a file is durable once the file was synced;
before, each write may be there, or not, or in part, whatever became of the others. A name in a
directory is durable once that directory was synced; before, each may be there or not, whatever
became of the others. A rename within a directory is atomic; one between directories is not: the
file may be in both, or in neither. After a sync that failed, nothing of what it was for is sure.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

Tree = dict[str, bytes | None]  # path under the root: a file's content, or None for a directory
TORN_BYTES = (512, 4096)
_PATTERN_FILL = 2  # of interleaved sectors: every other one arrived


@dataclass(eq=False)
class Change:
    """One step of a file or directory. `is_durable`: surely there after a power cut."""

    is_durable: bool = field(default=False, init=False)
    is_doubtful: bool = field(default=False, init=False)  # a sync of it failed


@dataclass(eq=False)
class Write(Change):
    offset: int
    data: bytes

    def apply(self, content: bytearray, cut: int | None) -> None:
        """`cut`: how much of it arrived; negative: every other sector of that size; None: all."""
        if cut is None or cut >= 0:
            _overwrite(content, self.offset, self.data[:cut])
            return
        for start in range(0, len(self.data), -cut * _PATTERN_FILL):
            _overwrite(content, self.offset + start, self.data[start : start - cut])


@dataclass(eq=False)
class Resize(Change):
    size: int
    only_grows: bool

    def apply(self, content: bytearray, cut: int | None) -> None:
        del content[max(self.size, len(content)) if self.only_grows else self.size :]
        content.extend(bytes(max(0, self.size - len(content))))


@dataclass(eq=False)
class Entry(Change):
    """Names that change together: atomic."""

    removed: str | None
    added: tuple[str, Node] | None


@dataclass(eq=False)
class Node:
    """A file: changes of its bytes. A directory: changes of its names."""

    is_directory: bool
    changes: list[Any] = field(default_factory=list)
    names: dict[str, Node] = field(default_factory=dict)  # now, in the page cache

    def sync(self, has_failed: bool) -> None:
        for change in self.changes:
            if has_failed:
                change.is_doubtful = not change.is_durable
            elif not change.is_doubtful:
                change.is_durable = True


@dataclass(frozen=True)
class Cut:
    """Which unsynced changes reached the disk; `torn`: in part, as Write.apply says."""

    kept: frozenset[Change]
    torn: Mapping[Change, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What is on the disk, and which paths are one file: to write into one changes the other."""

    tree: Tree
    shared: list[list[str]]


class Disk:
    """The directory `root` after the first operations of a record."""

    def __init__(self, root: str) -> None:
        self._root = PurePosixPath(root)
        self._top = Node(is_directory=True)
        self._nodes: list[Node] = [self._top]
        self._files: dict[int, Node] = {}

    def apply(self, operation: Mapping[str, Any]) -> None:
        """Take in one operation of the record. Those outside of the root change nothing here."""
        path = PurePosixPath(operation["path"])
        if not path.is_relative_to(self._root):
            return
        kind, has_failed = operation["kind"], operation["error"] != 0
        if kind in ("sync", "sync_directory"):
            node = self._top if path == self._root else self._node(operation, path)
            if node is not None:
                node.sync(has_failed)
        elif kind == "write":
            if operation["data"]:
                self._file(operation).changes.append(Write(operation["offset"], operation["data"]))
        elif not has_failed:
            self._apply_done(kind, operation, path)

    def _apply_done(self, kind: str, operation: Mapping[str, Any], path: PurePosixPath) -> None:
        if kind in ("create", "make_directory"):
            self._add(path, self._new(operation["file"], kind == "make_directory"))
        elif kind == "truncate":
            self._file(operation).changes.append(Resize(operation["offset"], only_grows=False))
        elif kind == "allocate":
            size = operation["offset"] + operation["size_bytes"]
            self._file(operation).changes.append(Resize(size, only_grows=True))
        elif kind in ("remove", "remove_directory"):
            self._remove(path)
        elif kind == "rename":
            self._rename(path, PurePosixPath(operation["to"]))
        else:
            assert kind in ("open", "lock"), kind

    def pending_entries(self) -> list[Entry]:
        """Unsynced changes of names, in order of directories."""
        return [c for node in self._nodes if node.is_directory for c in _pending(node)]

    def pending_data(self) -> list[list[Write | Resize]]:
        """Unsynced changes of bytes, file by file."""
        files = (_pending(node) for node in self._nodes if not node.is_directory)
        return [changes for changes in files if changes]

    def after(self, cut: Cut) -> Found:
        """What is found when the power is back."""
        tree: Tree = {}
        paths: dict[Node, list[str]] = {}
        self._collect(self._top, "", cut, tree, paths)
        return Found(tree, [each for each in paths.values() if len(each) > 1])

    def _collect(
        self, directory: Node, prefix: str, cut: Cut, tree: Tree, paths: dict[Node, list[str]]
    ) -> None:
        names: dict[str, Node] = {}
        for change in directory.changes:
            if change.is_durable or change in cut.kept:
                if change.removed is not None:
                    names.pop(change.removed, None)
                if change.added is not None:
                    names[change.added[0]] = change.added[1]
        for name, node in names.items():
            if node.is_directory:
                tree[prefix + name] = None
                self._collect(node, f"{prefix}{name}/", cut, tree, paths)
            else:
                paths.setdefault(node, []).append(prefix + name)
                tree[prefix + name] = _content(node, cut)

    # --- the page cache -------------------------------------------------------------------------

    def _directory(self, path: PurePosixPath) -> Node:
        node = self._top
        for part in path.relative_to(self._root).parts:
            node = node.names[part]
        return node

    def _node(self, operation: Mapping[str, Any], path: PurePosixPath) -> Node | None:
        if operation["kind"] == "sync":
            return self._file(operation)
        try:
            return self._directory(path)
        except KeyError:
            return None

    def _new(self, identity: int, is_directory: bool) -> Node:
        node = Node(is_directory)
        self._nodes.append(node)
        if not is_directory:
            self._files[identity] = node
        return node

    def _file(self, operation: Mapping[str, Any]) -> Node:
        return self._files[operation["file"]]

    def _add(self, path: PurePosixPath, node: Node) -> None:
        directory = self._directory(path.parent)
        directory.names[path.name] = node
        directory.changes.append(Entry(None, (path.name, node)))

    def _remove(self, path: PurePosixPath) -> None:
        directory = self._directory(path.parent)
        del directory.names[path.name]
        directory.changes.append(Entry(path.name, None))

    def _rename(self, old: PurePosixPath, new: PurePosixPath) -> None:
        source, target = self._directory(old.parent), self._directory(new.parent)
        node = source.names.pop(old.name)
        target.names[new.name] = node
        if source is target:
            source.changes.append(Entry(old.name, (new.name, node)))
        else:
            target.changes.append(Entry(None, (new.name, node)))
            source.changes.append(Entry(old.name, None))


def cuts(disk: Disk, seed: int, exhaustive: bool) -> Iterator[Cut]:
    """Ways in which the power may fail now: for the names all, none, each alone, all but each,
    and each run from the first; for the bytes the same, and every write torn. Chosen combinations
    of both, all of them (of a bounded number) when `exhaustive`."""
    entries = disk.pending_entries()
    files = disk.pending_data()
    writes = [change for changes in files for change in changes]
    names = _subsets(entries)
    data = [
        Cut(kept) for kept in {*_subsets(writes), *_subsets([frozenset(each) for each in files])}
    ]
    data += list(_torn(writes))
    if exhaustive:
        pairs = [(a, b) for a in names for b in data]
        generator = random.Random(seed)
        generator.shuffle(pairs)
        pairs = pairs[:4096]
    else:
        everything, nothing = frozenset(entries), frozenset[Change]()
        extremes = [Cut(frozenset(writes)), Cut(frozenset())]
        pairs = [(a, b) for a in names for b in extremes]
        pairs += [(a, b) for a in (everything, nothing) for b in data]
    seen: set[tuple[frozenset[Change], frozenset[tuple[Change, int]]]] = set()
    for kept, of_data in pairs:
        cut = Cut(kept | of_data.kept, of_data.torn)
        key = (cut.kept, frozenset(cut.torn.items()))
        if key not in seen:
            seen.add(key)
            yield cut


def _subsets(items: list[Any]) -> list[frozenset[Change]]:
    """All, none, each alone, all but each, each run from the first; items may be sets."""

    def union(chosen: Collection[Any]) -> frozenset[Change]:
        sets = (each if isinstance(each, frozenset) else frozenset([each]) for each in chosen)
        return frozenset().union(*sets)

    found = [union(items), union([])]
    for position, item in enumerate(items):
        found.append(union([item]))
        found.append(union(items[:position] + items[position + 1 :]))
        found.append(union(items[:position]))
    return list(dict.fromkeys(found))


def _torn(writes: list[Any]) -> Iterator[Cut]:
    everything = frozenset(writes)
    for change in writes:
        if not isinstance(change, Write):
            continue
        for size in TORN_BYTES:
            if len(change.data) > size:
                for cut in (size, len(change.data) // size * size, -size):
                    yield Cut(everything, {change: cut})
                    yield Cut(frozenset([change]), {change: cut})
        yield Cut(everything, {change: len(change.data) // 2})


def _pending(node: Node) -> list[Any]:
    return [change for change in node.changes if not change.is_durable]


def _content(node: Node, cut: Cut) -> bytes:
    content = bytearray()
    for change in node.changes:
        if change.is_durable or change in cut.kept:
            change.apply(content, None if change.is_durable else cut.torn.get(change))
    return bytes(content)


def _overwrite(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def lay_out(tree: Tree, root: Path) -> None:
    """Make `root`, which is not there yet, what `tree` says."""
    root.mkdir()
    for path, content in tree.items():
        if content is None:
            os.mkdir(root / path)
        else:
            (root / path).write_bytes(content)
