"""The files of single workflows: found, opened, made and removed, with the catalog told in the right order.

1. A file is made before it is recorded, and recorded before its driver is given out. So a recorded file that is missing
   was lost, and is an error and never an empty namespace; and a file that is not recorded is empty. With its record comes
   the row of a new workflow, where the caller has it: one transaction, and no row before there is a file. Of a workflow that is
   born in the journal all this is said of its birth.
2. A file of one that was born there is opened or removed only once it is durable that it was filed (`Journal.settle`).
3. A deletion is noted, then the file's entry is removed for good, then all that is known of it. A noted deletion is
   finished by the next `acquire`; one that could not begin is forgotten, so that nothing goes behind anybody's back.
4. What is wrong with a file is said in its workflow's row, and taken back once the file is well.

The caller holds the turn of the workflow (`Slot`).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import trio

from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog, FileRecord
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.catalog_schema import STORAGE_PROBLEM
from perdure.storage.descriptors import OutOfDescriptorsError, out_of_descriptors
from perdure.storage.directory import DataDirectory
from perdure.storage.errors import CorruptStoreError, DecodeError, NamespaceNotFoundError, StorageError
from perdure.storage.journal import Journal, JournalError, Young
from perdure.storage.naming import FileName, WorkflowIdError, file_name, is_unknown_id, name_stem, parse_file_name
from perdure.storage.rebuild import read_row
from perdure.storage.recovery import settle
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.store import CatalogRow
from perdure.storage.stored_driver import HeldDriver, StoredDriver
from perdure.storage.young_driver import YoungDriver

__all__ = ["WorkflowFiles", "file_errors", "no_workflow"]


class WorkflowFiles:
    """The files of one owned data directory.

    Args:
        directory: Owned.
        access: Its catalog.
        blocking: Runs what blocks.
        open_driver: Opens a file by its path.
        session: The number of this ownership, which the names of new files carry.
        journal: Where new workflows live until they need a file; `None` if each gets one at once.
    """

    def __init__(
        self,
        directory: DataDirectory,
        access: CatalogAccess,
        blocking: Blocking,
        open_driver: OpenDriver,
        *,
        session: int,
        journal: Journal | None,
    ) -> None:
        self._journal = journal
        self._directory = directory
        self._access = access
        self._blocking = blocking
        self._open_driver = open_driver
        self._session = session
        self._made = 0

    def path(self, file: str) -> Path:
        """The path of a file by its name."""
        return self._directory.workflows / file

    async def exists(self, file: str) -> bool:
        """Whether a file is there."""
        return await self._blocking.run(self.path(file).exists)

    async def names(self) -> list[FileName]:
        """The names of all files of workflows, recorded or not.

        Raises:
            StorageError: The directory cannot be listed.
        """
        with file_errors(self._directory.path):
            found = await self._blocking.run(os.listdir, self._directory.workflows)
        return sorted(name for each in found if (name := parse_file_name(each)) is not None)

    async def look(self, record: FileRecord) -> CatalogRow | None:
        """The row that a file calls for, which no driver of this store has open; `None` when it is empty.

        Raises:
            DecodeError, StorageError: It cannot be read.
        """
        path = self.path(record.file)
        driver = await self._open_driver(str(path))
        try:
            return await read_row(driver, path)
        finally:
            await driver.aclose()

    async def find(self, workflow_id: str) -> FileRecord | None:
        """The current file of a workflow, or `None` when none was made."""
        record = await self._access.ask(Catalog.find_file, workflow_id, name_stem(workflow_id))
        if record is None or record.workflow_id == workflow_id:
            return record
        # Its file may have been found when nothing said whose it was.
        return (
            await self._access.write(Catalog.move, record, workflow_id) if is_unknown_id(record.workflow_id) else None
        )

    async def open(self, record: FileRecord) -> HeldDriver:
        """Open a file, or what a young workflow has instead; if a file was not well before, read its row from it again.

        Raises:
            CorruptStoreError: It is damaged, and set aside.
            NamespaceNotFoundError: It is gone; or it is of another workflow than was thought, and kept as that now.
            StorageError: It cannot be opened.
        """
        path = self.path(record.file)
        if (young := await self._young(record.file)) is not None:
            return young
        try:
            driver = await self._open_driver(str(path))
        except CorruptStoreError as error:
            await self._access.write(Catalog.mark, record, str(error), set_aside=True)
            raise
        except NamespaceNotFoundError as error:
            text = f"{path} is gone; put it back, or delete the workflow"
            await self._access.write(Catalog.mark, record, text, set_aside=False)
            raise NamespaceNotFoundError(text, workflow_id=record.workflow_id, path=str(path)) from error
        if record.problem is not None and record.problem.startswith(STORAGE_PROBLEM):
            try:
                await self._settle(driver, record)
            except BaseException:
                await driver.aclose()
                raise
        return driver

    async def create(self, workflow_id: str, row: CatalogRow | None = None) -> HeldDriver:
        """Make the file of a workflow that has none; durable, and recorded, with its row if one is given, on return.

        With a row, and a journal, the workflow is young: its file is made later, and it is durable with its first batch.

        Raises:
            WorkflowIdError: The id is one of those under which files of unknown workflows are kept.
            StorageError: It cannot be made, or not be recorded; then the row was not written, and no file is left.
        """
        if is_unknown_id(workflow_id):
            raise WorkflowIdError(
                f"the workflow id {workflow_id!r} is reserved for files of unknown workflows; use another",
                workflow_id=workflow_id,
            )
        name = self._new_name(workflow_id)
        if row is not None and (born := self._bear(name)) is not None:
            try:
                with trio.CancelScope(shield=True):
                    await self._access.write(Catalog.put_file, FileRecord(workflow_id, name), row)
            except BaseException as error:
                if isinstance(error, StorageError) and not await self._is_recorded(name):
                    born.discard()
                else:
                    with suppress(StorageError):
                        await born.aclose()
                raise
            return born
        # Not the name of a birth that failed, which may be in the journal all the same.
        name = self._new_name(workflow_id)
        try:
            driver = await self._open_driver(os.path.join(self._directory.workflows, name), create=True)
        except OutOfDescriptorsError:
            # It is empty and recorded nowhere; left there, there would be one more with every try.
            with suppress(OSError):
                await self._blocking.run(self._directory.remove, name)
            raise
        try:
            with trio.CancelScope(shield=True):
                await self._access.write(Catalog.put_file, FileRecord(workflow_id, name), row)
        except BaseException as error:
            await driver.aclose()
            if isinstance(error, StorageError):
                with suppress(StorageError, OSError):
                    await self._forget(name)
            raise
        return driver

    def _new_name(self, workflow_id: str) -> str:
        name = file_name(workflow_id, session=self._session, count=self._made)
        self._made += 1
        return name

    def _bear(self, name: str) -> YoungDriver | None:
        """The driver of a workflow that is born in the journal, where there is one that can be written."""
        if self._journal is None:
            return None
        try:
            return self._young_driver(self._journal, self._journal.bear(name))
        except OSError:
            return None

    async def _young(self, name: str) -> YoungDriver | None:
        """The driver of a workflow that is still young although it was closed, as its file could not be written.

        Of one that is not, the file may be used on return.

        Raises:
            StorageError: The file may not be used yet, as that could be undone by a power cut; or it is not there, and it is not
                known what the journal has.
        """
        young = None if self._journal is None else self._journal.find(name)
        if self._journal is None or young is None:
            return None
        if young.is_discarded and not young.is_filed:
            path = str(self.path(name))
            raise StorageError(f"the workflow of {path} was being deleted, and may be gone; delete it again", path=path)
        if young.is_doubtful:
            async with young.turn:
                await self._journal.file(young)
        if not young.is_filed:
            return self._young_driver(self._journal, young)
        await self._journal.settle(young)
        return None

    def _young_driver(self, journal: Journal, young: Young) -> YoungDriver:
        return YoungDriver(young, journal, self._open_driver)

    async def _forget(self, name: str) -> None:
        """Remove a file that could not be recorded: there would be one more with every try.

        One that was not recorded is never looked at.
        """
        with trio.CancelScope(shield=True):
            if not await self._is_recorded(name):
                await self._blocking.run(self._directory.remove, name)

    async def _is_recorded(self, name: str) -> bool:
        """Whether a file is recorded; true where that cannot be seen, as a recorded file must not be missing."""
        is_recorded = True
        with trio.CancelScope(shield=True), suppress(StorageError, OSError):
            is_recorded = await self._access.ask(Catalog.has_file, name)
        return is_recorded

    async def remove(self, record: FileRecord) -> None:
        """Remove a file and what belongs to it; gone for good on return. What is known of it is not removed.

        Raises:
            StorageError: It cannot be removed, and stays; or it is removed and its rest is not, yet.
        """
        young = None if self._journal is None else self._journal.find(record.file)
        if self._journal is not None and young is not None and young.is_filed:
            await self._journal.settle(young)
        await self._access.write(Catalog.begin_delete, record)
        if self._journal is not None and young is not None:
            try:
                await self._journal.discard(young)  # or settle, if it got its file meanwhile
            except JournalError:
                raise  # it may be gone
            except StorageError:
                await self._access.write(Catalog.cancel_delete, record.workflow_id)
                raise
        with file_errors(self._directory.path):
            try:
                await self._blocking.run(self._directory.remove, record.file, set_aside=record.set_aside)
            except (OSError, RuntimeError):  # there may be no thread to do it in
                if _is_there(self.path(record.file)):
                    await self._access.write(Catalog.cancel_delete, record.workflow_id)
                raise

    async def _settle(self, driver: SqliteDriver, record: FileRecord) -> None:
        path = self.path(record.file)
        try:
            row = await read_row(driver, path)
        except DecodeError as error:
            await self._access.write(Catalog.mark, record, str(error), set_aside=False)
            raise StorageError(str(error), path=str(path)) from error
        settled = await self._access.write(settle, record, row)
        if settled.workflow_id != record.workflow_id:
            raise NamespaceNotFoundError(
                f"{path} turned out to be of workflow {settled.workflow_id!r:.200}; open it under that id",
                workflow_id=record.workflow_id,
                path=str(path),
            )


def _is_there(path: Path) -> bool:
    return path.exists()


class OpenDriver(Protocol):
    """Opens a workflow's file, as `StoredDriver.open` with a store's settings."""

    async def __call__(self, path: str, *, create: bool = False) -> StoredDriver:
        """Open the file at `path`."""
        ...


def no_workflow(workflow_id: str) -> NamespaceNotFoundError:
    """The error for a workflow of which no file was ever made, which the caller raises."""
    return NamespaceNotFoundError(f"no workflow {workflow_id!r:.200} was made", workflow_id=workflow_id)


@contextmanager
def file_errors(directory: Path) -> Generator[None, None, None]:
    """Turn what the operating system says into a `StorageError` that names the file, or the directory."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise out_of_descriptors(f"cannot use {where}", error, path=str(where)) or StorageError(
            f"cannot use {where}: {error.strerror}", path=str(where)
        ) from error
