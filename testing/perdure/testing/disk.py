"""A disk that outlives simulated processes, and the store through which one process uses it.

1. `SimulatedDisk.boot` gives the store of the next process. `crash` is the death of the process that has it: its gate is dead
   first, so nothing that still unwinds reaches the bytes, and the next process finds them as they are at that moment.
2. In memory, or in a directory of real SQLite files, which is copied as it lies when the process dies, write-ahead logs
   included: that is what `kill -9` leaves. (A loss of power is another matter; the engine's own tests simulate it below SQLite.)
3. All blocking work is done in place: under an autojump clock time would pass while a thread works.

Rejected: one store whose bytes are set back after a crash. The dead process would go on writing to what the next one reads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import trio
from trio.testing import MockClock

from perdure.storage import (
    CatalogRow,
    CodedStore,
    Driver,
    FileStore,
    MemoryStore,
    NamespaceNotFoundError,
    StorageError,
    Store,
    ValueCodec,
    layout,
)
from perdure.storage.attributes import Scalar
from perdure.testing.checks import check_outside_of_trio
from perdure.testing.errors import SimulatedCrash
from perdure.testing.faults import FaultyDriver, When, WriteGate, WriteKind, WritePoint
from perdure.workflow import InvalidArgumentError, WorkflowSnapshot, load_snapshot

__all__ = ["SimulatedDisk", "SimulatedStore", "current_disk"]

current_disk: ContextVar[SimulatedDisk | None] = ContextVar("perdure_testing_disk", default=None)
"""The disk of the simulated process that is running: what is outside of it (`EffectLedger`) is kept by disk."""


class SimulatedDisk:
    """What outlives a process: namespaces, catalog, and the supervisor's own namespace.

    Args:
        directory: Where to keep SQLite files: an empty or missing directory, in which each life of the disk gets its own. `None`:
            in memory, which is quicker and behaves alike.
        atomic: Whether batches are all or nothing. With `False` large ones are cut into pieces, and a crash can tear them.

    Attributes:
        gate: The writes of the process that runs, or ran last; what is to go wrong next is said on it.
        history: The writes of all processes, in order.
        on_write: Called before and after each write of the processes that are booted from now on; see `WriteGate`.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, atomic: bool = True) -> None:
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None and self._directory.exists() and any(self._directory.iterdir()):
            raise InvalidArgumentError(
                f"{self._directory} holds something; give an empty or missing directory: tmp_path / 'disk'"
            )
        self._atomic = atomic
        self._memory = MemoryStore()
        self._life = -1
        self._copies = 0
        self._past: list[WritePoint] = []
        self.on_write: Callable[[WritePoint, When], None] | None = None
        self.gate: WriteGate = WriteGate()
        self._is_in_use = False

    def __repr__(self) -> str:
        where = "memory" if self._directory is None else str(self._directory)
        return f"<SimulatedDisk in {where}, {self.lives} lives, {len(self.history)} writes>"

    @property
    def lives(self) -> int:
        """How many processes used it so far."""
        return self._life + 1

    @property
    def history(self) -> Sequence[WritePoint]:
        """The writes of all processes, in order."""
        return (*self._past, *self.gate.writes)

    @property
    def has_crashed(self) -> bool:
        """Whether the process that used it last died."""
        return self.gate.is_dead

    @property
    def path(self) -> Path | None:
        """The directory that the running process has, or the last one had; `None` in memory."""
        return None if self._directory is None else self._directory / f"disk-{self._copies}"

    def boot(self) -> SimulatedStore:
        """The store of the next process, not yet acquired. The one before has been closed, or died.

        Raises:
            InvalidArgumentError: It is still running.
        """
        if self._is_in_use:
            raise InvalidArgumentError(
                "the process before has neither ended nor died; end its block, or disk.crash() first"
            )
        self._past += self.gate.writes
        self._life += 1
        self.gate = WriteGate(self._life)
        self.gate.on_crash = self._died
        self.gate.on_write = self.on_write
        inner: Store = self._memory
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            inner = FileStore(self.path, durability="normal", commit_in="inline")
        self._is_in_use = True
        return SimulatedStore(self, inner, self.gate, atomic=self._atomic)

    def crash(self) -> None:
        """The process that has the disk dies at this very moment.

        Its `virtual_supervisor` block is cancelled and ends; nothing that unwinds in it reaches the disk.

        Raises:
            InvalidArgumentError: No process has it.
        """
        if not self._is_in_use:
            raise InvalidArgumentError("no process uses this disk; crash one that does, inside its block")
        self.gate.die()

    def snapshots(self, *, codec: ValueCodec | None = None) -> dict[str, WorkflowSnapshot]:
        """What is durable of each workflow, by id, in order of creation. Nothing is written; not within Trio.

        Args:
            codec: What the processes gave to `open_supervisor(codec=)`.

        Raises:
            InvalidArgumentError: A process uses the disk.
            VirtualTimeError: It is called within Trio.
        """
        if self._is_in_use:
            raise InvalidArgumentError("a process uses this disk; look once it has ended, or ask its supervisor")
        check_outside_of_trio(
            "snapshots()", "look once the Trio run has ended, or ask a supervisor: await supervisor.list()"
        )
        return trio.run(self._read_snapshots, codec, clock=MockClock(autojump_threshold=0))

    async def _read_snapshots(self, codec: ValueCodec | None) -> dict[str, WorkflowSnapshot]:
        inner: Store = self._memory if self.path is None else FileStore(self.path, commit_in="inline")
        store: Store = inner if codec is None else CodedStore(inner, codec)
        found: dict[str, WorkflowSnapshot] = {}
        await store.acquire()
        try:
            row: CatalogRow | None = None
            while rows := await store.list_rows(after=None if row is None else (row.created_at_ms, row.workflow_id)):
                for row in rows:
                    try:
                        driver = await store.open_driver(row.workflow_id)
                    except NamespaceNotFoundError:
                        continue  # the process died right after it had put the row there, which comes first
                    try:
                        if await driver.get(layout.INPUT_KEY) is not None:  # else it died before the workflow was there
                            found[row.workflow_id] = await load_snapshot(driver)
                    finally:
                        await driver.aclose()
        finally:
            await store.aclose()
            if self.path is None:
                self._memory = self._memory.restart()
        return found

    def _died(self) -> None:
        self._is_in_use = False
        if self.path is None:
            self._memory = self._memory.restart()
            return
        left = self.path
        self._copies += 1
        if left.exists():
            shutil.copytree(left, self.path)

    def _closed(self, gate: WriteGate) -> None:
        if gate is self.gate:
            self._is_in_use = False


class SimulatedStore:
    """The `Store` of one process on a `SimulatedDisk`; made by `SimulatedDisk.boot`.

    Every method of a dead process raises `SimulatedCrash`, but for `aclose`.
    """

    def __init__(self, disk: SimulatedDisk, inner: Store, gate: WriteGate, *, atomic: bool) -> None:
        self.disk = disk
        self.inner = inner
        self.gate = gate
        self._atomic = None if atomic else False

    def __repr__(self) -> str:
        return f"<SimulatedStore over {self.inner!r}>"

    def _driver(self, inner: Driver, workflow_id: str, kind: Literal["batch", "own"] = "batch") -> Driver:
        return FaultyDriver(inner, gate=self.gate, atomic=self._atomic, workflow_id=workflow_id, kind=kind)

    def _begin(self, kind: WriteKind, workflow_id: str = "") -> tuple[WritePoint, bool]:
        """A write that is no batch; whether its outcome is to be lost after it was applied."""
        point, fault = self.gate.begin(kind, workflow_id)
        if fault in ("refused", "full", "io"):
            raise StorageError(f"simulated: {'database or disk is full' if fault == 'full' else 'disk I/O error'}")
        if fault == "lost":
            self.gate.end(point)
            raise StorageError("simulated: disk I/O error; nothing was written")
        return point, fault == "applied"

    def _end(self, point: WritePoint, *, is_told_otherwise: bool) -> None:
        self.gate.end(point)
        if is_told_otherwise:
            raise StorageError("simulated: disk I/O error, after it was written")

    async def acquire(self) -> None:
        """See `Store.acquire`."""
        self.gate.check()
        await self.inner.acquire()

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """See `Store.open_driver`; a write when a namespace is made."""
        self.gate.check()
        if not create or await self._exists(workflow_id):
            driver = await self.inner.open_driver(workflow_id, create=create)
        else:
            await self.gate.pause()
            point, is_told_otherwise = self._begin("create", workflow_id)
            with self.gate.making(point):
                driver = await self.inner.open_driver(workflow_id, create=True)
            try:
                self._end(point, is_told_otherwise=is_told_otherwise)
            except (StorageError, SimulatedCrash):
                await driver.aclose()
                raise
        return self._driver(driver, workflow_id)

    async def _exists(self, workflow_id: str) -> bool:
        try:
            driver = await self.inner.open_driver(workflow_id)
        except NamespaceNotFoundError:
            return False
        await driver.aclose()
        return True

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """See `Store.put_rows`; one write."""
        await self.gate.pause()
        point, is_told_otherwise = self._begin("rows", rows[0].workflow_id if len(rows) == 1 else "")
        with self.gate.making(point):
            await self.inner.put_rows(rows)
        self._end(point, is_told_otherwise=is_told_otherwise)

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        """See `Store.get_row`."""
        self.gate.check()
        return await self.inner.get_row(workflow_id)

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        """See `Store.find_due`."""
        self.gate.check()
        return await self.inner.find_due(now_ms, limit=limit, since_ms=since_ms, after=after)

    async def find_ended(
        self, state: str, before_ms: int, *, limit: int, after: tuple[int, str] | None = None
    ) -> Sequence[CatalogRow]:
        """See `Store.find_ended`."""
        self.gate.check()
        return await self.inner.find_ended(state, before_ms, limit=limit, after=after)

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """See `Store.next_wake_ms`."""
        self.gate.check()
        return await self.inner.next_wake_ms(since_ms=since_ms)

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
        """See `Store.list_rows`."""
        self.gate.check()
        return await self.inner.list_rows(
            state=state,
            workflow_type=workflow_type,
            created_before_ms=created_before_ms,
            attributes=attributes,
            parent_id=parent_id,
            has_problem=has_problem,
            after=after,
            limit=limit,
        )

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
        """See `Store.count_rows`."""
        self.gate.check()
        return await self.inner.count_rows(
            state=state,
            workflow_type=workflow_type,
            created_before_ms=created_before_ms,
            attributes=attributes,
            parent_id=parent_id,
            has_problem=has_problem,
        )

    async def list_types(self) -> Sequence[str]:
        """See `Store.list_types`."""
        self.gate.check()
        return await self.inner.list_types()

    async def open_own(self, *, create: bool = True) -> Driver:
        """See `Store.open_own`."""
        self.gate.check()
        return self._driver(await self.inner.open_own(create=create), "", "own")

    async def delete(self, workflow_id: str) -> None:
        """See `Store.delete`; one write."""
        await self.gate.pause()
        point, is_told_otherwise = self._begin("delete", workflow_id)
        with self.gate.making(point):
            await self.inner.delete(workflow_id)
        self._end(point, is_told_otherwise=is_told_otherwise)

    async def backup(self, workflow_id: str, target: str | os.PathLike[str]) -> None:
        """See `Store.backup`."""
        self.gate.check()
        await self.inner.backup(workflow_id, target)

    async def backup_all(self, target: str | os.PathLike[str]) -> Mapping[str, str]:
        """See `Store.backup_all`."""
        self.gate.check()
        return await self.inner.backup_all(target)

    async def reindex(self) -> int:
        """See `Store.reindex`; one write."""
        await self.gate.pause()
        point, is_told_otherwise = self._begin("rows")
        with self.gate.making(point):
            changed = await self.inner.reindex()
        self._end(point, is_told_otherwise=is_told_otherwise)
        return changed

    def describe(self, workflow_id: str) -> str:
        """See `Store.describe`."""
        return self.inner.describe(workflow_id)

    async def aclose(self) -> None:
        """Close what this process holds, also if it is dead."""
        try:
            await self.inner.aclose()
        finally:
            self.disk._closed(self.gate)  # pyright: ignore[reportPrivateUsage]
