"""Letting workflows of limited types begin: the first to be made first, and no more than may.

1. Who waits is in the catalog, not here: a row in state `pending`, due. It is read a page at a time, in the order of creation,
   so a hundred thousand that wait cost what a hundred do.
2. Before a workflow runs its row says that it has begun (`CatalogedDriver.note_begun`), which outlives the process; so at a
   start the catalog knows how many are at work. A beginning is recorded durably before it is allowed. Killed in between, a
   rate is not used up; it is never exceeded.
3. What has begun is never held, nor what `recover()` takes up again: it counts, and others wait the longer.
4. One whose file cannot be used holds no place. One that is stuck for another reason does: it may go on at any message.
5. One that waits fails at its deadline all the same; that runs none of its code, and takes no turn and no rate. The catalog
   does not know deadlines: those that earlier processes made are opened once, one after the other, to learn theirs. In memory
   are the deadlines of those that have one.
6. Whoever turns out to wait though its row was passed is looked at alone. Only if there are very many such at a time the
   catalog is read again from the first of them; so neither memory nor work grows faster than what arrives.
7. Types know nothing of each other. Those that are let begin queue for a place to run in like everybody else (`dispatch.py`).

Rejected: a queue in memory, or a queue of its own on disk. The one grows with what waits; the other is a second truth about
it, to be mended after each crash.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from perdure.actors.catalog import CatalogKeeper
from perdure.actors.limits import Beginnings, WorkflowLimit
from perdure.actors.own_namespace import OwnNamespace
from perdure.storage import Batch, CatalogRow, DecodeError, StorageError, Store, layout
from perdure.storage.own_layout import RATE_PREFIX, parse_rate_key, rate_key, rates_prefix
from perdure.storage.wake import TERMINAL_STATES
from perdure.workflow import Clock, WorkflowState
from perdure.workflow.clock import POLL_S

__all__ = ["Admission"]

_PAGE: Final = 64
_PASSED_MAX: Final = 1024
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0
_PENDING: Final = WorkflowState.PENDING.value
_AT_WORK: Final = tuple(
    state.value for state in (WorkflowState.RUNNING, WorkflowState.SLEEPING, WorkflowState.ROLLING_BACK)
)

_log = logging.getLogger("perdure.actors")


class _Queue:
    """The workflows of one limited type.

    Attributes:
        at_work: Those that have begun and not ended; without a limit of these, those that were let begin and do not yet.
        is_known: Whether what earlier processes let begin is known.
        gone: Those that have ended while that was not known, and of which the catalog may not know it.
        beginnings: The recent ones, if there is a rate limit.
        cursor: Creation time and id of the last row that was looked at: none up to it waits, but for those in `passed`.
        has_rows: Whether there may be rows after the cursor that wait.
        passed: Creation times and ids, ascending, of those up to the cursor that came to wait, at most `_PASSED_MAX`.
        arrived: Those that came to wait while a look goes on, and the cursor is about to move.
    """

    def __init__(self, workflow_type: str, limit: WorkflowLimit) -> None:
        self.workflow_type = workflow_type
        self.limit = limit
        self.at_work: set[str] = set()
        self.is_known = False
        self.gone: set[str] = set()
        self.beginnings: Beginnings | None = None
        self.cursor: tuple[int, str] | None = None
        self.has_rows = True
        self.passed: list[tuple[int, str]] = []
        self.arrived: list[tuple[int, str]] | None = None
        self.changed = trio.Event()
        self.waiting = trio.CancelScope()

    @property
    def has_waiting(self) -> bool:
        """Whether there may be workflows that wait."""
        return self.has_rows or bool(self.passed) or bool(self.arrived)

    def poke(self) -> None:
        """Look again at who may begin."""
        self.changed.set()
        self.waiting.cancel()

    def arrive(self, created_at_ms: int, workflow_id: str) -> None:
        """One waits that may not have been there, or not been due, when its row was passed."""
        self._arrive((created_at_ms, workflow_id))
        self.poke()

    def _arrive(self, key: tuple[int, str]) -> None:
        if self.arrived is not None:
            if len(self.arrived) <= _PASSED_MAX:
                self.arrived.append(key)
            else:  # too many to remember: the least one stands for all
                self.arrived[0] = min(self.arrived[0], key)
        elif self.cursor is None or key > self.cursor:
            self.has_rows = True
        elif len(self.passed) < _PASSED_MAX:
            if (index := bisect_left(self.passed, key)) == len(self.passed) or self.passed[index] != key:
                self.passed.insert(index, key)
        else:
            self.look_from(min(key, self.passed[0]))

    def look_from(self, key: tuple[int, str] | None) -> None:
        """Look again at this row, or at the first one, and all after it."""
        self.cursor = None if key is None else (key[0], "")
        self.has_rows = True
        self.passed = [each for each in self.passed if self.cursor is not None and each <= self.cursor]

    def begin_look(self) -> None:
        """Whoever arrives from now on is kept until it is known how far the look came."""
        self.arrived = []

    def end_look(self) -> None:
        """Sort in whoever arrived meanwhile."""
        arrived, self.arrived = self.arrived or [], None
        if len(arrived) > _PASSED_MAX:
            first = min(arrived)
            if self.cursor is None or first <= self.cursor:
                self.look_from(first)
            self.has_rows = True
        else:
            for key in arrived:
                self._arrive(key)

    def free(self, now_ms: int) -> int:
        """How many may begin now."""
        concurrency = self.limit.concurrency
        count = _PAGE if concurrency is None else concurrency - len(self.at_work)
        return max(0, count if self.beginnings is None else min(count, self.beginnings.free(now_ms)))


class Admission:
    """Who of the limited types may begin.

    Args:
        limits: The limits, by type.
        allow: Called with the id of a workflow that may begin: it is activated as soon as there is a place.
        visit: Called with the id of a workflow that waits, to bring it in for a visit: as it leaves, its deadline is noted.
    """

    def __init__(
        self,
        limits: Mapping[str, WorkflowLimit],
        store: Store,
        keeper: CatalogKeeper,
        own: OwnNamespace,
        clock: Clock,
        allow: Callable[[str], None],
        visit: Callable[[str], Awaitable[None]],
    ) -> None:
        self._queues = {workflow_type: _Queue(workflow_type, limit) for workflow_type, limit in limits.items()}
        self._store = store
        self._keeper = keeper
        self._own = own
        self._clock = clock
        self._allow = allow
        self._visit = visit
        self._began_ms = clock.now_ms()
        self._unvisited: deque[str] = deque()
        self._has_unvisited = trio.Event()

    def is_limited(self, workflow_type: str) -> bool:
        """Whether the type has a limit."""
        return workflow_type in self._queues

    def holds(self, row: CatalogRow, state: str) -> bool:
        """Whether a workflow that is about to run has to wait; if not, it is at work from now on.

        Args:
            row: Its row, which may know more than the workflow itself: that it was let begin.
            state: Its state, which the row may not know yet.
        """
        queue = self._queues.get(row.workflow_type)
        if queue is None or row.workflow_id in queue.at_work or state in TERMINAL_STATES:
            return False
        has_begun = state != _PENDING or row.state != _PENDING
        if not has_begun and not self._may_begin_at_once(queue):
            queue.arrive(row.created_at_ms, row.workflow_id)
            return True
        queue.at_work.add(row.workflow_id)
        queue.gone.discard(row.workflow_id)
        return False

    def note_begun(self, row: CatalogRow) -> None:
        """A workflow's row says that it has begun."""
        queue = self._queues.get(row.workflow_type)
        if queue is not None and queue.limit.concurrency is None:
            queue.at_work.discard(row.workflow_id)  # its row is enough to know that it need not wait

    def _may_begin_at_once(self, queue: _Queue) -> bool:
        """Whether nobody waits, there is a place, and nothing has to be written first."""
        return (
            queue.is_known
            and not queue.has_waiting
            and queue.beginnings is None
            and queue.free(self._clock.now_ms()) > 0
        )

    def holds_row(self, row: CatalogRow) -> bool:
        """Whether a workflow that the catalog says is due has to wait, as far as the catalog knows."""
        queue = self._queues.get(row.workflow_type)
        if queue is None or row.state != _PENDING or row.workflow_id in queue.at_work:
            return False
        queue.arrive(row.created_at_ms, row.workflow_id)
        if (row.next_wake_ms or 0) > self._began_ms:  # else `_visit_waiting` comes to it
            self._unvisited.append(row.workflow_id)
            self._has_unvisited.set()
        return True

    def keeps(self, row: CatalogRow) -> bool:
        """Whether a workflow that leaves memory, not begun, is due and waits here."""
        queue = self._queues.get(row.workflow_type)
        if queue is None or row.workflow_id in queue.at_work or not _is_waiting(row, self._clock.now_ms()):
            return False
        queue.arrive(row.created_at_ms, row.workflow_id)
        return True

    def note_gone(self, workflow_id: str) -> None:
        """A workflow has ended, is gone, cannot be activated, or turned out not to be due: it gives its place back."""
        for queue in self._queues.values():
            if not queue.is_known:
                queue.gone.add(workflow_id)
            if workflow_id in queue.at_work:
                queue.at_work.discard(workflow_id)
                queue.poke()

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to let workflows begin, in the nursery."""
        nursery.start_soon(self._tidy)
        if self._queues:
            nursery.start_soon(self._learn_deadlines)
        for queue in self._queues.values():
            nursery.start_soon(self._run, queue)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, queue: _Queue) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                if not queue.is_known:
                    await self._learn(queue)
                if queue.beginnings is None and queue.limit.rate is not None:
                    await self._learn_beginnings(queue, queue.limit.rate)
                await self._admit(queue)
                pause_s = _PAUSE_S
            except StorageError as error:
                _log.warning("workflows %r wait %g seconds for the catalog: %s", queue.workflow_type, pause_s, error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _learn(self, queue: _Queue) -> None:
        """Read what is at work; those that have ended since this process began may still be listed as if they were."""
        if queue.limit.concurrency is not None:
            await self._keeper.flush()
            after: tuple[int, str] | None = None
            while True:
                rows = await self._store.list_rows(
                    state=_AT_WORK, workflow_type=queue.workflow_type, after=after, limit=_PAGE
                )
                queue.at_work.update(
                    row.workflow_id for row in rows if row.problem is None and row.workflow_id not in queue.gone
                )
                if len(rows) < _PAGE:
                    break
                after = _key(rows[-1])
        queue.is_known = True
        queue.gone = set()

    async def _learn_beginnings(self, queue: _Queue, rate: int) -> None:
        """Read when the latest began."""
        stored: list[tuple[int, int]] = []
        for key, value in await self._own.list(rates_prefix(queue.workflow_type)):
            try:
                began_ms = layout.decode_u64(value)
            except DecodeError as error:
                # As if it had begun now: the limit is kept, and no workflow is held back for longer than its span.
                began_ms = self._clock.now_ms()
                _log.error("when one of type %r began cannot be read; it counts as now: %s", queue.workflow_type, error)
            stored.append((parse_rate_key(key)[1], began_ms))
        queue.beginnings = Beginnings(rate, queue.limit.per_ms, stored)

    async def _admit(self, queue: _Queue) -> None:
        """Let begin who may, then wait until that may be another."""
        queue.changed = trio.Event()
        now_ms = self._clock.now_ms()
        count = queue.free(now_ms)
        chosen = await self._next(queue, count, now_ms) if count and queue.has_waiting else []
        if chosen:
            await self._record(queue, len(chosen), now_ms)
            queue.at_work.update(chosen)
            for workflow_id in chosen:
                self._allow(workflow_id)
        elif queue.has_waiting and queue.beginnings is not None and queue.beginnings.free(now_ms) == 0:
            next_ms = queue.beginnings.next_ms(now_ms)
            # Looks again now and then: the wall clock may be set back meanwhile.
            with trio.move_on_after(min((next_ms - now_ms) / 1000, POLL_S)) as queue.waiting:
                await self._clock.wait_until_ms(next_ms)
        else:
            await queue.changed.wait()

    async def _next(self, queue: _Queue, count: int, now_ms: int) -> list[str]:
        """The next that wait and are due, at most so many."""
        chosen: list[str] = []
        queue.begin_look()
        try:
            while queue.passed and len(chosen) < count:
                workflow_id = queue.passed[0][1]
                if workflow_id not in queue.at_work and await self._is_waiting(workflow_id, now_ms):
                    chosen.append(workflow_id)
                del queue.passed[0]
            if queue.has_rows and len(chosen) < count:
                await self._look_on(queue, chosen, count, now_ms)
        except BaseException:
            queue.look_from(None)  # those that were chosen wait still
            raise
        finally:
            queue.end_look()
        if not chosen and queue.has_waiting:
            queue.changed.set()  # a page of those that are not due yet: look at the next one
        return chosen

    async def _look_on(self, queue: _Queue, chosen: list[str], count: int, now_ms: int) -> None:
        """Choose among the next page of rows."""
        rows = await self._store.list_rows(
            state=_PENDING, workflow_type=queue.workflow_type, after=queue.cursor, limit=_PAGE
        )
        for row in rows:
            if len(chosen) == count:
                return
            queue.cursor = _key(row)
            if (
                row.workflow_id not in queue.at_work
                and _is_due(row, now_ms)
                and await self._is_waiting(row.workflow_id, now_ms)
            ):
                chosen.append(row.workflow_id)
        queue.has_rows = len(rows) == _PAGE

    async def _is_waiting(self, workflow_id: str, now_ms: int) -> bool:
        newest = await self._keeper.get(workflow_id)  # what is not written yet included
        return newest is not None and _is_waiting(newest, now_ms)

    async def _record(self, queue: _Queue, count: int, now_ms: int) -> None:
        """Make it durable that so many begin."""
        beginnings = queue.beginnings
        if beginnings is None:
            return
        kept = beginnings.expired(now_ms)
        numbers = range(beginnings.next_number, beginnings.next_number + count)
        time = layout.encode_u64(now_ms)
        batch = Batch(puts=[(rate_key(queue.workflow_type, number), time) for number in numbers])
        batch.delete_ranges.append((rate_key(queue.workflow_type, 0), rate_key(queue.workflow_type, kept)))
        try:
            await self._own.batch(batch)
        except BaseException:
            queue.beginnings = None  # it may be written: read them again
            queue.look_from(None)  # and those that were about to begin wait still
            raise
        beginnings.add(count, now_ms)
        beginnings.forget_before(kept)

    @trio.lowlevel.enable_ki_protection
    async def _learn_deadlines(self) -> None:
        """Visit those that wait and were made by earlier processes, then, for ever, those whose start has come."""
        for workflow_type in self._queues:
            await self._visit_waiting(workflow_type)
        while True:
            while self._unvisited:
                workflow_id = self._unvisited.popleft()
                if not any(workflow_id in queue.at_work for queue in self._queues.values()):
                    await self._visit_calmly(workflow_id)
            self._has_unvisited = trio.Event()
            await self._has_unvisited.wait()

    async def _visit_waiting(self, workflow_type: str) -> None:
        after: tuple[int, str] | None = None
        pause_s = _PAUSE_S
        while True:
            try:
                rows = await self._store.list_rows(
                    state=_PENDING,
                    workflow_type=workflow_type,
                    created_before_ms=self._began_ms + 1,
                    after=after,
                    limit=_PAGE,
                )
            except StorageError as error:
                _log.warning("the catalog fails, so deadlines of %r wait %g seconds: %s", workflow_type, pause_s, error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
                continue
            for row in rows:
                if _is_due(row, self._began_ms):
                    await self._visit_calmly(row.workflow_id)
            if len(rows) < _PAGE:
                return
            after = _key(rows[-1])

    async def _visit_calmly(self, workflow_id: str) -> None:
        try:
            await self._visit(workflow_id)
        except Exception as error:  # it is told to whoever asks for that workflow, and again at its turn
            _log.debug(
                "the deadline of workflow %r could not be read: %s",
                workflow_id,
                error,
                extra={"workflow_id": workflow_id},
            )

    @trio.lowlevel.enable_ki_protection
    async def _tidy(self) -> None:
        """Forget the beginnings of types that have no rate limit any more."""
        try:
            stored = {parse_rate_key(key)[0] for key, _ in await self._own.list(RATE_PREFIX)}
            gone = sorted(stored - {name for name, queue in self._queues.items() if queue.limit.rate is not None})
            if gone:
                await self._own.batch(Batch(delete_prefixes=[rates_prefix(workflow_type) for workflow_type in gone]))
        except StorageError as error:
            _log.warning("what is kept of rate limits that are no more could not be removed: %s", error)


def _is_due(row: CatalogRow, now_ms: int) -> bool:
    return row.problem is None and row.next_wake_ms is not None and row.next_wake_ms <= now_ms


def _is_waiting(row: CatalogRow, now_ms: int) -> bool:
    return row.state == _PENDING and _is_due(row, now_ms)


def _key(row: CatalogRow) -> tuple[int, str]:
    return row.created_at_ms, row.workflow_id
