"""Keeping the catalog behind the workflows: never later than they, seldom written.

1. The catalog's next wake is never later than the workflow's own. It moves earlier *before* the commit that makes the
   workflow want it, and later at any time *after*; so a wake can be spurious and is never lost.
2. A workflow that is at work has the wake 0, "at once": should the process die, it is activated at the next start.
3. What a row says comes from the batches that were written, not from the history in memory: that is ahead of them, and
   after a fault or an error of the storage it says what never came true.
4. Mail that the workflow waits for is a wish to be activated at once; so is any mail of which that is not known.
5. Moves to later are gathered and written together, `DELAY_S` after the first; a busy workflow, which would soon move
   back, mostly writes none.
6. While a row is being moved earlier, a batch of somebody else may move it later (a message comes to a workflow that is just
   being started): then the row that waits to be written has the earlier wake, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

import trio

from perdure.actors.events import EventHub
from perdure.actors.meter import Meter
from perdure.storage import Batch, CatalogRow, Driver, StorageError, Store, layout
from perdure.storage.attributes import Scalar, decode_attributes
from perdure.storage.driver import nowait_batch
from perdure.storage.store import create_driver
from perdure.storage.wake import TERMINAL_STATES, wake_of
from perdure.workflow.activation import Activation
from perdure.workflow.clock import Clock
from perdure.workflow.states import WorkflowState

__all__ = ["DELAY_MAX_S", "DELAY_S", "NEVER", "CatalogKeeper", "CatalogedDriver"]

DELAY_S: Final = 0.2
"""How long a move to later may wait for company, in seconds."""

DELAY_MAX_S: Final = 30.0
"""The longest pause between two tries, in seconds, while the catalog cannot be written."""

NEVER: Final = 2**64
"""Stands for "no wake" where wakes are compared."""


_log = logging.getLogger("perdure.actors")

_SLEEPING: Final = WorkflowState.SLEEPING.value


def _order(wake_ms: int | None) -> int:
    return NEVER if wake_ms is None else wake_ms


class CatalogKeeper:
    """Writes catalog rows for all actors of a supervisor.

    Attributes:
        meter: Told of each commit.
        events: Told of each change of a state.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.meter: Meter = Meter()
        self.events: EventHub = EventHub(clock)
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

    async def create(self, row: CatalogRow) -> tuple[Driver, bool]:
        """Write the row of a workflow that is to begin, and open its namespace, made if missing; see `create_driver`.

        Returns:
            The driver, which the caller closes, and whether the namespace is known to be empty.
        """
        async with self._lock:  # else what is just being written could bring an earlier row back
            self._later.pop(row.workflow_id, None)
        return await create_driver(self._store, row)

    async def get(self, workflow_id: str) -> CatalogRow | None:
        """A workflow's row, as it is or will be once what waits is written."""
        async with self._lock:
            return self._later.get(workflow_id) or await self._store.get_row(workflow_id)

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

    async def delete(self, workflow_id: str) -> None:
        """Delete a workflow that has no actor, its namespace and its row; see `Store.delete`."""
        async with self._lock:  # else what is just being written could bring the row back
            self._later.pop(workflow_id, None)
        await self._store.delete(workflow_id)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Flush now and then, for ever."""
        delay_s = DELAY_S
        while True:
            await self._has_later.wait()
            await trio.sleep(delay_s)
            self._has_later = trio.Event()
            try:
                await self.flush()
                delay_s = DELAY_S
            except StorageError as error:  # what could not be written is earlier in the catalog, which is harmless
                delay_s = min(2 * delay_s, DELAY_MAX_S)
                _log.warning("the catalog could not be written; it is tried again in %g seconds: %s", delay_s, error)
                self._has_later.set()


@dataclass(frozen=True, slots=True)
class _Standing:
    """What of a workflow is durable and bears on its row: its next wake, and by what it is found.

    Attributes:
        attributes: By what it is found, once that is known.
    """

    state: str
    alarm_ms: int | None
    mail: int
    attributes: Mapping[str, Scalar] | None = None
    has_duties: bool = False

    def after(self, batch: Batch) -> _Standing:
        """The same once this batch is written."""
        state, alarm_ms, mail, attributes = self.state, self.alarm_ms, self.mail, self.attributes
        has_duties = self.has_duties
        for key, value in batch.puts:
            if key == layout.STATE_KEY:
                state = value.decode()
            elif key.startswith(layout.MAILBOX_PREFIX):
                mail += 1
            elif key == layout.ATTRIBUTES_KEY:
                attributes = decode_attributes(value)
            elif key == layout.DUTIES_KEY:
                has_duties = True
        for key in batch.deletes:
            if key.startswith(layout.MAILBOX_PREFIX):
                mail -= 1
            elif key == layout.DUTIES_KEY:
                has_duties = False
            elif key == layout.ATTRIBUTES_KEY:
                attributes = {}
        if batch.alarm is not None:
            alarm_ms = batch.alarm.wake_at_ms
        return _Standing(state, alarm_ms, mail, attributes, has_duties)

    def wake_ms(self, *, wants_mail: bool) -> int | None:
        """When the workflow wants to be activated."""
        return wake_of(self.state, self.alarm_ms, wants_mail=wants_mail, has_duties=self.has_duties)


class CatalogedDriver:
    """A workflow's driver that keeps the workflow's catalog row by the rule above; the engine sees just a driver.

    Attributes:
        row: The row as it is, or soon will be, in the catalog.
        has_written: Whether a batch was written since `follow`.
        when_duties: Called when a batch was written by which a workflow that has not ended has duties (`duties.py`).
        when_sound: Called when a batch was written that clears the count of activations without a record.
    """

    def __init__(self, inner: Driver, keeper: CatalogKeeper, row: CatalogRow) -> None:
        self._inner = inner
        self._batch_nowait = nowait_batch(inner)
        self._keeper = keeper
        self._activation: Activation | None = None
        self._standing = _Standing(row.state, row.next_wake_ms, 0)
        self._is_in_doubt = False
        self._is_reindexed = False
        self._putting = trio.Lock()
        self.row: CatalogRow = row
        self.has_written: bool = False
        self.when_sound: Callable[[], None] | None = None
        self.when_duties: Callable[[], None] | None = None

    def follow(self, activation: Activation) -> None:
        """From now on the row follows this activation, which holds just what is stored."""
        history = activation.history
        self._activation = activation
        # The attributes, too: a process that dies may not have come to write them into the catalog.
        self._standing = _Standing(
            history.state.value,
            history.alarm_ms,
            len(activation.mailbox),
            history.attributes(),
            has_duties=bool(history.calls.duties),
        )
        self.row = replace(self.row, workflow_type=history.workflow_type or self.row.workflow_type)
        self._move_later()

    @property
    def is_terminal(self) -> bool:
        """Whether the workflow has ended, durably."""
        return self._standing.state in TERMINAL_STATES

    @property
    def has_duties(self) -> bool:
        """Whether the workflow owes something to others, durably."""
        return self._standing.has_duties

    async def move_earlier(self, wake_ms: int | None) -> None:
        """See that the catalog's wake is no later than this."""
        if _order(wake_ms) < _order(self.row.next_wake_ms):
            async with self._putting:
                if _order(wake_ms) < _order(self.row.next_wake_ms):
                    await self._put(self.row.state, wake_ms)

    async def note_begun(self) -> None:
        """See that the row says that the workflow has begun, before it does: limits count by that (`admission.py`)."""
        async with self._putting:
            if self.row.state == WorkflowState.PENDING.value:
                await self._put(WorkflowState.RUNNING.value, 0)

    async def _put(self, state: str, wake_ms: int | None) -> None:
        """Write the row now. What a batch changes of it meanwhile is written later, and no later wake with it."""
        before = self.row
        row = replace(before, state=state, next_wake_ms=wake_ms, updated_at_ms=self._keeper.now_ms())
        await self._keeper.put(row)
        if self.row is before:
            self.row = row
        else:
            state = state if self.row.state == before.state else self.row.state
            self.row = replace(self.row, state=state, next_wake_ms=wake_ms)
            self._keeper.put_later(self.row)

    def _move_later(self) -> None:
        standing, row = self._standing, self.row
        is_wanted = standing.state == _SLEEPING and self._wants_mail(standing)
        wake_ms = row.next_wake_ms if is_wanted else standing.wake_ms(wants_mail=False)
        mail_waiting = standing.mail > 0
        attributes = row.attributes if standing.attributes is None else standing.attributes
        found = (row.state, row.next_wake_ms, row.mail_waiting, row.attributes)
        has_changed = found != (standing.state, wake_ms, mail_waiting, attributes)
        if has_changed or self._is_reindexed:
            self._is_reindexed = False
            self.row = replace(
                row,
                state=standing.state,
                next_wake_ms=wake_ms,
                mail_waiting=mail_waiting,
                attributes=attributes,
                updated_at_ms=self._keeper.now_ms() if has_changed else row.updated_at_ms,
            )
            self._keeper.put_later(self.row)

    def _wants_mail(self, standing: _Standing) -> bool:
        """Whether there is mail that the workflow waits for, or that it was not offered yet and parked without a look at."""
        activation = self._activation
        assert activation is not None, "it is followed"
        return standing.mail > len(activation.mailbox) or activation.has_wanted_mail

    async def batch(self, batch: Batch) -> None:
        """Apply a batch, with the row moved earlier before it and later after it."""
        if self._activation is None:  # being created: its row says "at once"
            started = perf_counter()
            await self._inner.batch(batch)
            self._keeper.meter.note(started)
            for key, value in batch.puts:
                if key == layout.STATE_KEY:  # not so in each piece, if it had to be cut
                    self._tell_made(value.decode())
            return
        standing = self._standing.after(batch)
        await self.move_earlier(standing.wake_ms(wants_mail=self._wants_mail(standing)))
        self._is_in_doubt = True
        started = perf_counter()
        await self._inner.batch(batch)
        self._written(batch, standing, started)

    def batch_nowait(self, batch: Batch) -> bool:
        """The same without waiting, where the row need not move first."""
        batch_nowait = self._batch_nowait
        if self._activation is None or batch_nowait is None:
            return False
        standing = self._standing.after(batch)
        wake_ms = standing.wake_ms(wants_mail=self._wants_mail(standing))
        if _order(wake_ms) < _order(self.row.next_wake_ms):
            return False
        self._is_in_doubt = True
        started = perf_counter()
        if batch_nowait(batch):
            self._written(batch, standing, started)
            return True
        self._is_in_doubt = False
        return False

    def _tell_made(self, state: str) -> None:
        """The workflow was made, and perhaps begun with that."""
        tell, row = self._keeper.events.tell, self.row
        tell(row.workflow_id, row.workflow_type, None, row.state)
        if state != row.state:
            tell(row.workflow_id, row.workflow_type, row.state, state)

    def _written(self, batch: Batch, standing: _Standing, started: float) -> None:
        self._keeper.meter.note(started)
        old = self._standing.state
        if old != standing.state:
            self._keeper.events.tell(self.row.workflow_id, self.row.workflow_type, old, standing.state)
        if self.when_sound is not None and layout.IDLE_ACTIVATIONS_KEY in batch.deletes:
            self.when_sound()
        self._is_in_doubt = False
        self.has_written = True
        had_duties, self._standing = self._standing.has_duties, standing
        self._move_later()
        if standing.has_duties and not had_duties and not self.is_terminal and self.when_duties is not None:
            self.when_duties()

    def note_reindexed(self) -> None:
        """The catalog was read again, and its row may be earlier than `row`: it is written with the next move to later.

        Mail that a workflow does not wait for makes such a row say "at once". While the workflow is live, that is harmless; once
        it has left memory, rows of which that was said before are not looked for. It is not written here, where an earlier
        row may just be on its way.
        """
        self._is_reindexed = True

    def settle(self) -> None:
        """The actor leaves memory: the row says what it is to be woken for; as early as before if that is not known."""
        if not self._is_in_doubt:
            self._move_later()

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
