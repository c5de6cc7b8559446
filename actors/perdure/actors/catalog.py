"""Keeping the catalog behind the workflows: never later than they, seldom written.

1. The catalog's next wake is never later than the workflow's own. It moves earlier *before* the commit that makes the
   workflow want it, and later at any time *after*; so a wake can be spurious and is never lost.
2. A workflow that is at work has the wake 0, "at once": should the process die, it is activated at the next start.
3. Moves to later are gathered and written together, `DELAY_S` after the first; a busy workflow, which would soon move
   back, mostly writes none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import trio

from perdure.storage import Batch, CatalogRow, Driver, NowaitDriver, StorageError, Store, layout
from perdure.workflow.clock import Clock
from perdure.workflow.history import History
from perdure.workflow.states import WorkflowState

__all__ = ["DELAY_S", "NEVER", "CatalogKeeper", "CatalogedDriver"]

DELAY_S: Final = 0.2
"""How long a move to later may wait for company, in seconds."""

NEVER: Final = 2**64
"""Stands for "no wake" where wakes are compared."""


_log = logging.getLogger("perdure.actors")


def _order(wake_ms: int | None) -> int:
    return NEVER if wake_ms is None else wake_ms


class CatalogKeeper:
    """Writes catalog rows for all actors of a supervisor."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._later: dict[str, CatalogRow] = {}
        self._has_later = trio.Event()
        self._lock = trio.Lock()

    def now_ms(self) -> int:
        """The time for a row."""
        return self._clock.now_ms()

    async def put(self, row: CatalogRow) -> None:
        """Write a row now; it survives the process's death on return."""
        async with self._lock:
            self._later.pop(row.workflow_id, None)
            await self._store.put_rows([row])

    def put_later(self, row: CatalogRow) -> None:
        """Write a row some time; until then the catalog's is earlier, which is harmless."""
        self._later[row.workflow_id] = row
        self._has_later.set()

    async def flush(self) -> None:
        """Write what waits."""
        async with self._lock:
            rows, self._later = list(self._later.values()), {}
            if rows:
                try:
                    await self._store.put_rows(rows)
                except BaseException:
                    self._later = {row.workflow_id: row for row in rows} | self._later
                    raise

    def forget(self, workflow_id: str) -> None:
        """Drop what waits for a workflow that is gone."""
        self._later.pop(workflow_id, None)

    async def run(self) -> None:
        """Flush now and then, for ever."""
        while True:
            await self._has_later.wait()
            await trio.sleep(DELAY_S)
            self._has_later = trio.Event()
            try:
                await self.flush()
            except StorageError as error:  # what could not be written is earlier in the catalog, which is harmless
                _log.warning("the catalog could not be written, and will be later: %s", error)
                self._has_later.set()


class CatalogedDriver:
    """A workflow's driver that keeps the workflow's catalog row by the rule above; the engine sees just a driver."""

    def __init__(self, inner: Driver, keeper: CatalogKeeper, row: CatalogRow) -> None:
        self._inner = inner
        self._keeper = keeper
        self._history: History | None = None
        self.row = row

    def follow(self, history: History) -> None:
        """From now on the row follows this history."""
        self._history = history
        self._move_later(has_mail=self.row.mail_waiting)

    def _wanted(self, *, has_new_mail: bool) -> int | None:
        history = self._history
        if history is None:
            return self.row.next_wake_ms
        if history.state.is_terminal:
            return None
        if history.state is WorkflowState.SLEEPING and not has_new_mail:
            return history.alarm_ms
        return 0

    async def move_earlier(self, wake_ms: int | None) -> None:
        """See that the catalog's wake is no later than this."""
        if _order(wake_ms) < _order(self.row.next_wake_ms):
            self.row = replace(self.row, next_wake_ms=wake_ms, updated_at_ms=self._keeper.now_ms())
            await self._keeper.put(self.row)

    def _move_later(self, *, has_mail: bool) -> None:
        history = self._history
        if history is None:
            return
        row = replace(
            self.row,
            workflow_type=history.workflow_type or self.row.workflow_type,
            state=history.state.value,
            next_wake_ms=self._wanted(has_new_mail=False),
            mail_waiting=has_mail,
        )
        if row != self.row:
            row = replace(row, updated_at_ms=self._keeper.now_ms())
            self.row = row
            self._keeper.put_later(row)

    async def batch(self, batch: Batch) -> None:
        """Apply a batch, with the row moved earlier before it and later after it."""
        has_new_mail = any(key.startswith(layout.MAILBOX_PREFIX) for key, _ in batch.puts)
        await self.move_earlier(self._wanted(has_new_mail=has_new_mail))
        await self._inner.batch(batch)
        if has_new_mail:
            return  # the workflow is about to read it; what it then becomes comes with its next batch
        self._move_later(has_mail=False)

    def batch_nowait(self, batch: Batch) -> bool:
        """The same without waiting, where the row need not move first."""
        inner = self._inner
        if not isinstance(inner, NowaitDriver) or any(key.startswith(layout.MAILBOX_PREFIX) for key, _ in batch.puts):
            return False
        if _order(self._wanted(has_new_mail=False)) < _order(self.row.next_wake_ms) or not inner.batch_nowait(batch):
            return False
        self._move_later(has_mail=False)
        return True

    def settle(self, mail: int) -> None:
        """The actor leaves memory: the row says what it is to be woken for."""
        if mail == 0:
            self._move_later(has_mail=False)

    @property
    def atomic_batch(self) -> bool:
        """As the driver below."""
        return self._inner.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        """As the driver below."""
        return self._inner.value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        """As the driver below."""
        return await self._inner.get(key)

    async def set(self, key: bytes, value: bytes) -> None:
        """As the driver below."""
        await self._inner.set(key, value)

    async def delete(self, key: bytes) -> None:
        """As the driver below."""
        await self._inner.delete(key)

    async def delete_prefix(self, prefix: bytes) -> None:
        """As the driver below."""
        await self._inner.delete_prefix(prefix)

    async def delete_range(self, start: bytes, end: bytes) -> None:
        """As the driver below."""
        await self._inner.delete_range(start, end)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """As the driver below."""
        return await self._inner.list(prefix)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        """As the driver below, with the row moved earlier before it."""
        await self.move_earlier(wake_at_ms)
        await self._inner.set_alarm(workflow_id, wake_at_ms)

    async def get_alarm(self, workflow_id: str) -> int | None:
        """As the driver below."""
        return await self._inner.get_alarm(workflow_id)

    async def clear_alarm(self, workflow_id: str) -> None:
        """As the driver below."""
        await self._inner.clear_alarm(workflow_id)

    async def aclose(self) -> None:
        """As the driver below."""
        await self._inner.aclose()
