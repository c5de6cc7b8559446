"""What a store does before it can be used: trust the catalog or rebuild it, and finish what was left half done.

1. A catalog is trusted only if nothing that was written to it can be missing. It was closed in good order, or the
   machine has not been restarted since (a killed process loses nothing that it wrote); and it is the catalog of the
   last owner, not an older copy put back. Whatever is not known counts against it.
2. While a catalog is being rebuilt the lock file names no session, so that a crash begins the rebuild anew.
3. Work left behind by a killed process is known from the catalog alone, or from the session in the files' names;
   no workflow's file is opened to look for it.
4. A workflow whose file could not be read is looked at again when a file is back under its name.
"""

from __future__ import annotations

from pathlib import Path

from perdure.storage.catalog import Catalog, FileRecord, Meta
from perdure.storage.descriptors import OutOfDescriptorsError
from perdure.storage.directory import DataDirectory, Host
from perdure.storage.errors import CorruptStoreError, PerdureError
from perdure.storage.naming import is_unknown_id
from perdure.storage.old_catalog import OldCatalog
from perdure.storage.process_lock import ProcessLock
from perdure.storage.rebuild import OpenFile, read_row, rebuild_catalog, sweep
from perdure.storage.store import CatalogRow

__all__ = ["Recovery", "is_trusted", "settle"]

_COMPANIONS = ("-wal", "-shm", "-journal")


def is_trusted(meta: Meta | None, *, session: int | None, boot_id: str | None) -> bool:
    """Whether a catalog still holds all that was written to it.

    Args:
        meta: What it says of itself.
        session: The last session, as the lock file names it; `None` when it names none.
        boot_id: What identifies this start of the machine; `None` when it cannot be known.
    """
    if meta is None or meta.session != session:
        return False
    return meta.clean or (boot_id is not None and meta.boot_id == boot_id)


def settle(catalog: Catalog, record: FileRecord, row: CatalogRow | None) -> FileRecord:
    """Write down what a file says that could not be read before; its problem is over.

    Args:
        catalog: Where.
        record: The file, under the id it was kept.
        row: What `read_row` made of it; `None` when the namespace is empty.

    Returns:
        The record, under the id that the file names.
    """
    if row is None:
        catalog.clear_problem(record.workflow_id)
        return record
    if row.workflow_id != record.workflow_id:
        record = catalog.move(record, row.workflow_id)
    catalog.settle(row, record)
    return record


class Recovery:
    """The recovery of one data directory, by the holder of its lock.

    Args:
        directory: Checked and prepared.
        lock: Held.
        host: What is asked of the machine.
        open_file: Opens a workflow's file by name, to read its row.
        auto_checkpoint: See `Catalog.open`.
    """

    def __init__(
        self, directory: DataDirectory, lock: ProcessLock, host: Host, open_file: OpenFile, *, auto_checkpoint: bool
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._host = host
        self._open_file = open_file
        self._auto_checkpoint = auto_checkpoint
        self._old_path = directory.path / "catalog.old.sqlite"

    async def recover(self) -> tuple[Catalog, int]:
        """Open the catalog, or rebuild it, and clear up. Blocks, with a checkpoint for each workflow file it opens.

        Returns:
            The catalog, open and begun for a new session, and the number of that session, which no file has yet.

        Raises:
            StorageError: The catalog cannot be opened or written.
            OSError: The directory cannot be read, or a file cannot be removed.
        """
        boot_id = self._host.boot_id()
        last_session = self._lock.previous.session or 0
        catalog = self._open_trusted(boot_id)
        try:
            if catalog is None:
                catalog = self._renew()
                last_session = max(last_session, await self._rebuild(catalog))
            else:
                await self._clear_up(catalog)
            session = last_session + 1
            # Either write can be the last before a crash: the numbers then differ, and the catalog is rebuilt.
            self._lock.write_note(session)
            catalog.set_meta(Meta(session, boot_id, clean=False))
            _unlink_database(self._old_path)
            for half_made in self._directory.path.glob(f"{self._directory.own.name}.new-*"):
                half_made.unlink(missing_ok=True)
        except BaseException:
            if catalog is not None:
                catalog.close()
            raise
        return catalog, session

    def _open_trusted(self, boot_id: str | None) -> Catalog | None:
        if not self._directory.catalog.exists():
            return None
        try:
            catalog = Catalog.open(self._directory.catalog, auto_checkpoint=self._auto_checkpoint)
        except CorruptStoreError:
            return None
        try:
            if catalog.is_whole() and is_trusted(catalog.meta(), session=self._lock.previous.session, boot_id=boot_id):
                return catalog
        except BaseException:
            catalog.close()
            raise
        catalog.close()
        return None

    def _renew(self) -> Catalog:
        """Put the old catalog out of the way and begin an empty one."""
        self._lock.write_note(None)
        path = self._directory.catalog
        if OldCatalog.is_legible(path):
            _unlink_database(self._old_path)
            for suffix in ("-wal", ""):
                if (source := Path(f"{path}{suffix}")).exists():
                    source.rename(f"{self._old_path}{suffix}")
        _unlink_database(path)
        return Catalog.open(path, auto_checkpoint=self._auto_checkpoint)

    async def _rebuild(self, catalog: Catalog) -> int:
        old = OldCatalog(self._old_path)
        try:
            return await rebuild_catalog(catalog, self._directory, self._open_file, old, now_ms=self._host.now_ms())
        finally:
            old.close()

    async def _clear_up(self, catalog: Catalog) -> None:
        meta = catalog.meta()
        for record in catalog.deletions():
            try:
                self._directory.remove(record.file, set_aside=record.set_aside)
            except OSError:
                if not (self._directory.workflows / record.file).exists():
                    raise
                catalog.cancel_delete(record.workflow_id)
            else:
                catalog.finish_delete(record.workflow_id)
        if meta is not None and not meta.clean:
            sweep(self._directory, catalog, meta.session)
        for record in catalog.storage_problems():
            if (self._directory.workflows / record.file).exists():
                await self._look_again(catalog, record)

    async def _look_again(self, catalog: Catalog, record: FileRecord) -> None:
        try:
            driver = await self._open_file(record.file)
            try:
                row = await read_row(driver, self._directory.workflows / record.file)
            finally:
                await driver.aclose()
        except OutOfDescriptorsError:
            raise  # It is no problem of the workflow's.
        except CorruptStoreError as error:
            catalog.mark(record, str(error), set_aside=True)
        except PerdureError as error:
            catalog.mark(record, str(error), set_aside=False)
        else:
            if row is not None or not is_unknown_id(record.workflow_id):
                settle(catalog, record, row)


def _unlink_database(path: Path) -> None:
    for suffix in ("", *_COMPANIONS):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
