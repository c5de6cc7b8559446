"""Backups: of a file through the driver that has it, and of a whole store into a data directory of its own.

1. A directory is made under another name and gets its own when all of it is durable: a backup that is there is complete.
2. What is wrong with one workflow's file is told and does not keep the others from being copied. What is wrong with the
   target ends it all.
3. It has the files of the workflows, under the names that they have, and no catalog: that is read again from them when it
   is first opened, so nothing in it can disagree with anything else.
4. What is made here is never cleared away by a later run, as nothing tells whether somebody still works on it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final

import trio

from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.descriptors import OutOfDescriptorsError
from perdure.storage.directory import DataDirectory
from perdure.storage.errors import DriverClosedError, NamespaceNotFoundError, StorageError
from perdure.storage.sqlite_image import sync_directory
from perdure.storage.stored_driver import HeldDriver, Slot

__all__ = ["NewBackup", "back_up_all", "copy_and_close", "copy_held"]

_PAGE_ROWS: Final = 200
_numbers: Final = count(1)


class NewBackup:
    """A backup in the making. An async context manager: left in order it is there, durably; otherwise nothing of it is.

    Args:
        target: Its path; nothing may be there.
        blocking: Runs what blocks.
    """

    def __init__(self, target: str | os.PathLike[str], blocking: Blocking) -> None:
        self._target = Path(os.path.abspath(target))
        self._new = DataDirectory(f"{self._target}.new-{os.getpid()}-{next(_numbers)}")
        self._blocking = blocking

    async def __aenter__(self) -> NewBackup:
        with trio.CancelScope(shield=True):
            await self._blocking.run(self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True):
            if error is None:
                await self._blocking.run(self._finish)
            else:
                await self._blocking.run(self._abandon)

    def workflow(self, file: str) -> str:
        """Where to copy a workflow's file to, by its name."""
        return str(self._new.workflows / file)

    @property
    def own(self) -> str:
        """Where to copy the owner's own file to."""
        return str(self._new.own)

    def _begin(self) -> None:
        if os.path.lexists(self._target):
            raise StorageError(f"{self._target} exists already; back up to a new name", path=str(self._target))
        try:
            os.mkdir(self._new.path)
        except OSError as error:
            raise StorageError(f"cannot make {self._target}: {error.strerror}", path=str(self._target)) from error
        try:
            self._new.prepare()
        except BaseException:
            self._abandon()
            raise

    def _finish(self) -> None:
        try:
            sync_directory(str(self._new.workflows))
            sync_directory(str(self._new.path))
            if os.path.lexists(self._target):  # renaming would replace an empty directory
                raise StorageError(f"{self._target} exists by now; back up to a new name", path=str(self._target))
            self._new.path.rename(self._target)
            sync_directory(str(self._target.parent))
        except OSError as error:
            self._abandon()
            raise StorageError(f"cannot finish {self._target}: {error.strerror}", path=str(self._target)) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        shutil.rmtree(self._new.path, ignore_errors=True)


async def back_up_all(
    target: str | os.PathLike[str],
    access: CatalogAccess,
    blocking: Blocking,
    backup: Callable[[str, str], Awaitable[None]],
    backup_own: Callable[[str], Awaitable[None]],
) -> dict[str, str]:
    """Copy every workflow that the catalog has a file of, and the owner's own file.

    Args:
        target: Where; nothing may be there.
        access: The catalog.
        blocking: Runs what blocks.
        backup: Copies a workflow, by its id, to a path.
        backup_own: Copies the owner's own file, if there is one, to a path.

    Returns:
        What could not be copied, by workflow id, and why.

    Raises:
        StorageError: `target` exists or cannot be written, or the catalog cannot be read.
    """
    missing: dict[str, str] = {}
    async with NewBackup(target, blocking) as new:
        after = ""
        while page := await access.ask(Catalog.list_files, after, _PAGE_ROWS):
            for record in page:
                await trio.lowlevel.checkpoint()
                path = new.workflow(record.file)
                try:
                    await backup(record.workflow_id, path)
                except StorageError as error:
                    if error.path == path or isinstance(error, OutOfDescriptorsError):
                        raise
                    if not isinstance(error, NamespaceNotFoundError) or error.path is not None:
                        missing[record.workflow_id] = str(error)
                    # Else it was deleted meanwhile.
            after = page[-1].workflow_id
        await backup_own(new.own)
    return missing


async def copy_held(slot: Slot, target: str | os.PathLike[str]) -> bool:
    """Copy a file through the driver that has it, if there is one; whether there is. The caller holds the turn."""
    held = slot.held
    if held is None:
        return False
    try:
        await held.backup(target)
    except DriverClosedError:
        # Closed meanwhile: wait for that, so that it can be opened again.
        await held.aclose()
        return False
    return True


async def copy_and_close(driver: HeldDriver, target: str | os.PathLike[str]) -> None:
    """Copy a file that was opened for just that; how closing it goes is of interest to whoever opens it next."""
    try:
        await driver.backup(target)
    finally:
        with suppress(StorageError):
            await driver.aclose()
