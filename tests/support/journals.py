"""A journal on its own, without a store around it: its drivers, what a kill would leave of it, and disks that fail.

1. `left` is what the next run would find if the process were killed now: a copy of the directory, after replay.
2. A `Watch` sees what the journal asks of the system for its segments, in order, in whichever thread it does so.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.storage import journal as journal_module
from perdure.storage.directory import DataDirectory
from perdure.storage.filing import Filing
from perdure.storage.journal import Journal, remove_segments
from perdure.storage.journal_replay import replay_journal
from perdure.storage.naming import file_name
from perdure.storage.sqlite import CommitIn
from perdure.storage.sqlite_image import sync_content
from perdure.storage.stored_driver import StoredDriver
from perdure.storage.young_driver import YoungDriver

__all__ = ["Desk", "Watch", "contents", "desk", "shrink"]

Contents = dict[str, dict[bytes, bytes]]


class Desk:
    """A journal in use.

    Attributes:
        directory: Where.
        journal: The journal.
        drivers: Those that were made, by the names of their files.
    """

    def __init__(self, path: Path, commit_in: CommitIn, *, is_full: bool) -> None:
        self.directory = DataDirectory(path)
        path.mkdir(exist_ok=True)
        self.directory.prepare()
        limiter = trio.CapacityLimiter(16)
        filing = Filing(str(self.directory.workflows), limiter, is_inline=commit_in == "inline")
        self.journal = Journal(self.directory, filing, limiter, is_full=is_full, commit_in=commit_in)
        self.drivers: dict[str, YoungDriver] = {}
        self._open = partial(
            StoredDriver.open, commit_in=commit_in, durability="full" if is_full else "normal", limiter=limiter
        )
        self._copies = 0

    def name(self, workflow_id: str) -> str:
        """What the file of a workflow is called."""
        return file_name(workflow_id, session=1, count=0)

    def born(self, workflow_id: str, **options: Any) -> YoungDriver:
        """The driver of a new workflow."""
        name = self.name(workflow_id)
        self.drivers[name] = YoungDriver(self.journal.bear(name), self.journal, self._open_file, **options)
        return self.drivers[name]

    def again(self, workflow_id: str) -> YoungDriver:
        """Another driver of one that is still young."""
        young = self.journal.find(name := self.name(workflow_id))
        assert young is not None
        assert not young.is_filed
        self.drivers[name] = YoungDriver(young, self.journal, self._open_file)
        return self.drivers[name]

    async def open(self, workflow_id: str) -> StoredDriver:
        """The driver of one that has its file."""
        young = self.journal.find(self.name(workflow_id))
        if young is not None:
            await self.journal.settle(young)
        return await self._open_file(self.path(workflow_id))

    async def _open_file(self, path: str | Path) -> StoredDriver:
        driver = await self._open(path)
        assert isinstance(driver, StoredDriver)
        return driver

    def path(self, workflow_id: str) -> Path:
        """Where a workflow's file is, or will be."""
        return self.directory.workflows / self.name(workflow_id)

    def segments(self) -> list[str]:
        """The names of the segments, in order."""
        return sorted(path.name for path in self.directory.journal.iterdir())

    def left(self) -> Contents:
        """What the next run would find in each workflow if the process were killed now, by the names of their files."""
        self._copies += 1
        copy = DataDirectory(shutil.copytree(self.directory.path, f"{self.directory.path}-left-{self._copies}"))
        replay_journal(copy)
        assert not list(copy.journal.iterdir())
        return contents(copy.workflows)


@asynccontextmanager
async def desk(path: Path, commit_in: CommitIn = "inline", *, is_full: bool = True) -> AsyncGenerator[Desk]:
    """A new journal, and its drivers closed at the end."""
    made = Desk(path, commit_in, is_full=is_full)
    try:
        yield made
    finally:
        for driver in made.drivers.values():
            await driver.aclose()
        await made.journal.aclose()


def contents(directory: Path) -> Contents:
    """What the files of a directory hold, by their names."""
    found: Contents = {}
    for path in sorted(directory.glob("*.sqlite")):
        with closing(sqlite3.connect(path)) as connection:
            found[path.name] = dict(connection.execute("SELECT key, value FROM kv"))
    return found


def shrink(monkeypatch: pytest.MonkeyPatch, segment_bytes: int) -> None:
    """Make segments small, so that a few batches fill one."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", segment_bytes)


class Watch:
    """What is asked of the system for segments, each as what was done and the segment's name.

    Attributes:
        done: All that was done, in order.
        fail: Raises what an operation is to fail with, if anything; called before it is done.
        gate: While it is set to an event, syncs wait in their threads for that.
        waiting: Released for each that waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], None] | None = None
        self.gate: threading.Event | None = None
        self.waiting = threading.Semaphore(0)
        self._names: dict[int, str] = {}
        pwrite, make = os.pwrite, journal_module._make_segment

        def watched_sync(descriptor: int) -> None:
            if (gate := self.gate) is not None:
                self.waiting.release()
                assert gate.wait(10)
            self._note("sync", self._names[descriptor])
            sync_content(descriptor)

        def watched_write(descriptor: int, data: bytes, at: int) -> int:
            if (name := self._names.get(descriptor)) is not None:
                self._note("write", name)
            return pwrite(descriptor, data, at)

        def watched_make(path: Path, *arguments: Any) -> Any:
            self._note("make", path.name)
            segment = make(path, *arguments)
            self._names[segment.descriptor] = path.name
            return segment

        def watched_remove(paths: Any) -> None:
            for path in paths:
                self._note("remove", path.name)
                remove_segments([path])

        monkeypatch.setattr(journal_module, "sync_content", watched_sync)
        monkeypatch.setattr(journal_module, "_make_segment", watched_make)
        monkeypatch.setattr(journal_module, "remove_segments", watched_remove)
        monkeypatch.setattr(os, "pwrite", watched_write)

    def count(self, what: str) -> int:
        """How often something was done."""
        return sum(each == what for each, _ in self.done)

    def names(self, what: str) -> list[str]:
        """To which segments something was done, in order."""
        return [name for each, name in self.done if each == what]

    async def until_waiting(self) -> None:
        """Wait until a sync waits at the gate."""
        assert await trio.to_thread.run_sync(self.waiting.acquire, True, 10)

    def let_go(self) -> None:
        """Let the syncs go on, and those that come after them."""
        gate, self.gate = self.gate, None
        assert gate is not None
        gate.set()

    def _note(self, what: str, name: str) -> None:
        if self.fail is not None:
            self.fail(what, name)
        self.done.append((what, name))
