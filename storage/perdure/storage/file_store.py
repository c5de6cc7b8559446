"""The store that keeps one SQLite file per workflow in one directory.

1. Which file of a workflow is current is decided by the directory alone: the file that is there, once those that the journal
   has were made (`journal_replay.py`). The catalog's record of it is an index, trusted only while nothing can have been lost
   from it (`recovery.py`), and rebuilt otherwise.
2. A file is recorded once it is made, and a deletion is noted before it is begun (`workflow_files.py`).
3. A workflow's file is opened, deleted and copied under a lock of its own. Whatever goes wrong with one file is said in
   that workflow's row and to its caller, and touches no other.

What a crash leaves, at each point, and what `acquire` makes of it:

| killed | left behind | next `acquire`; after a power cut the catalog is rebuilt |
|---|---|---|
| in create, before the file has its name | a temporary file | removed |
| in create, before it is recorded | an empty file, or a birth in the journal, that is not recorded | removed |
| in create, before the first batch | an empty namespace, its record, its row | kept; after a power cut removed |
| after `put_rows`, before `open_driver` | a row without a file | kept: `NamespaceNotFoundError`, with no path |
| while it is young | its birth and its batches, its record, its row | given its file |
| in delete, before the file is removed | the whole file, the note | deleted; after a power cut it is there whole |
| in delete, after the file is removed | its log, the note, the row | deleted |
| in delete and create again | a later incarnation | the earlier was gone for good before it could be made |

Rejected: naming the current file in the workflow's catalog row only. The catalog would then have to be synced for each
new workflow, and its loss would be the loss of everything.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from perdure.storage.attributes import Scalar
from perdure.storage.backups import back_up_all, copy_and_close, copy_held
from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog, Meta
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.directory import LOCAL_HOST, DataDirectory, Host
from perdure.storage.driver import Driver
from perdure.storage.errors import NamespaceNotFoundError, StorageError, StoreBusyError
from perdure.storage.filing import Filing
from perdure.storage.journal import Journal
from perdure.storage.journal_replay import replay_journal
from perdure.storage.naming import check_workflow_id, name_stem
from perdure.storage.process_lock import ProcessLock
from perdure.storage.question import Question
from perdure.storage.recovery import Recovery
from perdure.storage.reindex import Reindex
from perdure.storage.sqlite import CommitIn, SqliteDriver
from perdure.storage.sqlite_connection import ConnectionFactory, Durability, ErrorMapper
from perdure.storage.sqlite_image import can_fill_images
from perdure.storage.store import CatalogRow
from perdure.storage.stored_driver import HeldDriver, Slot, StoredDriver
from perdure.storage.workflow_files import WorkflowFiles, file_errors, no_workflow

__all__ = ["FileStore"]

_OWN = ""
"""What the owner's own file goes by among the workflows, of which none has an empty id."""

_THREADS_MAX = 16
"""Storage threads of one store. More do not sync faster: 5.8k commits/s from one thread, 10.9k from 16 (2 cores)."""


class FileStore:
    """A `Store` in a directory on a local disk.

    The catalog's methods are checkpoints only when they wait for a thread; the others always are. What has begun to
    change a file is not interrupted by cancellation.

    Args:
        directory: The data directory; `acquire` creates it when it is missing.
        durability: What a batch survives once it is acknowledged: `"full"` a power cut, `"normal"` the death of the
            process (a power cut then loses the most recent batches, never part of one).
        commit_in: Where blocking work runs; see `SqliteDriver.open`. Catalog writes follow it: in place unless it is
            `"thread"`, since they sync nothing. In `"auto"` somebody waits when another Trio task could run, or for
            what is being done in threads. (Measured
            against a count of the drivers that were lately busy: with 1 to 100 of them committing at once it gave more
            commits/s and a shorter wait for everybody else.)
        checkpoint_on_close: See `SqliteDriver.open`.
        journal: Whether workflows that `create_driver` makes live in the journal, and get a file once they are closed or have
            grown (`journal.py`): many that are at work at once then share their syncs. If not, each has a file at once.
        host: What the store asks of the machine; for tests.
        connect: Opens the workflow files; for tests.
        map_error: Classifies the errors of what `connect` returns.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durability: Durability = "full",
        commit_in: CommitIn = "auto",
        checkpoint_on_close: bool = True,
        journal: bool = True,
        host: Host = LOCAL_HOST,
        connect: ConnectionFactory | None = None,
        map_error: ErrorMapper | None = None,
    ) -> None:
        self._directory = DataDirectory(directory, host=host)
        self._host = host
        self._commit_in: CommitIn = commit_in
        self._limiter = trio.CapacityLimiter(_THREADS_MAX)
        self._blocking = Blocking(self._limiter, inline=commit_in == "inline")
        self._open_path = partial(
            StoredDriver.open,
            durability=durability,
            commit_in=commit_in,
            limiter=self._limiter,
            connect=connect,
            map_error=map_error,
            checkpoint_on_close=checkpoint_on_close,
        )
        self._durability: Durability = durability
        self._has_journal = journal and can_fill_images()
        self._journal: Journal | None = None
        self._lock: ProcessLock | None = None
        self._catalog: CatalogAccess | None = None
        self._files: WorkflowFiles | None = None
        self._session = 0
        self._slots: dict[str, Slot] = {}

    def __repr__(self) -> str:
        return f"<FileStore {str(self._directory.path)!r} {'closed' if self._catalog is None else 'open'}>"

    @property
    def directory(self) -> str:
        """The data directory, as an absolute path."""
        return str(self._directory.path)

    # Ownership.

    async def acquire(self) -> None:
        """Take ownership; see `Store.acquire`. On return what an earlier owner left half done is done or undone.

        It blocks Trio's thread for some milliseconds, and for about 0.4 ms per workflow, with a checkpoint after each,
        when the catalog has to be read again from the files.

        Cancelled, or with any error, it leaves the directory as it was for the next try, and unlocked.

        Raises:
            StoreLockedError: Another process owns the directory, or this one does; `holder_pid` names it.
            FormatVersionError: A newer Perdure wrote it.
            UnsupportedFileSystemError: It is on a network file system.
            StorageError: It holds something else, or cannot be read, made or written.
        """
        await self._blocking.run(self._directory.check)
        lock = await self._blocking.run(ProcessLock.take, self._directory.lock)
        try:
            await self._blocking.run(self._directory.prepare)
            recovery = Recovery(
                self._directory, lock, self._host, self._open_to_read, auto_checkpoint=self._commit_in != "auto"
            )
            with file_errors(self._directory.path):
                await self._blocking.run(replay_journal, self._directory)
                catalog, session = await recovery.recover()
        except BaseException:
            lock.release()
            raise
        self._lock, self._session = lock, session
        self._catalog = CatalogAccess(
            catalog,
            self._blocking,
            in_place=self._commit_in != "thread",
            checkpoints=self._commit_in == "auto",
            on_damage=partial(lock.write_note, None),
        )
        if self._has_journal:
            filing = Filing(str(self._directory.workflows), self._limiter, is_inline=self._commit_in == "inline")
            is_full = self._durability == "full"
            self._journal = Journal(self._directory, filing, self._limiter, is_full=is_full, commit_in=self._commit_in)
        self._files = WorkflowFiles(
            self._directory,
            self._catalog,
            self._blocking,
            self._open_driver,
            session=session,
            journal=self._journal,
        )

    async def aclose(self) -> None:
        """Close what is open and give up ownership. Not interrupted by cancellation; closing twice is fine.

        On return all that was acknowledged is durable, the catalog included.

        Raises:
            StorageError: Something could not be closed cleanly. Ownership was given up all the same.
        """
        lock, catalog = self._lock, self._catalog
        if lock is None or catalog is None:
            return
        self._lock = self._catalog = self._files = None
        if lock.is_foreign:
            return  # All of it is the parent's.
        problems: list[StorageError] = []
        with trio.CancelScope(shield=True):
            try:
                for slot in list(self._slots.values()):
                    # An opening in progress ends first.
                    async with slot.turn:
                        await _close(slot.driver, problems)
                # A catalog that knows of workflows whose births may not be durable is not trusted after a power cut.
                is_clean = await _close(self._journal, problems)
                self._journal = None
                await _close_catalog(catalog, Meta(self._session, self._host.boot_id(), clean=is_clean), problems)
            finally:
                self._slots.clear()
                lock.release()
        if problems:
            raise problems[0]

    # Namespaces.

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """Open the namespace of a workflow; see `Store.open_driver`. A new one is durable on return, and empty.

        A file that was damaged and then put back under its name is taken, its row read from it again, and its problem
        cleared.

        Raises:
            NamespaceNotFoundError: With `path` unset: none was ever made, and `create` is false. With `path` set: that
                file was there and is gone, which `create` does not change; put it back, or delete the workflow.
            CorruptStoreError: The file is damaged; it was set aside, now or earlier, and the row says so.
            StoreBusyError: It is already open.
            WorkflowIdError: The id is empty or not valid text.
            StorageError: The file cannot be opened or made.
        """
        check_workflow_id(workflow_id)
        async with self._slot(workflow_id) as slot:
            slot.check_free(workflow_id)
            files = self._owned_files()
            record = await files.find(workflow_id)
            if record is not None:
                driver = await files.open(record)
            elif create:
                driver = await files.create(workflow_id)
            else:
                raise no_workflow(workflow_id)
            self._give_out(driver, workflow_id, slot)
            return driver

    async def create_driver(self, row: CatalogRow) -> tuple[Driver, bool]:
        """Write a row and open its namespace, which is made if it is missing; see `CreatingStore.create_driver`.

        The file of a new one is made first, or its birth is in the journal; then its record and the row are written in one
        transaction.

        Raises:
            NamespaceNotFoundError, CorruptStoreError, StoreBusyError, WorkflowIdError: As `open_driver`.
            StorageError: The file cannot be opened or made, or the row not be written. Of a new workflow nothing is left.
        """
        workflow_id = row.workflow_id
        check_workflow_id(workflow_id)
        async with self._slot(workflow_id) as slot:
            slot.check_free(workflow_id)
            files = self._owned_files()
            record = await files.find(workflow_id)
            if record is None:
                driver = await files.create(workflow_id, row)
            else:
                await self.put_rows([row])
                driver = await files.open(record)
            self._give_out(driver, workflow_id, slot)
            return driver, record is None

    async def delete(self, workflow_id: str) -> None:
        """Remove a workflow's namespace and row for good; durable on return. An unknown id is not an error.

        After a crash at any point the workflow is there whole or gone for good. Cancellation has an effect only before
        the first change.

        Raises:
            StoreBusyError: Its driver is open.
            StorageError: Its file cannot be removed, and the workflow stays; or the removal cannot be finished, and is
                by the next call or the next `acquire`.
            WorkflowIdError: The id is empty or not valid text.
        """
        check_workflow_id(workflow_id)
        async with self._slot(workflow_id) as slot:
            slot.check_free(workflow_id)
            files = self._owned_files()
            record = await files.find(workflow_id)
            with trio.CancelScope(shield=True):
                if record is not None:
                    await files.remove(record)
                await self._access().write(Catalog.finish_delete, workflow_id)

    async def open_own(self, *, create: bool = True) -> Driver:
        """Open the owner's own namespace; see `Store.open_own`. A new one is durable on return, and empty.

        Raises:
            NamespaceNotFoundError: There is none, nor was one ever set aside, and `create` is false.
            CorruptStoreError: The file is damaged; it was set aside, now or earlier, and the error says where.
            StoreBusyError: It is already open.
            StorageError: The file cannot be opened or made.
        """
        async with self._slot(_OWN) as slot:
            if slot.held is not None:
                raise StoreBusyError(
                    f"{slot.held.path} is already open; use that driver, or close it", path=slot.held.path
                )
            if not create and not await self._blocking.run(self._directory.has_own):
                raise NamespaceNotFoundError("nothing was kept for the owner yet; open_own() makes a place for it")
            driver = await self._open_driver(str(self._directory.own), create=True)
            self._give_out(driver, _OWN, slot)
            return driver

    async def backup(self, workflow_id: str, target: str | os.PathLike[str]) -> None:
        """Write a consistent copy of one namespace to `target`; durable on return, complete or not there.

        Raises:
            NamespaceNotFoundError: There is no such workflow.
            StorageError: `target` exists or cannot be written (the error's `path` is `target`), or the workflow cannot be
                read.
            WorkflowIdError: The id is empty or not valid text.
        """
        check_workflow_id(workflow_id)
        async with self._slot(workflow_id) as slot:
            if not await copy_held(slot, target):
                files = self._owned_files()
                record = await files.find(workflow_id)
                if record is None:
                    raise no_workflow(workflow_id)
                await copy_and_close(await files.open(record), target)

    async def backup_all(self, target: str | os.PathLike[str]) -> Mapping[str, str]:
        """Write a copy of everything to a new directory, usable as a data directory; see `Store.backup_all`.

        Raises:
            StorageError: `target` exists or cannot be written, or the catalog cannot be read.
        """
        return await back_up_all(target, self._access(), self._blocking, self.backup, self._backup_own)

    async def reindex(self) -> int:
        """Read all rows again from the files, while the store is in use; see `Store.reindex`.

        It takes about 1 ms for each workflow, mostly in threads.

        Raises:
            StorageError: The catalog cannot be read or written, or the directory cannot be listed.
        """
        reindex = Reindex(
            self._owned_files(), self._access(), self._slot, session=self._session, now_ms=self._host.now_ms
        )
        return await reindex.run()

    def describe(self, workflow_id: str) -> str:
        """The path of the workflow's file, of a young one where it will be; of none, or while the store is closed, a pattern."""
        try:
            return self.path_of(workflow_id)
        except StorageError:
            return str(self._directory.workflows / f"{name_stem(workflow_id)}.*.sqlite")

    def path_of(self, workflow_id: str) -> str:
        """The path of the workflow's current file, which is not there while the workflow is young (`journal.py`).

        Do not open it while the store is: SQLite's locks would be lost.

        Raises:
            NamespaceNotFoundError: None was made.
            StorageError: The store is closed.
        """
        record = self._access().catalog.file(workflow_id)
        if record is None:
            raise no_workflow(workflow_id)
        return str(self._directory.workflows / record.file)

    # The catalog.

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """Insert or replace catalog rows, in one transaction; on return they survive the death of the process.

        Raises:
            StorageError: None of them was written.
        """
        await self._access().write(Catalog.put_rows, rows)

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        """The row of one workflow, or `None`."""
        return await self._access().ask(Catalog.get_row, workflow_id)

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        """Rows without a problem that are due, earliest first; see `Store.find_due`."""
        return await self._access().ask(Catalog.find_due, now_ms, limit, since_ms, after)

    async def find_ended(
        self, state: str, before_ms: int, *, limit: int, after: tuple[int, str] | None = None
    ) -> Sequence[CatalogRow]:
        """Rows of ended workflows that did not change since, oldest first; see `Store.find_ended`."""
        return await self._access().ask(Catalog.find_ended, state, before_ms, limit, after)

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """The earliest `next_wake_ms >= since_ms` of all rows without a problem, or `None`."""
        return await self._access().ask(Catalog.next_wake_ms, since_ms)

    async def list_rows(
        self,
        *,
        state: str | Collection[str] | None = None,
        workflow_type: str | None = None,
        created_before_ms: int | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        has_problem: bool | None = None,
        after: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> Sequence[CatalogRow]:
        """Rows for which all that is given holds, in order of creation; see `Store.list_rows`. Opens no namespace."""
        question = Question.of(state, workflow_type, created_before_ms, attributes, parent_id, has_problem, after)
        return await self._access().ask(Catalog.list_rows, question, limit)

    async def count_rows(
        self,
        *,
        state: str | Collection[str] | None = None,
        workflow_type: str | None = None,
        created_before_ms: int | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        has_problem: bool | None = None,
    ) -> int:
        """How many rows `list_rows` would give without a limit. Opens no namespace."""
        question = Question.of(state, workflow_type, created_before_ms, attributes, parent_id, has_problem)
        return await self._access().ask(Catalog.count_rows, question)

    async def list_types(self) -> Sequence[str]:
        """The types that there are rows of, in order."""
        return await self._access().ask(Catalog.list_types)

    # Within.

    async def _backup_own(self, target: str) -> None:
        async with self._slot(_OWN) as slot:
            if not await copy_held(slot, target) and await self._blocking.run(self._directory.own.exists):
                await copy_and_close(await self._open_driver(str(self._directory.own)), target)

    def _access(self) -> CatalogAccess:
        if self._lock is None or self._catalog is None:
            raise StorageError(
                f"the store {self._directory.path} is not open; call `await store.acquire()` first",
                path=str(self._directory.path),
            )
        self._lock.check()
        return self._catalog

    @asynccontextmanager
    async def _slot(self, workflow_id: str) -> AsyncGenerator[Slot, None]:
        """The turn to open, delete or copy a workflow's file."""
        self._access()
        slot = self._slots.setdefault(workflow_id, Slot())
        slot.users += 1
        try:
            async with slot.turn:
                self._access()
                yield slot
        finally:
            slot.users -= 1
            self._drop(workflow_id, slot)

    def _give_out(self, driver: HeldDriver, workflow_id: str, slot: Slot) -> None:
        driver.when_closed = partial(self._drop, workflow_id, slot)
        slot.driver = driver

    def _drop(self, workflow_id: str, slot: Slot) -> None:
        if slot.is_idle and self._slots.get(workflow_id) is slot:
            del self._slots[workflow_id]

    def _owned_files(self) -> WorkflowFiles:
        self._access()
        assert self._files is not None
        return self._files

    async def _open_driver(self, path: str, *, create: bool = False) -> StoredDriver:
        driver = await self._open_path(path, create=create)
        assert isinstance(driver, StoredDriver)
        return driver

    async def _open_to_read(self, name: str) -> SqliteDriver:
        # In place: with a thread for each opening and closing, a rebuild takes half as long again.
        return await self._open_path(str(self._directory.workflows / name), commit_in="inline")


async def _close(what: HeldDriver | Journal | None, problems: list[StorageError]) -> bool:
    """Close it, if there is anything; whether that went well."""
    if what is not None:
        try:
            await what.aclose()
        except StorageError as error:
            problems.append(error)
            return False
        except RuntimeError as error:  # no thread is to be had
            problem = StorageError(f"cannot close {what!r}: {error}")
            problem.__cause__ = error
            problems.append(problem)
            return False
    return True


async def _close_catalog(catalog: CatalogAccess, meta: Meta, problems: list[StorageError]) -> None:
    try:
        await catalog.aclose(meta)
    except StorageError as error:
        problems.append(error)
