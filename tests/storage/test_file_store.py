"""The file store: one file per workflow, errors that name it, and neighbours that do not notice."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from commits import does_commit
from file_stores import damage, opened, read, row, spawn

from perdure.storage.catalog import Catalog
from perdure.storage.directory import DataDirectory, Host
from perdure.storage.driver import Batch, Driver
from perdure.storage.errors import (
    CommitUnknownError,
    CorruptStoreError,
    FormatVersionError,
    NamespaceNotFoundError,
    StorageError,
    StoreBusyError,
    StoreLockedError,
    UnsupportedFileSystemError,
)
from perdure.storage.file_store import FileStore
from perdure.storage.naming import WorkflowIdError, parse_file_name
from perdure.storage.process_lock import ProcessLock
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import connect_file
from perdure.storage.sqlite_namespace import Namespace
from perdure.storage.store import CatalogRow, create_driver


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


# What the directory holds, and until when it is owned.


async def test_it_is_owned_until_everything_in_it_is_closed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S42: nobody else gets it while a file of it is still open, which closing would write to."""
    closed: list[str] = []

    def watch(owner: type[Any], close: Any) -> None:
        def closing(self: Any) -> None:
            with pytest.raises(StoreLockedError):
                ProcessLock.take(data / "lock")
            close(self)
            closed.append(owner.__name__)

        monkeypatch.setattr(owner, "close", closing)

    store = FileStore(data)
    await store.acquire()
    await store.open_driver("order-1", create=True)
    await store.open_own()
    watch(Namespace, Namespace.close)
    watch(Catalog, Catalog.close)
    await store.aclose()
    assert sorted(closed) == ["Catalog", "Namespace", "Namespace"]
    ProcessLock.take(data / "lock").release()


async def test_the_directory_is_laid_out_as_documented(data: Path) -> None:
    async with opened(data) as store:
        assert store.directory == str(data)
        await spawn(store, "order-1")
        driver = await store.open_driver("order-1")
        path = Path(store.path_of("order-1"))
        assert store.describe("order-1") == str(path)
        assert path.parent == data / "workflows"
        assert parse_file_name(path.name) is not None
        assert {name.name for name in data.iterdir()} >= {"format", "lock", "catalog.sqlite", "workflows", "journal"}
        await driver.aclose()
        with pytest.raises(NamespaceNotFoundError):
            store.path_of("order-2")
    assert sorted(name.name for name in data.iterdir()) == ["catalog.sqlite", "format", "journal", "lock", "workflows"]
    assert os.listdir(data / "journal") == [], "nobody is young any more"
    assert store.describe("order-1").endswith(".*.sqlite")
    with pytest.raises(StorageError, match="acquire"):
        store.path_of("order-1")


async def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore("data")
    monkeypatch.chdir("/")
    await store.acquire()
    await spawn(store, "order-1")
    await store.aclose()
    assert (tmp_path / "data" / "catalog.sqlite").exists()


@pytest.mark.parametrize(
    ("text", "error"), [('{"format": "perdure", "version": 3}', FormatVersionError), ("garbage", StorageError)]
)
async def test_another_format_is_refused_and_the_lock_is_free(data: Path, text: str, error: type[StorageError]) -> None:
    async with opened(data):
        pass
    (data / "format").write_text(text)
    with pytest.raises(error):
        await FileStore(data).acquire()
    (data / "format").write_text('{"format": "perdure", "version": 2}')
    async with opened(data):
        pass


async def test_a_directory_of_an_older_perdure_goes_on_and_is_newer_from_then_on(data: Path) -> None:
    """One of version 1 has no journal: its workflows are there, and the older Perdure, which would not look for it, refuses."""
    async with opened(data) as store:
        await spawn(store, "order-1")
    (data / "format").write_text('{"format": "perdure", "version": 1}')
    (data / "journal").rmdir()
    async with opened(data) as store:
        assert await read(store, "order-1") == b"order-1"
        await spawn(store, "order-2")
        assert await read(store, "order-2") == b"order-2"
    assert json.loads((data / "format").read_bytes()) == {"format": "perdure", "version": 2}


async def test_a_network_file_system_is_refused(data: Path) -> None:
    with pytest.raises(UnsupportedFileSystemError):
        await FileStore(data, host=Host(file_system=lambda path: "nfs4")).acquire()
    assert not data.exists()


async def test_a_path_that_cannot_be_a_directory_is_named(data: Path) -> None:
    """S41: a clear error with the path."""
    data.write_bytes(b"")
    with pytest.raises(StorageError, match=str(data)):
        await FileStore(data / "below").acquire()


async def test_the_names_of_unknown_files_are_reserved(data: Path) -> None:
    async with opened(data) as store:
        await spawn(store, "order-1")
        name = Path(store.path_of("order-1")).name
        with pytest.raises(WorkflowIdError, match="reserved"):
            await store.open_driver("?" + name, create=True)


async def test_the_drivers_have_threads_of_their_own(data: Path) -> None:
    """S19: user code that fills the default threads does not hold up storage."""
    async with opened(data, commit_in="thread") as store, trio.open_nursery() as nursery:
        limiter = trio.to_thread.current_default_thread_limiter()
        for _ in range(int(limiter.total_tokens)):
            nursery.start_soon(limiter.acquire_on_behalf_of, object())
        await trio.testing.wait_all_tasks_blocked()
        assert limiter.available_tokens == 0
        await spawn(store, "order-1")
        assert await read(store, "order-1") == b"order-1"


@pytest.mark.parametrize("durability", ["full", "normal"])
@pytest.mark.parametrize("commit_in", ["auto", "inline", "thread"])
async def test_many_workflows_at_once(data: Path, durability: Any, commit_in: Any) -> None:
    async with opened(data, durability=durability, commit_in=commit_in) as store:

        async def live(number: int) -> None:
            await spawn(store, f"order-{number}")
            assert await read(store, f"order-{number}") == b"order-%d" % number
            if number % 2:
                await store.delete(f"order-{number}")

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(live, number)
        assert await store.count_rows() == 15
        assert store._slots == {}
    assert len(os.listdir(data / "workflows")) == 15


# Damaged and missing files.


@pytest.mark.parametrize("how", ["garbage", "short", "empty"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_damaged_file_is_named_others_go_on_and_a_repaired_one_too(
    data: Path, how: str, restarted: bool
) -> None:
    """S41: file replaced by garbage or cut short."""
    async with opened(data) as store:
        await spawn(store, "order-1", state="sleeping", alarm=70)
        await spawn(store, "order-2")
        path = store.path_of("order-1")
        good = damage(path, how)
        for create in (False, True):
            with pytest.raises(CorruptStoreError) as caught:
                await store.open_driver("order-1", create=create)
            assert caught.value.path == path
            assert path in str(caught.value)
            assert caught.value.set_aside
            assert not Path(path).exists()
        sick = await store.get_row("order-1")
        assert sick is not None
        assert sick.problem is not None
        assert sick.problem.startswith("storage: ")
        assert path in sick.problem
        assert [found.workflow_id for found in await store.find_due(10_000, limit=10)] == ["order-2"]
        assert await read(store, "order-2") == b"order-2"
        if not restarted:
            Path(path).write_bytes(good)
            assert await read(store, "order-1") == b"order-1"
            well = await store.get_row("order-1")
            assert well is not None
            assert well == row("order-1", state="sleeping", next_wake_ms=70, updated_at_ms=well.updated_at_ms)
            # Its log, which is opened with it, may be some milliseconds younger than the file.
            assert 0 <= well.updated_at_ms - Path(path).stat().st_mtime_ns // 1_000_000 < 10_000
            return
    async with opened(data) as store:
        assert await store.get_row("order-1") == sick
    Path(path).write_bytes(good)
    async with opened(data) as store:
        well = await store.get_row("order-1")
        assert well is not None
        assert (well.problem, well.next_wake_ms, well.created_at_ms) == (None, 70, 1_000)
        assert await read(store, "order-1") == b"order-1"


async def test_a_missing_file_is_an_error_and_never_an_empty_namespace(data: Path) -> None:
    """S41: also when the caller would have made one."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await spawn(store, "order-2")
        path = store.path_of("order-1")
        os.rename(path, data / "elsewhere")
        for create in (False, True):
            with pytest.raises(NamespaceNotFoundError, match="is gone; put it back") as caught:
                await store.open_driver("order-1", create=create)
            assert (caught.value.workflow_id, caught.value.path) == ("order-1", path)
        sick = await store.get_row("order-1")
        assert sick is not None
        assert sick.problem == f"storage: {path} is gone; put it back, or delete the workflow"
        assert await read(store, "order-2") == b"order-2"
        os.rename(data / "elsewhere", path)
        assert await read(store, "order-1") == b"order-1"
        os.unlink(path)
        await store.delete("order-1")
        driver = await store.open_driver("order-1", create=True)
        assert await driver.list(b"") == []
        await driver.aclose()


async def test_a_deleted_workflow_takes_its_damaged_copies_along(data: Path) -> None:
    """S52: nothing of it is left that a rebuilt catalog could find."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        damage(store.path_of("order-1"), "garbage")
        with pytest.raises(CorruptStoreError):
            await store.open_driver("order-1")
        await store.delete("order-1")
        assert os.listdir(data / "workflows") == []
        await spawn(store, "order-1")
        path = store.path_of("order-1")
        good = damage(path, "short")
        with pytest.raises(CorruptStoreError):
            await store.open_driver("order-1")
        Path(path).write_bytes(good)
        assert await read(store, "order-1") == b"order-1"
    (data / "catalog.sqlite").unlink()
    async with opened(data) as store:
        await store.delete("order-1")
        assert os.listdir(data / "workflows") == []


async def test_a_copy_that_a_driver_set_aside_by_itself_goes_with_the_workflow_too(data: Path) -> None:
    """S41, S52: damage is found while a workflow runs as well, when the store is not asked."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await spawn(store, "order-2")
        for workflow_id in ("order-1", "order-2"):
            path = store.path_of(workflow_id)
            damage(path, "garbage")
            with pytest.raises(CorruptStoreError):
                await SqliteDriver.open(path)
        with pytest.raises(CorruptStoreError, match="was damaged"):
            await store.open_driver("order-2", create=True)
        await store.delete("order-1")
        await store.delete("order-2")
        assert os.listdir(data / "workflows") == []


async def test_inline_uses_no_thread_and_no_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As virtual time needs: a clock that jumps when all tasks wait would jump while a thread works."""

    def refuse(*arguments: object, **options: object) -> None:
        pytest.fail("a thread was used")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    for _ in range(2):
        async with opened(data, commit_in="inline") as store:
            await spawn(store, "order-1")
            await store.backup("order-1", data.parent / "copy")
            os.unlink(data.parent / "copy")
            damage(store.path_of("order-1"), "short")
            with pytest.raises(CorruptStoreError):
                await store.open_driver("order-1")
            await store.delete("order-1")
            await spawn(store, "order-2")
            await store.delete("order-2")
        (data / "catalog.sqlite").unlink()


async def test_a_file_that_cannot_be_opened_is_named_and_others_go_on(data: Path) -> None:
    """S41: permission denied and its like; here a directory stands in the file's place."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await spawn(store, "order-2")
        path = store.path_of("order-1")
        os.rename(path, data / "elsewhere")
        os.mkdir(path)
        with pytest.raises(StorageError, match="not a regular file") as caught:
            await store.open_driver("order-1")
        assert caught.value.path == path
        assert await read(store, "order-2") == b"order-2"
        os.rmdir(path)
        os.rename(data / "elsewhere", path)
        assert await read(store, "order-1") == b"order-1"


async def test_a_directory_that_takes_no_new_files_refuses_the_new_workflow_only(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S41: a read-only directory; simulated, since permissions do not bind root."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        real = os.open

        def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                raise PermissionError(13, "Read-only file system", path)
            return real(path, flags, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(StorageError, match="Read-only file system"):
            await store.open_driver("order-2", create=True)
        assert await read(store, "order-1") == b"order-1"
        monkeypatch.undo()
        await spawn(store, "order-2")
        assert await read(store, "order-2") == b"order-2"


# A workflow that is made in one with its row.


@pytest.mark.parametrize("journal", [True, False])
async def test_a_new_workflow_costs_the_catalog_one_question_and_one_transaction(data: Path, journal: bool) -> None:
    """Its row and the record of its file are written together, once its birth is in the journal or the file is there."""
    async with opened(data, journal=journal) as store:
        statements: list[str] = []
        catalog = store._access().catalog
        catalog._connection.set_trace_callback(statements.append)
        driver, is_empty = await store.create_driver(row("order-1"))
        catalog._connection.set_trace_callback(None)
        assert is_empty
        assert await driver.list(b"") == []
        verbs = [statement.split()[0] for statement in statements]
        assert (verbs.count("BEGIN"), verbs.count("COMMIT")) == (1, 1)
        assert verbs.index("BEGIN") == 1
        assert await store.get_row("order-1") == row("order-1")
        assert Path(store.path_of("order-1")).exists() is not journal
        with pytest.raises(StoreBusyError, match="order-1"):
            await store.create_driver(row("order-1"))
        await driver.aclose()
        assert Path(store.path_of("order-1")).exists()


async def test_a_store_that_overrides_how_drivers_are_opened_is_asked_for_new_ones_too(data: Path) -> None:
    """What it watches, or wraps, begins with the first batch of a workflow."""
    asked: list[str] = []

    class Watching(FileStore):
        async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
            asked.append(workflow_id)
            return await super().open_driver(workflow_id, create=create)

    class Both(Watching):
        async def create_driver(self, row: CatalogRow) -> tuple[Driver, bool]:
            asked.append(f"both {row.workflow_id}")
            return await super().create_driver(row)

    for kind, workflow_id, called in (
        (FileStore, "order-1", []),
        (Watching, "order-2", ["order-2"]),
        (Both, "order-3", ["both order-3"]),
    ):
        asked.clear()
        store = kind(data)
        await store.acquire()
        driver, _ = await create_driver(store, row(workflow_id))
        assert await store.get_row(workflow_id) == row(workflow_id)
        await driver.aclose()
        await store.aclose()
        assert asked == called


async def test_a_row_that_was_there_before_its_file_is_replaced(data: Path) -> None:
    """A creation that died between row and file, as it was written before, is simply made again."""
    async with opened(data) as store:
        await store.put_rows([row("order-1", workflow_type="other", attributes={"a": 1})])
    async with opened(data) as store:
        driver, is_empty = await store.create_driver(row("order-1"))
        assert is_empty
        assert await store.get_row("order-1") == row("order-1")
        await driver.aclose()
        assert await store.list_rows(attributes={"a": 1}) == []


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("is_applied", [False, True])
async def test_a_row_that_cannot_be_written_leaves_no_file_behind(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_applied: bool, journal: bool
) -> None:
    """However often it is tried; but a file whose record was written after all is never missing."""
    put_file = Catalog.put_file

    def fail(catalog: Catalog, *arguments: Any) -> None:
        if is_applied:
            put_file(catalog, *arguments)
        raise StorageError("database or disk is full")

    async with opened(data, journal=journal) as store:
        await spawn(store, "order-1")
        monkeypatch.setattr(Catalog, "put_file", fail)
        for number in range(1 if is_applied else 3):
            with pytest.raises(StorageError, match="full"):
                await store.create_driver(row("order-2"))
            assert (await store.get_row("order-2") is not None) is is_applied, number
            assert len(os.listdir(data / "workflows")) == 1 + is_applied
        monkeypatch.undo()
        driver, is_empty = await store.create_driver(row("order-2"))
        assert is_empty is not is_applied
        assert await driver.list(b"") == []
        await driver.aclose()
        assert len(os.listdir(data / "workflows")) == 2
        assert await read(store, "order-1") == b"order-1"


@pytest.mark.parametrize("journal", [True, False])
async def test_a_file_that_cannot_be_made_leaves_no_row_behind(
    data: Path, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    """Nor does an id that no workflow may have."""
    async with opened(data, journal=journal) as store:
        unknown = "?" + Path(store.describe("order-1")).name.replace("*", "0" * 16)
        with pytest.raises(WorkflowIdError, match="reserved"):
            await store.create_driver(row(unknown))

        def refuse(path: Any, *arguments: Any, **options: Any) -> int:
            raise PermissionError(13, "Read-only file system", path)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(StorageError, match="Read-only file system"):
            await store.create_driver(row("order-1"))
        monkeypatch.undo()
        assert await store.list_rows() == []


class FailingCommit:
    """A connection whose next commit fails when it is told so."""

    fail = False

    def __init__(self, path: str) -> None:
        self._inner = connect_file(path)

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> Any:
        if FailingCommit.fail and does_commit(self._inner, sql):
            FailingCommit.fail = False
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return self._inner.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> Any:
        return self._inner.executemany(sql, parameters)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("deletes", [[], [b"less"]], ids=["one statement", "statements"])
async def test_after_a_commit_of_unknown_outcome_the_workflow_opens_again(data: Path, deletes: list[bytes]) -> None:
    """S21, S41: the dead driver need not be closed first, and its neighbours do not notice."""
    async with opened(data, connect=FailingCommit) as store:
        await spawn(store, "order-1")
        other = await store.open_driver("order-2", create=True)
        driver = await store.open_driver("order-1")
        FailingCommit.fail = True
        with pytest.raises(CommitUnknownError):
            await driver.batch(Batch(puts=[(b"more", b"1")], deletes=deletes))
        await other.set(b"more", b"2")
        again = await store.open_driver("order-1")
        assert await again.get(b"\x99") == b"order-1"
        await driver.aclose()
        with pytest.raises(StoreBusyError):
            await store.open_driver("order-1")
        await again.aclose()
        await other.aclose()


async def test_a_deletion_that_fails_leaves_the_workflow_whole(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S41, S52: and it is not deleted later behind the caller's back."""
    async with opened(data) as store:
        await spawn(store, "order-1")

        def refuse(self: DataDirectory, name: str, *, set_aside: bool = False) -> None:
            raise PermissionError(1, "Operation not permitted", name)

        with monkeypatch.context() as patch:
            patch.setattr(DataDirectory, "remove", refuse)
            with pytest.raises(StorageError, match="not permitted"):
                await store.delete("order-1")
        assert await read(store, "order-1") == b"order-1"
    async with opened(data) as store:
        assert await read(store, "order-1") == b"order-1"
        assert await store.get_row("order-1") is not None


async def test_a_deletion_that_was_half_done_is_finished_by_the_next_call(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(data) as store:
        await spawn(store, "order-1")
        remove = DataDirectory.remove

        def fail_late(self: DataDirectory, name: str, *, set_aside: bool = False) -> None:
            remove(self, name, set_aside=set_aside)
            raise OSError(5, "Input/output error", name)

        with monkeypatch.context() as patch:
            patch.setattr(DataDirectory, "remove", fail_late)
            with pytest.raises(StorageError, match="Input/output"):
                await store.delete("order-1")
        with pytest.raises(NamespaceNotFoundError):
            await store.open_driver("order-1", create=True)
        await store.delete("order-1")
        await spawn(store, "order-1")
        assert await read(store, "order-1") == b"order-1"


# The owner's own file.


async def test_the_owners_own_file_is_made_when_it_is_first_asked_for(data: Path) -> None:
    async with opened(data) as store:
        assert not (data / "own.sqlite").exists()
        own = await store.open_own()
        await own.set(b"key", b"1")
        await own.aclose()
        assert (data / "own.sqlite").exists()
    (data / "own.sqlite").unlink()
    async with opened(data) as store:
        own = await store.open_own()
        assert await own.list(b"") == []
        await own.aclose()


@pytest.mark.parametrize("how", ["garbage", "short", "empty"])
async def test_a_damaged_own_file_is_set_aside_and_named_until_it_is_mended(data: Path, how: str) -> None:
    """S41: it is never begun afresh behind anybody's back, and the workflows do not notice."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        own = await store.open_own()
        await own.set(b"key", b"1")
        await own.aclose()
    good = damage(data / "own.sqlite", how)
    for _ in range(2):
        async with opened(data) as store:
            with pytest.raises(CorruptStoreError, match=r"own\.sqlite.* set aside"):
                await store.open_own()
            assert await read(store, "order-1") == b"order-1"
    (data / "own.sqlite").write_bytes(good)
    async with opened(data) as store:
        own = await store.open_own()
        assert await own.get(b"key") == b"1"
        await own.aclose()


async def test_an_own_file_that_was_half_made_is_cleared_away(data: Path) -> None:
    """S39: killed while it was made, for the first time."""
    async with opened(data):
        pass
    (data / "own.sqlite.new-7-1").write_bytes(b"half")
    async with opened(data) as store:
        assert not any(path.name.startswith("own.sqlite") for path in data.iterdir())
        await (await store.open_own()).aclose()


@pytest.mark.parametrize("journal", [True, False])
async def test_a_workflow_that_cannot_be_deleted_for_want_of_a_thread_stays(tmp_path, monkeypatch, journal):
    """S52: nor is it deleted by the next run, after it has gone on."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async with opened(tmp_path / "data", commit_in="inline", journal=journal) as store:
        await spawn(store, "order-1", state="completed")
        with monkeypatch.context() as patched:
            patched.setattr(DataDirectory, "remove", fail)
            with pytest.raises(RuntimeError):
                await store.delete("order-1")
    async with opened(tmp_path / "data", commit_in="inline", journal=journal) as store:
        assert await read(store, "order-1") == b"order-1"
