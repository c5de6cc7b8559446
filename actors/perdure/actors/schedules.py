"""Running schedules: waiting for what is next, deciding, starting, and noting what has ended.

1. An occurrence runs exactly once. First the decision is made durable, with the cursor moved past the occurrence; then the
   workflow is started, idempotently, by an id that follows from the occurrence; then it is noted that it was. Killed in
   between, the next life starts what was decided and not noted.
2. A run that was decided and is not noted as started may not be deleted (`is_starting`): it would be started again.
3. One task waits, for the earliest next occurrence of all. What is read from disk is kept, but for the inputs.
4. In memory is what is durable, and nothing else: a change is made there once its batch is written. When that is not known,
   all is read again.
5. A schedule that cannot run here (its workflow is not registered, its zone unknown) stands still; when it can again,
   what it missed is handled as its `misfire` says.

Rejected: starting first and moving the cursor after. A run that ended and was deleted before that would run again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Final, Protocol

import trio

from perdure.actors import schedule_rules as rules
from perdure.actors.errors import ScheduleNotFoundError, SupervisorClosedError, WorkflowExistsError
from perdure.actors.own_namespace import OwnNamespace
from perdure.actors.recurrence import moment_text
from perdure.actors.sameness import is_same_value
from perdure.actors.schedule_record import (
    Change,
    Cursor,
    Definition,
    Run,
    RunStatus,
    Standing,
    decode_cursor,
    decode_definition,
    decode_run,
    put_change,
    put_definition,
    put_removal,
)
from perdure.storage import Batch, CorruptStoreError, DecodeError, StorageError
from perdure.storage.attributes import encode_attributes
from perdure.storage.own_layout import (
    SCHEDULE_CURSOR_PREFIX,
    SCHEDULE_DEFINITION_PREFIX,
    SCHEDULE_RUN_PREFIX,
    parse_schedule_key,
    parse_schedule_run_key,
    schedule_input_key,
)
from perdure.workflow import Clock
from perdure.workflow.birth import Birth

__all__ = ["ScheduleHost", "Schedules"]

_AT_ONCE: Final = 8
_BATCH_MAX: Final = 64
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0

_log = logging.getLogger("perdure.actors")


class ScheduleHost(Protocol):
    """What schedules need of the supervisor."""

    def check_open(self) -> None:
        """Raise `SupervisorClosedError` when the supervisor is leaving its block."""
        ...

    def refuse_unregistered(self, workflow: str) -> None:
        """Raise the error for a workflow that is not registered; return for one that is."""
        ...

    async def start_run(self, workflow: str, workflow_id: str, input_data: bytes, birth: Birth) -> None:
        """See that a workflow exists, durably, with this stored input."""
        ...

    async def has_ended(self, workflow_id: str) -> bool:
        """Whether a workflow has ended, or was deleted."""
        ...


class Schedules:
    """All schedules of a supervisor."""

    def __init__(self, own: OwnNamespace, clock: Clock, host: ScheduleHost) -> None:
        self._own = own
        self._clock = clock
        self._host = host
        self._standings: dict[str, Standing] = {}
        self._generation: int | None = None
        self._is_lost = False
        self._lock = trio.Lock()
        self._heap: list[tuple[int, str]] = []
        self._armed: dict[str, int] = {}
        self._waiting = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._starters: set[str] = set()
        self._limiter = trio.CapacityLimiter(_AT_ONCE)
        self._runs: dict[str, set[tuple[str, int]]] = {}  # by id; schedules with one template may share a run
        self._started: list[tuple[str, int]] = []
        self._ended: set[str] = set()
        self._has_ended = trio.Event()
        self._unverified: dict[str, set[int]] = {}

    # For whoever looks at schedules or changes them.

    async def standing(self, name: str) -> Standing:
        """A schedule as it is.

        Raises:
            ScheduleNotFoundError: There is none.
        """
        async with self._current():
            self._host.check_open()
            await self._drop_ended(self._found(name))
            return self._found(name)

    async def standings(self) -> list[Standing]:
        """All schedules, by name."""
        async with self._current():
            self._host.check_open()
            for standing in list(self._standings.values()):
                await self._drop_ended(standing)
            return [self._standings[name] for name in sorted(self._standings)]

    async def put(self, name: str, definition: Definition, input_data: bytes) -> None:
        """Make a schedule, or make an existing one do this; durable on return."""
        async with self._current():
            self._host.check_open()
            now_ms = self._clock.now_ms()
            existing = self._standings.get(name)
            if existing is None:
                assert definition.recurrence is not None, "a new definition was checked"
                standing = Standing(name, definition, Cursor(definition.recurrence.next_after(now_ms)))
                change = Change(standing.cursor)
            else:
                definition = definition.going_on_from(existing.definition)
                is_same = existing.problem is None and definition.is_same(existing.definition)
                if is_same and await self._has_input(name, input_data):
                    return
                change = rules.redefine(existing, definition, now_ms)
                standing = Standing(name, definition, existing.cursor, dict(existing.runs))
            batch = Batch()
            put_definition(batch, name, definition, input_data)
            put_change(batch, name, change)
            with trio.CancelScope(shield=True):
                await self._own.batch(batch)
            change.apply(standing)
            self._standings[name] = standing
            self._follow(standing)

    async def _has_input(self, name: str, input_data: bytes) -> bool:
        stored = await self._own.get(schedule_input_key(name))
        return stored is not None and is_same_value(stored, input_data)

    async def change(self, name: str, decide: Callable[[Standing], Change]) -> None:
        """Change a schedule; durable on return.

        Raises:
            ScheduleNotFoundError: There is none.
        """
        async with self._current():
            self._host.check_open()
            standing = self._found(name)
            await self._commit([(standing, decide(standing))])

    async def remove(self, name: str) -> None:
        """Remove a schedule, and what it has queued; runs that began go on. Durable on return.

        Raises:
            ScheduleNotFoundError: There is none.
        """
        async with self._current():
            self._host.check_open()
            standing = self._found(name)
            batch = Batch()
            put_removal(batch, name)
            with trio.CancelScope(shield=True):
                await self._own.batch(batch)
            del self._standings[name]
            self._unverified.pop(name, None)
            self._armed.pop(name, None)
            for occurrence_ms, run in standing.runs.items():
                self._forget(run.workflow_id, name, occurrence_ms)

    def is_starting(self, workflow_id: str) -> bool:
        """Whether this is a run that was decided and is not durably noted as started: it may not be deleted."""
        if self._generation is None:
            return not self._is_lost  # not known yet
        return any(run.status is RunStatus.STARTING for _, _, run in self._runs_of(workflow_id))

    def note_ended(self, workflow_id: str) -> None:
        """A workflow has ended, or was deleted; harmless for one that is no run of a schedule."""
        if workflow_id in self._runs:
            self._ended.add(workflow_id)
            self._has_ended.set()

    # The tasks.

    async def open(self) -> None:
        """Read what is stored, if that can be read; else `run` goes on trying."""
        try:
            async with self._current():
                pass
        except StorageError as error:
            self._is_lost = isinstance(error, CorruptStoreError)
            _log.error("schedules cannot be read, and none is run: %s", error)

    @trio.lowlevel.enable_ki_protection
    async def run(self, nursery: trio.Nursery) -> None:
        """Start what is due, for ever, in the nursery."""
        self._nursery = nursery
        for standing in self._standings.values():
            self._start_runs_of(standing)
        nursery.start_soon(self._note_ends)
        nursery.start_soon(self._verify)
        pause_s = _PAUSE_S
        while True:
            try:
                await self._advance()
                pause_s = _PAUSE_S
                await self._until_next()
            except SupervisorClosedError:
                return
            except StorageError as error:
                _log.warning("schedules cannot be read or written, and wait %g seconds: %s", pause_s, error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _until_next(self) -> None:
        with trio.CancelScope() as self._waiting:
            if self._generation != self._own.generation:
                return
            if self._heap:
                await self._clock.wait_until_ms(self._heap[0][0])
            else:
                await trio.sleep_forever()

    async def _advance(self) -> None:
        """Decide on everything that is due."""
        while True:
            async with self._current():
                now_ms = self._clock.now_ms()
                due = self._pop_due(now_ms)
                if not due:
                    return
                try:
                    self._host.check_open()
                    for standing in due:
                        await self._drop_ended(standing)
                    await self._commit([(standing, rules.advance(standing, now_ms)) for standing in due])
                except BaseException:
                    for standing in due:
                        self._follow(standing)
                    raise

    def _pop_due(self, now_ms: int) -> list[Standing]:
        due: list[Standing] = []
        while self._heap and self._heap[0][0] <= now_ms and len(due) < _BATCH_MAX:
            next_ms, name = heappop(self._heap)
            if self._armed.get(name) != next_ms:
                continue  # it was moved since
            del self._armed[name]
            standing = self._standings[name]
            if _is_running(standing):
                due.append(standing)
        return due

    @trio.lowlevel.enable_ki_protection
    async def _note_ends(self) -> None:
        pause_s = _PAUSE_S
        while True:
            await self._has_ended.wait()
            self._has_ended = trio.Event()
            try:
                async with self._current():
                    await self._take_ended()
                pause_s = _PAUSE_S
            except SupervisorClosedError:
                return
            except StorageError as error:
                _log.warning("a schedule's runs that ended cannot be noted for %g seconds: %s", pause_s, error)
                self._has_ended.set()
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _take_ended(self) -> None:
        """Note the ends of runs whose beginning is noted; the others' are when that is."""
        ends: dict[str, list[int]] = {}
        waiting: set[str] = set()
        taken = set(self._ended)
        for workflow_id in taken:
            for name, occurrence_ms, run in self._runs_of(workflow_id):
                if run.status is RunStatus.ACTIVE:
                    ends.setdefault(name, []).append(occurrence_ms)
                else:
                    waiting.add(workflow_id)
        standings = self._standings
        await self._commit([(standings[name], rules.ended(standings[name], *ended)) for name, ended in ends.items()])
        self._ended -= taken - waiting

    @trio.lowlevel.enable_ki_protection
    async def _verify(self) -> None:
        """Find out which runs ended while nobody looked."""
        for name in list(self._unverified):
            try:
                async with self._current():
                    if name in self._standings:
                        await self._drop_ended(self._standings[name])
            except SupervisorClosedError:
                return
            except StorageError as error:
                _log.warning(
                    "whether runs of schedule %r have ended is not known yet: %s", name, error, extra={"schedule": name}
                )

    # Starting.

    def _start_runs_of(self, standing: Standing) -> None:
        if (
            self._nursery is not None
            and standing.problem is None
            and standing.name not in self._starters
            and _next_start(standing) is not None
        ):
            self._starters.add(standing.name)
            self._nursery.start_soon(self._start_runs, standing.name)

    @trio.lowlevel.enable_ki_protection
    async def _start_runs(self, name: str) -> None:
        """Start the runs of one schedule, one after the other, until none is to be."""
        pause_s = _PAUSE_S
        try:
            while (standing := self._standings.get(name)) is not None:
                occurrence_ms = _next_start(standing)
                if occurrence_ms is None or standing.problem is not None:
                    return
                try:
                    async with self._limiter:
                        await self._start(standing, occurrence_ms)
                    await self._note_started(name, occurrence_ms)
                    pause_s = _PAUSE_S
                except SupervisorClosedError:
                    return
                except DecodeError as error:
                    self._stop(standing, error)
                except StorageError as error:
                    _log.warning(
                        "schedule %r waits %g seconds to start a run: %s",
                        name,
                        pause_s,
                        error,
                        extra={"schedule": name},
                    )
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MAX_S)
                except Exception as error:
                    self._stop(standing, error)
        finally:
            self._starters.discard(name)

    def _stop(self, standing: Standing, error: Exception) -> None:
        """Let a schedule stand still that cannot run until its code or its definition is another."""
        standing.problem = str(error)
        _log.error(
            "schedule %r cannot start a run, and stands still: %s",
            standing.name,
            error,
            extra={"schedule": standing.name},
        )

    async def _start(self, standing: Standing, occurrence_ms: int) -> None:
        run = standing.runs[occurrence_ms]
        input_data = await self._own.get(schedule_input_key(standing.name))
        if input_data is None:  # it was removed
            return
        attributes = {"schedule": standing.name, "scheduled_at": moment_text(occurrence_ms)}
        try:
            await self._host.start_run(
                standing.definition.workflow,
                run.workflow_id,
                input_data,
                Birth(attributes=encode_attributes(attributes)),
            )
        except WorkflowExistsError as error:
            # Started before the schedule was given another definition, or by somebody else under this id.
            _log.warning(
                "schedule %r takes workflow %r for its run: %s",
                standing.name,
                run.workflow_id,
                error,
                extra={"schedule": standing.name, "workflow_id": run.workflow_id},
            )

    async def _note_started(self, name: str, occurrence_ms: int) -> None:
        """Make it durable that a run was started, along with others that were meanwhile."""
        item = (name, occurrence_ms)
        self._started.append(item)
        async with self._current():
            if item not in self._started:
                return  # whoever was here before took it along
            items, self._started = self._started, []
            changes = [
                (standing, rules.started(standing, occurrence))
                for other, occurrence in items
                if (standing := self._standings.get(other)) is not None
            ]
            await self._commit(changes)
            if self._ended:
                self._has_ended.set()

    # State. The caller holds the lock.

    def _current(self) -> _Current:
        return _Current(self._lock, self._read)

    async def _read(self) -> None:
        """Read everything, unless what is in memory is what is stored."""
        generation = self._own.generation
        if self._generation == generation:
            return
        standings: dict[str, Standing] = {}
        for key, value in await self._own.list(SCHEDULE_DEFINITION_PREFIX):
            with _left_alone("a schedule"):
                definition, problem = decode_definition(value)
                name = parse_schedule_key(key)
                reason = self._problem_of(definition.workflow) if problem is None else str(problem)
                standings[name] = Standing(name, definition, Cursor(None), problem=reason)
        for key, value in await self._own.list(SCHEDULE_CURSOR_PREFIX):
            with _left_alone("how far a schedule has got"):
                if (standing := standings.get(parse_schedule_key(key))) is not None:
                    standing.cursor = decode_cursor(value)
        for key, value in await self._own.list(SCHEDULE_RUN_PREFIX):
            with _left_alone("a schedule's run"):
                name, occurrence_ms = parse_schedule_run_key(key)
                if (standing := standings.get(name)) is not None:
                    standing.runs[occurrence_ms] = decode_run(value)
        self._generation = generation
        self._standings = standings
        self._started = []
        self._runs = {}
        for name, standing in standings.items():
            for occurrence_ms, run in standing.runs.items():
                self._runs.setdefault(run.workflow_id, set()).add((name, occurrence_ms))
        self._heap = []
        self._armed = {}
        self._unverified = {
            name: {key for key, run in standing.runs.items() if run.status is RunStatus.ACTIVE}
            for name, standing in standings.items()
            if standing.runs
        }
        for standing in standings.values():
            if standing.problem is not None:
                _log.warning(
                    "schedule %r stands still: %s", standing.name, standing.problem, extra={"schedule": standing.name}
                )
            self._follow(standing)

    def _problem_of(self, workflow: str) -> str | None:
        try:
            self._host.refuse_unregistered(workflow)
        except Exception as error:
            return str(error)
        return None

    def _found(self, name: str) -> Standing:
        standing = self._standings.get(name)
        if standing is None:
            raise ScheduleNotFoundError(
                f"there is no schedule {name!r}; make it with supervisor.schedule({name!r}, workflow, input, every=3600.0)",
                name=name,
            )
        return standing

    async def _drop_ended(self, standing: Standing) -> None:
        """Note the ends of its runs that ended while nobody looked, or a moment ago."""
        unverified = self._unverified.get(standing.name, set[int]())
        for occurrence_ms in sorted(unverified):
            run = standing.runs.get(occurrence_ms)
            if run is not None and await self._host.has_ended(run.workflow_id):
                self._ended.add(run.workflow_id)
            unverified.discard(occurrence_ms)
        ended = [
            occurrence_ms
            for occurrence_ms, run in standing.runs.items()
            if run.workflow_id in self._ended and run.status is RunStatus.ACTIVE
        ]
        await self._commit([(standing, rules.ended(standing, *ended))])
        if ended:
            self._has_ended.set()  # other schedules may have the same runs; then it is forgotten that these have ended

    def _runs_of(self, workflow_id: str) -> Iterator[tuple[str, int, Run]]:
        """For which schedules and occurrences a workflow is the run."""
        for name, occurrence_ms in self._runs.get(workflow_id, ()):
            standing = self._standings.get(name)
            run = None if standing is None else standing.runs.get(occurrence_ms)
            if run is not None:
                yield name, occurrence_ms, run

    def _forget(self, workflow_id: str, name: str, occurrence_ms: int) -> None:
        known = self._runs.get(workflow_id)
        if known is not None:
            known.discard((name, occurrence_ms))
            if not known:
                del self._runs[workflow_id]

    async def _commit(self, changes: Iterable[tuple[Standing, Change]]) -> None:
        """Write changes in one batch, then make them."""
        wanted = [(standing, change) for standing, change in changes if change]
        if not wanted:
            return
        batch = Batch()
        for standing, change in wanted:
            put_change(batch, standing.name, change)
        with trio.CancelScope(shield=True):
            await self._own.batch(batch)
        for standing, change in wanted:
            if change.dropped:
                _log.info(
                    "schedule %r left out %d: an earlier run has not ended",
                    standing.name,
                    change.dropped,
                    extra={"schedule": standing.name},
                )
            for occurrence_ms in change.removes:
                run = standing.runs.get(occurrence_ms)
                if run is not None:
                    self._forget(run.workflow_id, standing.name, occurrence_ms)
            for occurrence_ms, run in change.puts.items():
                self._runs.setdefault(run.workflow_id, set()).add((standing.name, occurrence_ms))
            change.apply(standing)
            self._follow(standing)

    def _follow(self, standing: Standing) -> None:
        """See that what a schedule wants next is done."""
        next_ms = standing.cursor.next_ms
        if next_ms is None or not _is_running(standing):
            self._armed.pop(standing.name, None)
        elif self._armed.get(standing.name) != next_ms:
            self._armed[standing.name] = next_ms
            heappush(self._heap, (next_ms, standing.name))
            if self._heap[0] == (next_ms, standing.name):
                self._waiting.cancel()
        self._start_runs_of(standing)


class _Current:
    """Holds the lock, with what is in memory being what is stored."""

    def __init__(self, lock: trio.Lock, read: Callable[[], Awaitable[None]]) -> None:
        self._lock = lock
        self._read = read

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            await self._read()
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def _left_alone(what: str) -> Generator[None]:
    """Go on without what cannot be read."""
    try:
        yield
    except DecodeError as error:
        _log.error("%s cannot be read, and is left alone: %s", what, error)


def _is_running(standing: Standing) -> bool:
    return standing.problem is None and not standing.cursor.is_paused


def _next_start(standing: Standing) -> int | None:
    """The earliest run that is to be started."""
    return next((key for key, run in standing.runs.items() if run.status is RunStatus.STARTING), None)
