"""The store that keeps everything in memory: for tests, and for workflows that need not outlive the process.

1. It behaves as the file store does: one owner, one open driver per workflow, the same refusals, the same order.
2. The bytes are apart from the store (`_Disk`), so that `restart` can leave the old store behind as a dead process
   does: its drivers answer `DriverClosedError`, nothing they do reaches the bytes, and no close was orderly.
3. Nothing here is a checkpoint, but for what a driver made by `driver_factory` does.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from perdure.storage.attributes import Scalar
from perdure.storage.backups import NewBackup
from perdure.storage.blocking import Blocking
from perdure.storage.catalog_rows import corrected
from perdure.storage.driver import Batch, Driver, nowait_batch
from perdure.storage.errors import (
    DriverClosedError,
    NamespaceNotFoundError,
    StorageError,
    StoreBusyError,
    StoreLockedError,
)
from perdure.storage.layout import MAILBOX_PREFIX
from perdure.storage.memory import MemoryDriver
from perdure.storage.naming import check_workflow_id, file_name
from perdure.storage.question import Question
from perdure.storage.rebuild import rebuild_row
from perdure.storage.store import CatalogRow
from perdure.storage.wake import TERMINAL_STATES

__all__ = ["DriverFactory", "MemoryStore"]

_OWN = ""
"""What the owner's own namespace goes by among the workflows, of which none has an empty id."""

DriverFactory: TypeAlias = Callable[[str, dict[bytes, bytes]], Driver]
"""Makes the driver of a workflow: takes its id (empty: the owner's own) and its bytes, to work on and not to copy."""


def _memory_driver(workflow_id: str, data: dict[bytes, bytes]) -> Driver:
    return MemoryDriver(data)


@dataclass(slots=True)
class _Disk:
    namespaces: dict[str, dict[bytes, bytes]] = field(default_factory=dict[str, dict[bytes, bytes]])
    rows: dict[str, CatalogRow] = field(default_factory=dict[str, CatalogRow])
    own: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    owner: MemoryStore | None = None


class MemoryStore:
    """A `Store` in memory.

    Args:
        shared_with: Another store whose bytes this one uses too; only one of them can be acquired at a time. `None`
            starts empty.
        driver_factory: Makes the drivers, for tests that need faults or counters; `None` makes `MemoryDriver`s.
    """

    def __init__(self, *, shared_with: MemoryStore | None = None, driver_factory: DriverFactory | None = None) -> None:
        self._disk: _Disk = _Disk() if shared_with is None else shared_with._disk
        self._factory = driver_factory or _memory_driver
        self._drivers: dict[str, _HeldDriver] = {}

    def __repr__(self) -> str:
        return f"<MemoryStore, {len(self._disk.namespaces)} workflows>"

    def restart(self) -> MemoryStore:
        """What a new process finds after this one was killed: a store, not yet acquired, over the same bytes.

        This store and its open drivers are dead from here on: using them raises `StorageError` or `DriverClosedError`,
        and what they still have in flight reaches only their own, abandoned copy of the bytes.
        """
        disk, self._disk = self._disk, _Disk()
        # Drivers of a factory may go on writing into the dictionaries they have; the successor takes copies.
        disk.namespaces = {workflow_id: dict(data) for workflow_id, data in disk.namespaces.items()}
        disk.own = dict(disk.own)
        if disk.owner is self:
            disk.owner = None
        for driver in self._drivers.values():
            driver.closed = True
        self._drivers.clear()
        successor = MemoryStore(driver_factory=self._factory)
        successor._disk = disk
        return successor

    async def acquire(self) -> None:
        """Take ownership. Acquiring again while it is held is refused, as by the file store.

        Raises:
            StoreLockedError: A store over the same bytes is acquired.
        """
        if self._disk.owner is not None:
            raise StoreLockedError(
                "these workflows are already in use by a MemoryStore of this process; "
                "close it, or go on from store.restart()",
                holder_pid=os.getpid(),
            )
        self._disk.owner = self

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """Open the namespace of a workflow; see `Store.open_driver`.

        Raises:
            NamespaceNotFoundError: There is none, and `create` is false.
            StoreBusyError: It is already open.
            WorkflowIdError: The id is empty or not valid text.
        """
        self._check_owned()
        check_workflow_id(workflow_id)
        self._check_not_open(workflow_id)
        data = self._disk.namespaces.get(workflow_id)
        if data is None:
            if not create:
                raise NamespaceNotFoundError(f"no workflow {workflow_id!r:.200} was made", workflow_id=workflow_id)
            data = self._disk.namespaces.setdefault(workflow_id, {})
        driver = self._drivers[workflow_id] = _HeldDriver(self._factory(workflow_id, data))
        return driver

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """Insert or replace catalog rows."""
        self._check_owned()
        self._disk.rows.update((row.workflow_id, row) for row in rows)

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        """The row of one workflow, or `None`."""
        self._check_owned()
        return self._disk.rows.get(workflow_id)

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        """Rows without a problem that are due, earliest first; see `Store.find_due`."""
        self._check_owned()
        first = (since_ms, after or "")
        waking = [
            (wake, row.workflow_id, row)
            for wake, row in self._waking()
            if wake <= now_ms and (wake, row.workflow_id) > first
        ]
        return [row for _, _, row in heapq.nsmallest(max(limit, 0), waking, key=lambda item: item[:2])]

    async def find_ended(
        self, state: str, before_ms: int, *, limit: int, after: tuple[int, str] | None = None
    ) -> Sequence[CatalogRow]:
        """Rows of ended workflows that did not change since, oldest first; see `Store.find_ended`."""
        self._check_owned()
        rows = [
            row
            for row in self._disk.rows.values()
            if row.state == state
            and state in TERMINAL_STATES
            and row.next_wake_ms is None
            and row.problem is None
            and row.updated_at_ms < before_ms
            and (after is None or (row.updated_at_ms, row.workflow_id) > after)
        ]
        return heapq.nsmallest(max(limit, 0), rows, key=lambda row: (row.updated_at_ms, row.workflow_id))

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """The earliest `next_wake_ms >= since_ms` of all rows without a problem, or `None`."""
        self._check_owned()
        return min((wake for wake, _ in self._waking() if wake >= since_ms), default=None)

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
        """Rows for which all that is given holds, in order of creation; see `Store.list_rows`."""
        question = Question.of(state, workflow_type, created_before_ms, attributes, parent_id, has_problem, after)
        rows = self._matching(question)
        return heapq.nsmallest(max(limit, 0), rows, key=lambda row: (row.created_at_ms, row.workflow_id))

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
        """How many rows `list_rows` would give without a limit."""
        return len(
            self._matching(Question.of(state, workflow_type, created_before_ms, attributes, parent_id, has_problem))
        )

    async def list_types(self) -> Sequence[str]:
        """The types that there are rows of, in order."""
        self._check_owned()
        return sorted({row.workflow_type for row in self._disk.rows.values()})

    async def delete(self, workflow_id: str) -> None:
        """Remove a workflow's namespace and row; an unknown id is not an error.

        Raises:
            StoreBusyError: Its driver is open.
            WorkflowIdError: The id is empty or not valid text.
        """
        self._check_owned()
        check_workflow_id(workflow_id)
        self._check_not_open(workflow_id)
        self._disk.namespaces.pop(workflow_id, None)
        self._disk.rows.pop(workflow_id, None)

    async def open_own(self, *, create: bool = True) -> Driver:
        """Open the owner's own namespace; see `Store.open_own`.

        Raises:
            NamespaceNotFoundError: Nothing was ever put there, and `create` is false.
            StoreBusyError: It is already open.
        """
        self._check_owned()
        self._check_not_open(_OWN)
        if not create and not self._disk.own:
            raise NamespaceNotFoundError("nothing was kept for the owner yet; open_own() makes a place for it")
        driver = self._drivers[_OWN] = _HeldDriver(self._factory(_OWN, self._disk.own))
        return driver

    async def backup(self, workflow_id: str, target: str | os.PathLike[str]) -> None:
        """Write a copy of one namespace to `target`, as the SQLite file that `SqliteDriver` would hold it in.

        Raises:
            NamespaceNotFoundError: There is no such workflow.
            StorageError: `target` exists or cannot be written.
            WorkflowIdError: The id is empty or not valid text.
        """
        self._check_owned()
        check_workflow_id(workflow_id)
        data = self._disk.namespaces.get(workflow_id)
        if data is None:
            raise NamespaceNotFoundError(f"no workflow {workflow_id!r:.200} was made", workflow_id=workflow_id)
        await _write_file(target, data)

    async def backup_all(self, target: str | os.PathLike[str]) -> Mapping[str, str]:
        """Write everything to a new directory, which a `FileStore` can be opened on; see `Store.backup_all`.

        Raises:
            StorageError: `target` exists or cannot be written.
        """
        self._check_owned()
        async with NewBackup(target, Blocking(trio.CapacityLimiter(1), inline=True)) as backup:
            for number, (workflow_id, data) in enumerate(sorted(self._disk.namespaces.items())):
                name = file_name(workflow_id, session=1, count=number)
                await _write_file(backup.workflow(name), data)
            await _write_file(backup.own, self._disk.own)
        return {}

    async def reindex(self) -> int:
        """Read all rows again from the namespaces; see `Store.reindex`.

        Raises:
            DecodeError: A namespace is not what its keys say.
        """
        self._check_owned()
        changed = 0
        for workflow_id, data in self._disk.namespaces.items():
            current = self._disk.rows.get(workflow_id)
            since = (0, 0) if current is None else (current.created_at_ms, current.updated_at_ms)
            mail_waiting = any(key.startswith(MAILBOX_PREFIX) for key in data)
            read = rebuild_row(data, mail_waiting=mail_waiting, created_at_ms=since[0], updated_at_ms=since[1])
            if read is not None:
                driver = self._drivers.get(workflow_id)
                row = corrected(current, read, is_open=driver is not None and not driver.closed)
                if row != current:
                    self._disk.rows[workflow_id] = row
                    changed += 1
        return changed

    def describe(self, workflow_id: str) -> str:
        """Where a person finds this workflow's data."""
        return f"memory of process {os.getpid()}, workflow {workflow_id!r:.200}"

    async def aclose(self) -> None:
        """Close the open drivers and give up ownership. Closing twice is fine."""
        drivers, self._drivers = list(self._drivers.values()), {}
        try:
            for driver in drivers:
                await driver.aclose()
        finally:
            if self._disk.owner is self:
                self._disk.owner = None

    def _check_owned(self) -> None:
        if self._disk.owner is not self:
            raise StorageError("this MemoryStore is not acquired, or no longer; call `await store.acquire()` first")

    def _check_not_open(self, workflow_id: str) -> None:
        driver = self._drivers.get(workflow_id)
        if driver is not None and not driver.closed:
            raise StoreBusyError(f"workflow {workflow_id!r:.200} is already open; close its driver first")

    def _waking(self) -> list[tuple[int, CatalogRow]]:
        return [
            (row.next_wake_ms, row)
            for row in self._disk.rows.values()
            if row.problem is None and row.next_wake_ms is not None
        ]

    def _matching(self, question: Question) -> list[CatalogRow]:
        self._check_owned()
        return [row for row in self._disk.rows.values() if question.matches(row)]


async def _write_file(target: str | os.PathLike[str], data: Mapping[bytes, bytes]) -> None:
    from perdure.storage.sqlite import SqliteDriver

    if _exists(target):
        raise StorageError(f"{os.fspath(target)} exists; give the path of a new file", path=os.fspath(target))
    driver = await SqliteDriver.open(target, create=True, commit_in="inline")
    try:
        await driver.batch(Batch(puts=sorted(data.items())))
    finally:
        await driver.aclose()


def _exists(path: str | os.PathLike[str]) -> bool:
    return os.path.lexists(path)


class _HeldDriver:
    """A driver that its store can declare dead, whatever kind it is."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.closed = False

    @property
    def _open(self) -> Driver:
        if self.closed:
            raise DriverClosedError("this driver is closed; open the workflow again with store.open_driver")
        return self._driver

    @property
    def atomic_batch(self) -> bool:
        return self._driver.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        return self._driver.value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        return await self._open.get(key)

    async def set(self, key: bytes, value: bytes) -> None:
        await self._open.set(key, value)

    async def delete(self, key: bytes) -> None:
        await self._open.delete(key)

    async def delete_prefix(self, prefix: bytes) -> None:
        await self._open.delete_prefix(prefix)

    async def delete_range(self, start: bytes, end: bytes) -> None:
        await self._open.delete_range(start, end)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        return await self._open.list(prefix)

    async def batch(self, batch: Batch) -> None:
        await self._open.batch(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        driver = self._open
        batch_nowait = nowait_batch(driver)
        return batch_nowait is not None and batch_nowait(batch)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        await self._open.set_alarm(workflow_id, wake_at_ms)

    async def get_alarm(self, workflow_id: str) -> int | None:
        return await self._open.get_alarm(workflow_id)

    async def clear_alarm(self, workflow_id: str) -> None:
        await self._open.clear_alarm(workflow_id)

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            await self._driver.aclose()
