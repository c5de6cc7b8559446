"""A disk that loses power: what was done to a directory, in order, and every state in which a power cut could leave it.

1. While a `Recording` is on, whatever is done to files below its directory is done, and noted: SQLite's part by a VFS of ours
   over its own, the rest by the functions of `os`. `Recording.check` proves that nothing was missed: what was noted, with
   nothing lost, is what lies in the directory, byte for byte.
2. A file's content is safe once the file is synced, a change of a directory's entries once the directory is. Syncing a file
   saves none of its names. What is not safe is lost or kept sector by sector and entry by entry, in any combination: a
   sector may also be cut in two, or hold garbage where it was being written. Bytes beside a write are never touched, as
   SQLite may assume ("powersafe overwrite"), and a renaming is done or not done.
3. Nothing between two syncs needs a cut of its own: what is there in between is there just before the second, with the rest
   lost.
4. A recording begins with a directory that is safe, so one can be made of what a cut left, and be cut again.

SQLite syncs the directory itself when it first syncs a journal that it opened to create, or deletes a file and is asked to;
that happens within its own VFS, so that much of it is known here (`_Vfs`).

Rejected: keeping the files in memory behind the VFS. The driver also looks at its files through the operating system, and
what a cut leaves is to be opened by the SQLite that is shipped.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from unittest import mock

import figures
from power_sqlite import ApswConnection, Vfs

__all__ = ["PLANS", "Cut", "Plan", "Recording"]

SECTOR_BYTES = 512

Plan = Literal["kept", "lost", "prefix", "scattered", "torn", "logs kept", "logs lost", "some files"]
"""Which of what is not safe survives: all, nothing, what came before some moment, any of it, any of it in pieces, only what
was written to write-ahead logs, all but that, or all that was written to some of the files and nothing of the others."""
PLANS: tuple[Plan, ...] = get_args(Plan)


# What is on the disk.


@dataclass(slots=True)
class _Write:
    at: int
    offset: int
    data: bytes


@dataclass(slots=True)
class _Truncate:
    at: int
    size: int


@dataclass(eq=False, slots=True)
class _File:
    begin: bytes = b""
    safe: bytes = b""
    pending: list[_Write | _Truncate] = field(default_factory=list)

    def restart(self) -> None:
        self.safe = self.begin
        self.pending = []

    def sync(self) -> None:
        if self.pending:
            self.safe = _KEEP.content(self, "")
            self.pending = []


@dataclass(slots=True)
class _Entry:
    """A change of a directory: an entry appears, or goes (`node` is `None`), or takes another's place."""

    at: int
    name: str
    node: _Node | None
    source: str | None = None


@dataclass(eq=False, slots=True)
class _Directory:
    """`now` is what the program sees while it is recorded."""

    begin: dict[str, _Node] = field(default_factory=dict)
    safe: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Entry] = field(default_factory=list)
    now: dict[str, _Node] = field(default_factory=dict)

    def restart(self) -> None:
        self.safe = dict(self.begin)
        self.pending = []

    def sync(self) -> None:
        self.safe = _KEEP.entries(self)
        self.pending = []


_Node: TypeAlias = "_File | _Directory"
_NodeT = TypeVar("_NodeT", "_File", "_Directory")
_Change: TypeAlias = "_Write | _Truncate | _Entry"


class _Draw:
    """What a power cut makes of each thing that was not safe."""

    def __init__(self, plan: Plan, seed: int, now: int, since: int) -> None:
        self._plan: Plan = plan
        self._random = random.Random(seed)
        self._share = self._random.choice((0.1, 0.5, 0.9))
        self._files: dict[str, bool] = {}
        self._until = self._random.randint(since, now) if plan == "prefix" else now

    def keeps(self, at: int, name: str = "") -> bool:
        match self._plan:
            case "kept":
                return True
            case "lost":
                return False
            case "prefix":
                return at <= self._until
            case "logs kept" | "logs lost":
                # Entries of directories have no name here, and are kept.
                return not name or name.endswith("-wal") is (self._plan == "logs kept")
            case "some files":
                return not name or self._files.setdefault(name, self._random.random() < 0.5)
            case _:
                return self._random.random() < self._share

    def sectors(self, write: _Write, name: str) -> Iterator[tuple[int, bytes]]:
        """The pieces of a write that reach the disk."""
        if self._plan not in ("scattered", "torn"):
            if self.keeps(write.at, name):
                yield write.offset, write.data
            return
        start = 0
        while start < len(write.data):
            offset = write.offset + start
            end = min(len(write.data), start + SECTOR_BYTES - offset % SECTOR_BYTES)
            piece = write.data[start:end]
            if self.keeps(write.at):
                yield offset, piece
            elif self._plan == "torn":
                fate = self._random.randrange(3)
                if fate == 0:
                    yield offset, piece[: self._random.randrange(len(piece))]
                elif fate == 1:
                    yield offset, self._random.randbytes(len(piece))
            start = end

    def content(self, file: _File, name: str) -> bytes:
        if not file.pending:
            return file.safe
        data = bytearray(file.safe)
        for change in file.pending:
            if isinstance(change, _Truncate):
                if self.keeps(change.at, name):
                    del data[change.size :]
                    data.extend(bytes(change.size - len(data)))
            else:
                for offset, piece in self.sectors(change, name):
                    if offset > len(data):
                        data.extend(bytes(offset - len(data)))
                    data[offset : offset + len(piece)] = piece
        return bytes(data)

    def entries(self, directory: _Directory) -> dict[str, _Node]:
        entries = dict(directory.safe)
        for change in directory.pending:
            if self.keeps(change.at):
                _change(entries, change)
        return entries

    def tree(self, directory: _Directory, prefix: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Every path of the tree with its content, directories (which have none) before what is in them."""
        for name, node in sorted(self.entries(directory).items()):
            if isinstance(node, _Directory):
                yield prefix + name, None
                yield from self.tree(node, f"{prefix}{name}/")
            else:
                yield prefix + name, self.content(node, name)


def _change(entries: dict[str, _Node], change: _Entry) -> None:
    if change.source is not None and entries.get(change.source) is change.node:
        del entries[change.source]
    if change.node is None:
        entries.pop(change.name, None)
    else:
        entries[change.name] = change.node


_KEEP = _Draw("kept", 0, 0, 0)


# What was done to it.


@dataclass(frozen=True, slots=True)
class _Mark:
    what: Any


_Event: TypeAlias = "tuple[_File | _Directory, _Change | None] | _Mark"
"""What was done to a node (`None` is a sync), or what the program was told."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment at which the power may go.

    Attributes:
        number: How much had been done by then.
        marks: What the program had been told by then, in order.
    """

    number: int
    marks: Sequence[Any]
    _root: _Directory
    _since: int

    def leave(self, target: Path, plan: Plan, seed: int) -> tuple[tuple[str, bytes | None], ...]:
        """Make a directory of what the cut leaves; what is in it, so that equal ones can be told.

        Args:
            target: Where; it must not exist.
            plan: What is lost.
            seed: Draws what the plan leaves open.
        """
        tree = tuple(_Draw(plan, seed, self.number, self._since).tree(self._root))
        figures.count("power cuts")
        target.mkdir()
        for name, content in tree:
            if content is None:
                (target / name).mkdir()
            else:
                (target / name).write_bytes(content)
        return tree


class Recording:
    """All that is done to the files of a directory while `on`.

    Args:
        directory: It and all that it holds is safe at the beginning.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.realpath(directory))
        self._nodes: list[_File | _Directory] = []
        self._root = self._kept(_Directory())
        self._events: list[_Event] = []
        self._descriptors: dict[int, _File | _Directory] = {}
        self._vfs = Vfs(self)
        for path in sorted(self.directory.rglob("*")):
            found = self._find(path)
            assert found is not None
            parent, name = found
            if path.is_dir():
                node: _Node = self._kept(_Directory())
            else:
                node = self._kept(_File(path.read_bytes()))
            parent.now[name] = parent.begin[name] = node

    @contextmanager
    def on(self) -> Generator[None, None, None]:
        """Note what is done, from one thread. Workflows' files below the directory are to be opened with `connect`."""
        with ExitStack() as stack:
            for name, call in self._calls().items():
                stack.enter_context(mock.patch.object(os, name, call))
            stack.enter_context(mock.patch.object(sqlite3, "connect", self._connect_of_sqlite3()))
            yield

    def mark(self, what: object) -> None:
        """Note what the program has been told."""
        self._events.append(_Mark(what))

    def connect(self, path: str | Path) -> ApswConnection:
        """Open a SQLite file, which exists: the `ConnectionFactory` for drivers."""
        return ApswConnection(os.fspath(path), self._vfs)

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether what is done to a path is noted."""
        return self._find(path) is not None

    def check(self) -> None:
        """Make sure that nothing was done behind our back."""
        *_, last = self.cuts(syncs=False)
        noted = dict(_KEEP.tree(last._root))
        found = {
            str(path.relative_to(self.directory)): path.read_bytes() if path.is_file() else None
            for path in self.directory.rglob("*")
        }
        differ = [name for name in noted.keys() | found.keys() if noted.get(name, 0) != found.get(name, 0)]
        assert not differ, f"done and not noted: {sorted(differ)}"

    def cuts(self, *, syncs: bool = True) -> Iterator[Cut]:
        """Every moment that matters, in order. Each is valid until the next is asked for.

        Args:
            syncs: Whether the disk does what it is asked to, or only says so, and keeps nothing safe.
        """
        for node in self._nodes:
            node.restart()
        marks: list[Any] = []
        since = 0
        for number, event in enumerate(self._events):
            if isinstance(event, _Mark):
                yield Cut(number, tuple(marks), self._root, since)
                marks.append(event.what)
                continue
            node, change = event
            if change is None:
                yield Cut(number, tuple(marks), self._root, since)
                if syncs:
                    node.sync()
                    since = number
            elif isinstance(node, _Directory):
                assert isinstance(change, _Entry)
                yield Cut(number, tuple(marks), self._root, since)
                node.pending.append(change)
            else:
                assert not isinstance(change, _Entry)
                node.pending.append(change)
        yield Cut(len(self._events), tuple(marks), self._root, since)

    # What SQLite does; see `power_sqlite.py`.

    def file(self, path: str | os.PathLike[str], *, create: bool = False) -> _File | None:
        """The file at a path, noted as made if it was not there; `None` if the path is none of ours."""
        found = self._find(path)
        if found is None:
            return None
        parent, name = found
        node = parent.now.get(name)
        if node is None and create:
            node = self._kept(_File())
            self._note_entry(parent, name, node)
        assert isinstance(node, _File), f"{path} is not noted"
        return node

    def wrote(self, file: _File, offset: int, data: bytes) -> None:
        """Bytes were written."""
        self._events.append((file, _Write(len(self._events), offset, data)))

    def truncated(self, file: _File, size: int) -> None:
        """A file was cut, or made longer."""
        self._events.append((file, _Truncate(len(self._events), size)))

    def synced(self, node: _File | _Directory) -> None:
        """A file or a directory was synced."""
        self._events.append((node, None))

    def synced_directory_of(self, path: str | os.PathLike[str]) -> None:
        """The directory that holds a path was synced."""
        found = self._find(path)
        assert found is not None
        self.synced(found[0])

    def unlinked(self, path: str | os.PathLike[str]) -> None:
        """A file was removed."""
        if (found := self._find(path)) is not None:
            self._note_entry(*found, None)

    # What everybody else does.

    def _calls(self) -> dict[str, Callable[..., Any]]:
        """The functions of `os` that change files, with what they do noted."""
        os_open, os_write, os_pwrite, os_close = os.open, os.write, os.pwrite, os.close
        os_ftruncate, os_unlink, os_mkdir = os.ftruncate, os.unlink, os.mkdir
        os_link, os_rename, os_replace = os.link, os.rename, os.replace

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            descriptor = os_open(path, flags, mode, dir_fd=dir_fd)
            if isinstance(path, str | os.PathLike) and dir_fd is None and (node := self._node(path, flags)) is not None:
                self._descriptors[descriptor] = node
                if flags & os.O_TRUNC:
                    assert isinstance(node, _File)
                    self.truncated(node, 0)
            return descriptor

        def write(descriptor: int, data: Any) -> int:
            file = self._descriptors.get(descriptor)
            if file is None:
                return os_write(descriptor, data)
            assert isinstance(file, _File)
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            written = os_write(descriptor, data)
            self.wrote(file, offset, bytes(data[:written]))
            return written

        def pwrite(descriptor: int, data: bytes, offset: int) -> int:
            written = os_pwrite(descriptor, data, offset)
            if (file := self._descriptors.get(descriptor)) is not None:
                assert isinstance(file, _File)
                self.wrote(file, offset, bytes(data[:written]))
            return written

        def ftruncate(descriptor: int, size: int) -> None:
            os_ftruncate(descriptor, size)
            if (file := self._descriptors.get(descriptor)) is not None:
                assert isinstance(file, _File)
                self.truncated(file, size)

        def syncing(call: Callable[[int], None]) -> Callable[[int], None]:
            def sync(descriptor: int) -> None:
                call(descriptor)
                if (node := self._descriptors.get(descriptor)) is not None:
                    self.synced(node)

            return sync

        def close(descriptor: int) -> None:
            self._descriptors.pop(descriptor, None)
            os_close(descriptor)

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            os_unlink(path, dir_fd=dir_fd)
            self.unlinked(path)

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            os_mkdir(path, mode, dir_fd=dir_fd)
            if (found := self._find(path)) is not None:
                self._note_entry(*found, self._kept(_Directory()))

        def link(source: Any, target: Any) -> None:
            os_link(source, target)
            if (found := self._find(target)) is not None:
                self._note_entry(*found, self._entry(source))

        def renaming(call: Callable[..., None]) -> Callable[..., None]:
            def rename(source: Any, target: Any) -> None:
                call(source, target)
                if (found := self._find(target)) is not None:
                    parent, name = found
                    source_found = self._find(source)
                    assert source_found is not None
                    assert source_found[0] is parent, "nothing is moved to another directory"
                    self._note_entry(parent, name, self._entry(source), source_found[1])

            return rename

        syncs = {name: syncing(getattr(os, name)) for name in ("fsync", "fdatasync") if hasattr(os, name)}
        return {
            **syncs,
            "open": open_,
            "write": write,
            "pwrite": pwrite,
            "ftruncate": ftruncate,
            "close": close,
            "unlink": unlink,
            "mkdir": mkdir,
            "link": link,
            "rename": renaming(os_rename),
            "replace": renaming(os_replace),
        }

    def _connect_of_sqlite3(self) -> Callable[..., Any]:
        """What opens a catalog, of which nobody asks with what."""
        connect = sqlite3.connect

        def connect_noted(path: Any, **options: Any) -> Any:
            if options.get("uri") or not self.holds(path):
                return connect(path, **options)
            return ApswConnection(os.fspath(path), self._vfs, create=True, translates=True)

        return connect_noted

    def _node(self, path: str | os.PathLike[str], flags: int) -> _File | _Directory | None:
        if os.path.realpath(path) == str(self.directory):
            return self._root
        if not self.holds(path):
            return None
        if os.path.isdir(path):
            node = self._entry(path)
            assert isinstance(node, _Directory)
            return node
        return self.file(path, create=bool(flags & os.O_CREAT))

    def _kept(self, node: _NodeT) -> _NodeT:
        self._nodes.append(node)
        return node

    def _find(self, path: str | os.PathLike[str]) -> tuple[_Directory, str] | None:
        """The directory that holds a path, and the name in it; `None` if the path is not below ours."""
        head, name = os.path.split(os.path.abspath(path))
        try:
            parts = Path(os.path.realpath(head)).relative_to(self.directory).parts
        except ValueError:
            return None
        parent = self._root
        for part in parts:
            node = parent.now[part]
            assert isinstance(node, _Directory)
            parent = node
        return parent, name

    def _entry(self, path: str | os.PathLike[str]) -> _File | _Directory:
        found = self._find(path)
        assert found is not None, f"{path} comes from elsewhere"
        return found[0].now[found[1]]

    def _note_entry(self, parent: _Directory, name: str, node: _Node | None, source: str | None = None) -> None:
        change = _Entry(len(self._events), name, node, source)
        _change(parent.now, change)
        self._events.append((parent, change))
