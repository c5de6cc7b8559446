"""What a disk that fails does to young workflows, in that process and if it is killed then.

1. A call of the system fails once, a few times, or from some moment on; then the disk is well again.
2. A program that goes on all the while (`support/young_lives.py`) reads what was acknowledged and nothing else, and so does
   whoever opens what it leaves, killed after any of its operations, or closed in order.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from errno import EIO, EMFILE, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from file_stores import opened, row
from young_lives import IDS, Lineage, Lives, Mark, allowed, batch_of, found, small_journal

from perdure.storage import filing, journal
from perdure.storage.errors import StorageError
from perdure.storage.file_store import FileStore
from perdure.storage.sqlite import CommitIn

CALLS = [
    ("fdatasync", EIO),
    ("pwrite", EIO),
    ("pwrite", ENOSPC),
    ("fsync", EIO),
    ("write", ENOSPC),
    ("open", EMFILE),
    ("rename", EIO),
    ("unlink", EIO),
    ("statvfs", EIO),
]


class Faults:
    """Lets calls of one function fail.

    Args:
        error: With what.
        first: The first that fails, counted from 0.
        many: How many in a row do.

    Attributes:
        failed: How many have failed.
    """

    def __init__(self, error: Exception, first: int, many: int) -> None:
        self._error = error
        self._left = first
        self._many = many
        self.failed = 0

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if -self._many <= self._left < 0:
                self.failed += 1
                raise self._error
            return call(*arguments, **options)

        return fail


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_journal(monkeypatch)


async def survive(
    directory: Path,
    seed: int,
    owner: Any,
    name: str,
    faults: Faults,
    *,
    commit_in: CommitIn,
    errors: tuple[type[Exception], ...],
) -> Lives:
    """Let a program live through faults, look at what it would leave after each operation, and at what it leaves."""
    marks: list[Mark] = []
    lives = Lives(seed, marks.append)
    data, copy = directory / "data", directory / "copy"

    async def look() -> None:
        """Kill it here."""
        with pytest.MonkeyPatch.context() as well:
            well.setattr(owner, name, call)
            if faults.failed:
                await copy_now(store, data, copy)
                await check(copy, marks)
                shutil.rmtree(copy)

    call = getattr(owner, name)
    store = FileStore(data, commit_in=commit_in)
    await store.acquire()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, faults.over(call))
        await lives.live(store, 30, errors=errors, after=look)
        if faults.failed % 2:
            with suppress(*errors):
                await lives.close()
    try:
        await store.aclose()
    except StorageError:
        assert faults.failed
    await check(data, marks)
    async with opened(data, commit_in="inline") as store:
        lives.check({workflow_id: await found(store, workflow_id) for workflow_id in IDS})
        await lives.live(store, 10)
    await check(data, marks)
    return lives


async def copy_now(store: FileStore, data: Path, copy: Path) -> None:
    """Copy what a process would leave that is killed now; nothing is made or removed beside that."""
    assert store._journal is not None
    while store._journal._chores_over is not None:
        await store._journal._chores_over.wait()
    shutil.copytree(data, copy)


async def check(data: Path, marks: list[Mark]) -> None:
    """Each workflow is as it may be."""
    async with opened(data, commit_in="inline") as store:
        for workflow_id in IDS:
            may_be = allowed(marks, workflow_id, "full", is_power_lost=False)
            assert await found(store, workflow_id) in may_be, (workflow_id, marks)
    assert not list((data / "journal").iterdir())


@pytest.mark.parametrize(("name", "number"), CALLS)
async def test_a_disk_that_fails_takes_nothing_that_was_acknowledged(tmp_path: Path, name: str, number: int) -> None:
    """S41: each acknowledged batch is there, none by half, and none that was refused after the next that was not.

    The process goes on once the disk is well, and what is killed or closed meanwhile is opened again.
    """
    failed = 0
    for seed, (first, many) in enumerate([(0, 1), (1, 1), (2, 3), (5, 2), (9, 8), (14, 1), (20, 30)]):
        faults = Faults(OSError(number, os.strerror(number)), first, many)
        await survive(tmp_path / str(seed), seed, os, name, faults, commit_in="inline", errors=(StorageError,))
        failed += faults.failed
    assert failed


async def test_no_thread_to_be_had_takes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """S41: the same when the system gives no threads, for a while or for longer."""
    failed = 0
    for seed, (first, many) in enumerate([(0, 1), (1, 2), (3, 5), (6, 1), (8, 20), (10, 100)]):
        faults = Faults(RuntimeError("can't start new thread"), first, many)
        await survive(
            tmp_path / str(seed),
            seed,
            trio.lowlevel,
            "start_thread_soon",
            faults,
            commit_in="thread",
            errors=(StorageError, RuntimeError),
        )
        failed += faults.failed
    assert failed


class Gate:
    """Holds a thread where it first calls a function, until it is opened; that call may then fail."""

    def __init__(self, call: Callable[..., Any], *, fails: bool) -> None:
        self._call = call
        self._fails = fails
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_by(self, *arguments: Any) -> Any:
        self.reached.set()
        self.opened.wait()
        if self._fails:
            self._fails = False
            raise OSError(EIO, os.strerror(EIO))
        return self._call(*arguments)


@pytest.mark.parametrize("fault", [None, "sync", "write", "both"])
@pytest.mark.parametrize("held", ["do", "sync_content"])
async def test_what_is_written_beside_a_sync_is_there_if_it_was_acknowledged(
    tmp_path: Path, held: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S39, S41: others are born and write while a sync is under way, into later segments too; the process dies at any of it.

    The sync is held before it writes, or once it has; it fails, or what is written beside it, or both.
    """
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 500)
    monkeypatch.setattr(journal, "RECORD_BYTES_MAX", 400)
    owner: Any = journal._Sync if held == "do" else journal
    call, pwrite = getattr(owner, held), os.pwrite
    gate = Gate(call, fails=fault in ("sync", "both"))
    marks: list[Mark] = []
    lives = Lives(1, marks.append)
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def die() -> None:
        with pytest.MonkeyPatch.context() as well:
            well.setattr(owner, held, call)
            well.setattr(os, "pwrite", pwrite)
            await copy_now(store, data, copy)
            told = list(marks)  # others go on while it is looked at
            await check(copy, told)
            shutil.rmtree(copy)

    store = FileStore(data, commit_in="thread")
    await store.acquire()
    try:
        for workflow_id in "ab":
            await lives.make(store, workflow_id)
            await lives.change(store, workflow_id)
        with monkeypatch.context() as patched:
            # A plain function, as only that becomes a method.
            patched.setattr(owner, held, lambda *arguments: gate.pass_by(*arguments))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lives.change, store, "a")
                await trio.to_thread.run_sync(gate.reached.wait)
                try:
                    await die()
                    nursery.start_soon(lives.change, store, "b")
                    if fault in ("write", "both"):
                        patched.setattr(os, "pwrite", Faults(OSError(EIO, os.strerror(EIO)), 0, 1).over(pwrite))
                    for workflow_id in "cd":
                        await lives.make(store, workflow_id)
                        await die()
                        nursery.start_soon(lives.change, store, workflow_id)
                        await trio.testing.wait_all_tasks_blocked()
                        await die()
                finally:
                    gate.opened.set()
        for workflow_id in IDS:
            await die()
            await lives.change(store, workflow_id)
    finally:
        await store.aclose()
    async with opened(data, commit_in="inline") as store:
        lives.check({workflow_id: await found(store, workflow_id) for workflow_id in IDS})


async def make_without_file(store: FileStore, lineage: Lineage) -> None:
    """Make a workflow whose file could not be written as it was closed."""
    driver, _ = await store.create_driver(row("a"))
    await driver.batch(batch_of("a", lineage))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(filing, "write_whole", failing(ENOSPC))
        with pytest.raises(StorageError, match="No space left"):
            await driver.aclose()


async def test_a_deletion_that_may_be_durable_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S41, S52: nobody writes to a workflow that the next process may delete; deleted again, it is gone."""
    async with opened(tmp_path / "data", commit_in="inline") as store:
        await make_without_file(store, (1, 2))
        with monkeypatch.context() as patched:
            patched.setattr(journal, "sync_content", failing(EIO))
            with pytest.raises(StorageError):
                await store.delete("a")
        with pytest.raises(StorageError, match="delete it again"):
            await store.open_driver("a")
        shutil.copytree(tmp_path / "data", tmp_path / "killed")
        await store.delete("a")
        assert await found(store, "a") is None
        driver, _ = await store.create_driver(row("a"))
        await driver.batch(batch_of("a", (3, 4)))
        await driver.aclose()
    async with opened(tmp_path / "data", commit_in="inline") as store:
        assert await found(store, "a") == (3, 4)
    async with opened(tmp_path / "killed", commit_in="inline") as store:
        assert await found(store, "a") is None


async def test_a_file_that_is_just_being_written_goes_with_its_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S52: a workflow is deleted while the journal is relieved of it; its file does not come to be after that."""
    gate = Gate(filing.write_whole, fails=False)
    async with opened(tmp_path / "data", commit_in="thread") as store:
        await make_without_file(store, (1, 2))
        monkeypatch.setattr(filing, "write_whole", gate.pass_by)
        monkeypatch.setattr(journal, "_SEGMENTS_MAX", 0)
        relieved = store._journal
        assert relieved is not None
        (young,) = relieved._by_file.values()
        is_deleted = False

        async def delete() -> None:
            nonlocal is_deleted
            await store.delete("a")
            is_deleted = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(relieved.relieve)
            await trio.to_thread.run_sync(gate.reached.wait)
            nursery.start_soon(delete)
            while not is_deleted and not young.turn.statistics().tasks_waiting:
                await trio.lowlevel.checkpoint()
            gate.opened.set()
        assert not list((tmp_path / "data" / "workflows").iterdir())
        assert await found(store, "a") is None


def failing(number: int) -> Any:
    """What fails with an error of the system."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail
