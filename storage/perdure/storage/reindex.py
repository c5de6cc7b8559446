"""Catalog rows, read again from the namespaces while the store is in use.

1. The namespace is read after the row that is to be corrected, so what it says is never older than that row.
2. A row that changed in between is left alone: whoever changed it keeps it. That is decided in the transaction that writes.
3. Of a workflow whose driver is open, the next wake may move earlier and never later: its user moves it earlier before
   the batch that calls for it. Of any other nothing can change meanwhile, as its turn is held until the row is written.
   Both are `corrected`'s to decide (`catalog_rows.py`).

Rejected: rebuilding into a second catalog and putting it in place of the first. What was written to the first meanwhile
would be lost, or would have to be written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import TypeAlias

import trio

from perdure.storage.catalog import Catalog, FileRecord
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.errors import CorruptStoreError, DecodeError, PerdureError, StorageError
from perdure.storage.naming import FileName, is_unknown_id, unknown_id
from perdure.storage.rebuild import problem_row, read_row
from perdure.storage.stored_driver import Slot
from perdure.storage.workflow_files import WorkflowFiles

__all__ = ["PAGE_ROWS", "Reindex"]

PAGE_ROWS = 200
"""How many workflows are asked for at once."""

TakeTurn: TypeAlias = Callable[[str], AbstractAsyncContextManager[Slot]]
"""Takes the turn of a workflow, by its id."""


class Reindex:
    """One reading of all namespaces.

    Args:
        files: The files, and how they are opened.
        access: The catalog.
        take_turn: See `TakeTurn`.
        session: The store's own session: what it is just making is recorded in a moment.
        now_ms: The time.
    """

    def __init__(
        self,
        files: WorkflowFiles,
        access: CatalogAccess,
        take_turn: TakeTurn,
        *,
        session: int,
        now_ms: Callable[[], int],
    ) -> None:
        self._files = files
        self._access = access
        self._take_turn = take_turn
        self._session = session
        self._now_ms = now_ms
        self._changed = 0

    async def run(self) -> int:
        """Read everything, a few files at a time; a checkpoint at each. Returns how many rows were changed.

        Raises:
            StorageError: The catalog cannot be read or written, or the directory cannot be listed.
        """
        after = ""
        while page := await self._access.ask(Catalog.list_files, after, PAGE_ROWS):
            for record in page:
                await trio.lowlevel.checkpoint()
                async with self._take_turn(record.workflow_id) as slot:
                    await self._recorded(record.workflow_id, slot)
            after = page[-1].workflow_id
        for name in await self._files.names():
            await trio.lowlevel.checkpoint()
            if name.session < self._session and not await self._access.ask(Catalog.has_file, str(name)):
                await self._stray(name)
        return self._changed

    async def _recorded(self, workflow_id: str, slot: Slot) -> None:
        record = await self._access.ask(Catalog.file, workflow_id)
        if record is None:
            return  # Deleted meanwhile.
        before = await self._access.ask(Catalog.get_row, workflow_id)
        created_at_ms = None if before is None else before.created_at_ms
        path = self._files.path(record.file)
        held = slot.held
        try:
            if held is not None:
                read = await read_row(held, path, created_at_ms=created_at_ms)
            else:
                driver = await self._files.open(record)
                try:
                    read = await read_row(driver, path, created_at_ms=created_at_ms)
                finally:
                    with suppress(StorageError):  # whoever opens it next is told
                        await driver.aclose()
        except DecodeError as error:
            await self._access.write(Catalog.mark, record, str(error), set_aside=False)
            self._changed += before is not None and before.problem is None
            return
        except StorageError:
            # What is wrong with the file was said in its row when it was opened; what is wrong with an open driver is
            # its user's to find out.
            now = await self._access.ask(Catalog.get_row, workflow_id)
            self._changed += (
                before is not None and now is not None and (before.problem is None) is not (now.problem is None)
            )
            return
        if read is None or is_unknown_id(workflow_id):
            return  # Nothing was written yet.
        # Opening it may have put its row right, if it was not well before.
        now = before if held is not None else await self._access.ask(Catalog.get_row, workflow_id)
        is_corrected = await self._access.write(Catalog.correct, now, read, is_open=held is not None)
        self._changed += is_corrected or now != before

    async def _stray(self, name: FileName) -> None:
        """A file that nobody recorded: somebody put it there while the store was open."""
        file = str(name)
        if await self._access.ask(Catalog.file_of_stem, name.stem) is not None:
            return  # Another file of that workflow is current; the next rebuild decides between them.
        record = FileRecord(unknown_id(file), file)
        try:
            row = await self._files.look(record)
        except (CorruptStoreError, DecodeError) as error:
            set_aside = isinstance(error, CorruptStoreError)
            await self._access.write(Catalog.put_file, replace(record, set_aside=set_aside))
            await self._access.write(Catalog.put_rows, [problem_row(record, str(error), at_ms=self._now_ms())])
            self._changed += 1
            return
        except PerdureError:
            return  # In use by somebody, or not ours.
        if row is None:
            return
        async with self._take_turn(row.workflow_id):
            if await self._files.exists(file) and await self._access.ask(Catalog.file_of_stem, name.stem) is None:
                await self._access.write(Catalog.put_file, FileRecord(row.workflow_id, file))
                await self._access.write(Catalog.put_rows, [row])
                self._changed += 1
