"""What the supervisor's tests share: stores that count, that can be looked at around each write, and that die.

1. A `Disk` is what outlives a process: one store after another is opened on it. `process` is one life of a supervisor.
2. `die` is the death of the process: the next store finds the bytes as they are at that moment, and whatever the dying
   supervisor still does reaches nothing. A SQLite directory is copied as it lies, write-ahead logs included, which is what
   `kill -9` leaves; a `MemoryStore` has its own `restart`.
3. A `WatchedStore` mirrors rows and namespaces, write by write, so that a check can compare them at any moment without I/O.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import incarnations
import trio
from harness import DriverKind, MovableClock, scheduled

from perdure.actors import Supervisor, open_supervisor
from perdure.storage import (
    Batch,
    CatalogRow,
    Driver,
    FileStore,
    MemoryStore,
    NowaitDriver,
    StorageError,
    Store,
    layout,
)
from perdure.storage.driver import SingleWrites

__all__ = ["Disk", "WatchedDriver", "WatchedStore", "When", "scheduled"]

When = Literal["before", "after"]


class WatchedStore:
    """A store over another.

    Attributes:
        opens: The ids of the workflows whose drivers were opened, in order.
        written: What was written, in order: `rows`, `create`, `delete`, `batch`, or `own`.
        batches: The batches among it, of a process that is to die at a write.
        die_at: The process is to die before or after the write of that number, counted from 0.
        watch: Called around each write, with what the mirrors hold at that moment.
        when_opened: Called when a driver was opened and is about to be handed out.
        delay_s: How long each write and each closing of a driver takes, in virtual seconds.
        look_s: How long each look for what is due takes.
    """

    def __init__(self, disk: Disk, inner: Store) -> None:
        self.inner = inner
        self.opens: list[str] = []
        self.written: list[str] = []
        self.batches: list[Batch] = []
        self.is_dead = False
        self.die_at: tuple[int, When] | None = None
        self.watch: Callable[[When], None] | None = None
        self.when_opened: Callable[[], None] | None = None
        self.delay_s = 0.0
        self.look_s = 0.0
        self._disk = disk

    def check(self) -> None:
        """Let a dead process do nothing."""
        if self.is_dead:
            raise StorageError("this process is dead")

    def before(self, batch: Batch | None = None) -> None:
        """A write is about to be made."""
        self.check()
        self._maybe_die("before", len(self.written), batch)
        if self.watch is not None:
            self.watch("before")

    def after(self, what: str, batch: Batch | None = None) -> None:
        """A write was made."""
        self.written.append(what)
        if batch is not None and self.die_at is not None:
            self.batches.append(batch)
        if self.watch is not None:
            self.watch("after")
        self._maybe_die("after", len(self.written) - 1, batch)

    def _maybe_die(self, when: When, number: int, batch: Batch | None) -> None:
        if self.die_at == (number, when):
            incarnations.record(when, self.batches, batch, again=self._disk.lives > 0)
            self._disk.lose()
            self.check()

    async def pause(self) -> None:
        """Take the time that a write takes."""
        if self.delay_s:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.delay_s)

    async def acquire(self) -> None:
        self.check()
        await self.inner.acquire()

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        self.check()
        self.opens.append(workflow_id)
        is_new = create and workflow_id not in self._disk.namespaces
        if is_new:
            self.before()
        driver = await self.inner.open_driver(workflow_id, create=create)
        mirror = self._disk.namespaces.setdefault(workflow_id, {})
        if self.when_opened is not None:
            self.when_opened()
        if is_new:
            try:
                self.after("create")
            except StorageError:
                await driver.aclose()
                raise
        return WatchedDriver(self, driver, mirror)

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        await self.pause()
        self.before()
        await self.inner.put_rows(rows)
        self._disk.rows.update((row.workflow_id, row) for row in rows)
        self.after("rows")

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        self.check()
        return await self.inner.get_row(workflow_id)

    async def find_due(self, now_ms: int, **options: Any) -> Sequence[CatalogRow]:
        await trio.sleep(self.look_s)
        self.check()
        return await self.inner.find_due(now_ms, **options)

    async def find_ended(self, state: str, before_ms: int, **options: Any) -> Sequence[CatalogRow]:
        self.check()
        return await self.inner.find_ended(state, before_ms, **options)

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        self.check()
        return await self.inner.next_wake_ms(since_ms=since_ms)

    async def list_rows(self, **options: Any) -> Sequence[CatalogRow]:
        self.check()
        return await self.inner.list_rows(**options)

    async def count_rows(self, **options: Any) -> int:
        self.check()
        return await self.inner.count_rows(**options)

    async def list_types(self) -> Sequence[str]:
        self.check()
        return await self.inner.list_types()

    async def open_own(self, *, create: bool = True) -> Driver:
        self.check()
        return WatchedDriver(self, await self.inner.open_own(create=create), self._disk.own, "own")

    async def delete(self, workflow_id: str) -> None:
        self.before()
        await self.inner.delete(workflow_id)
        self._disk.namespaces.pop(workflow_id, None)
        self._disk.rows.pop(workflow_id, None)
        self.after("delete")

    async def backup(self, workflow_id: str, target: str | PathLike[str]) -> None:
        self.check()
        await self.inner.backup(workflow_id, target)

    async def backup_all(self, target: str | PathLike[str]) -> Mapping[str, str]:
        self.check()
        return await self.inner.backup_all(target)

    async def reindex(self) -> int:
        self.before()
        changed = await self.inner.reindex()
        self._disk.rows = {row.workflow_id: row for row in await self.inner.list_rows(limit=2**31)}
        self.after("rows")
        return changed

    def describe(self, workflow_id: str) -> str:
        return self.inner.describe(workflow_id)

    async def aclose(self) -> None:
        await self.inner.aclose()


class WatchedDriver(SingleWrites):
    """A driver of a `WatchedStore`; `mirror` holds what is durable."""

    def __init__(self, store: WatchedStore, inner: Driver, mirror: dict[bytes, bytes], what: str = "batch") -> None:
        self._what = what
        self._store = store
        self._inner = inner
        self._mirror = mirror

    @property
    def atomic_batch(self) -> bool:
        return self._inner.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        self._store.check()
        return await self._inner.get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        self._store.check()
        return await self._inner.list(prefix)

    async def get_alarm(self, workflow_id: str) -> int | None:
        self._store.check()
        return await self._inner.get_alarm(workflow_id)

    async def batch(self, batch: Batch) -> None:
        await self._store.pause()
        self._store.before(batch)
        await self._inner.batch(batch)
        self._apply(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        inner = self._inner
        if self._store.delay_s or not isinstance(inner, NowaitDriver):
            return False
        self._store.before(batch)
        if not inner.batch_nowait(batch):
            return False
        self._apply(batch)
        return True

    def _apply(self, batch: Batch) -> None:
        mirror = self._mirror
        for key in batch.deletes:
            mirror.pop(key, None)
        for key in [key for key in mirror if any(key.startswith(prefix) for prefix in batch.delete_prefixes)]:
            del mirror[key]
        for key in [key for key in mirror if any(start <= key < end for start, end in batch.delete_ranges)]:
            del mirror[key]
        mirror.update(batch.puts)
        if batch.alarm is not None:
            mirror.pop(layout.ALARM_KEY, None)
            if batch.alarm.wake_at_ms is not None:
                mirror[layout.ALARM_KEY] = layout.encode_u64(batch.alarm.wake_at_ms)
        self._store.after(self._what, batch)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        raise AssertionError("the engine arms alarms in batches")

    async def clear_alarm(self, workflow_id: str) -> None:
        raise AssertionError("the engine clears alarms in batches")

    async def aclose(self) -> None:
        await self._store.pause()
        await self._inner.aclose()


class Disk:
    """What outlives a process.

    Attributes:
        clock: The machine's clock, virtual.
        store: The store of the life in progress, or of the last one.
        rows, namespaces, own: Mirrors of what is stored.
        lives: How many processes have died.
    """

    def __init__(self, kind: DriverKind, directory: Path) -> None:
        self.kind = kind
        self.clock = MovableClock()
        self.rows: dict[str, CatalogRow] = {}
        self.namespaces: dict[str, dict[bytes, bytes]] = {}
        self.own: dict[bytes, bytes] = {}
        self._directory = directory
        self.lives = 0
        self._memory = MemoryStore()
        self.store = self._watched()

    @property
    def path(self) -> Path:
        """The data directory in use, if it is one."""
        return self._directory / f"data-{self.lives}"

    def _watched(self) -> WatchedStore:
        return WatchedStore(
            self,
            self._memory if self.kind == "memory" else FileStore(self.path, durability="normal", commit_in="inline"),
        )

    def die(self) -> None:
        """The process that has the store dies at this very moment."""
        incarnations.record("between", (), None)
        self.lose()

    def lose(self) -> None:
        """What `die` leaves."""
        assert not self.store.is_dead, "it lives"
        self.store.is_dead = True
        left = self.path
        self.lives += 1
        if self.kind == "memory":
            self._memory = self._memory.restart()
        elif left.exists():
            shutil.copytree(left, self.path)

    def next_store(self) -> WatchedStore:
        """The store of the next process, not yet acquired; the last one was closed, or died."""
        self.store = self._watched()
        return self.store

    @asynccontextmanager
    async def process(self, *workflows: Any, **options: Any) -> AsyncIterator[Supervisor]:
        """One process with a supervisor, over what earlier ones left."""
        options.setdefault("clock", self.clock)
        store = self.store if not (self.store.opens or self.store.written or self.store.is_dead) else self.next_store()
        async with open_supervisor(store, workflows, **options) as supervisor:
            yield supervisor
