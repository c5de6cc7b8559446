"""The supervisor: hosts workflows as actors, one activation each, and brings them back when they are due.

1. Its directory has one owner: the store's lock is held for as long as the block runs.
2. The block that owns the supervisor ends in order: intake stops, running steps may finish for `grace` seconds, the rest is
   evicted, everything is committed and closed, the lock is released. What the block raised comes out as it was, not in
   the group that a nursery would make of it.
3. The supervisor speaks to a `Store`; it knows no files.
4. What is in memory is in `residents.py`, what brings workflows back in `alarms.py`, the catalog's rule in `catalog.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from datetime import datetime, timedelta
from os import PathLike
from typing import Any, Literal, TypeVar, overload

import trio

from perdure.actors.actor import Actor
from perdure.actors.admission import Admission
from perdure.actors.alarms import AlarmWatch
from perdure.actors.callers import rests_with_host
from perdure.actors.catalog import CatalogKeeper
from perdure.actors.handle import ActorHandle
from perdure.actors.identity import check_same
from perdure.actors.limits import WorkflowLimit
from perdure.actors.options import Options, WorkflowLike, check_options
from perdure.actors.overseer import Overseer
from perdure.actors.own_namespace import OwnNamespace
from perdure.actors.residents import Residents
from perdure.actors.retention import Retention
from perdure.actors.schedule_runs import ScheduleRuns
from perdure.actors.schedules import Schedules
from perdure.actors.scheduling import Scheduling
from perdure.actors.shutdown import Shutdown, outlast
from perdure.actors.signals import Signals, check_signals
from perdure.storage import (
    VALUE_BYTES_MAX,
    CodedStore,
    StorageError,
    Store,
    ValueCodec,
)
from perdure.storage.attributes import encode_attributes
from perdure.workflow import (
    Clock,
    Context,
    Workflow,
    WorkflowHandle,
    definition_of,
)
from perdure.workflow.activation import USER_OVERHEAD_BYTES
from perdure.workflow.birth import Birth
from perdure.workflow.checks import (
    check_duration,
    check_time_ms,
    check_workflow_id,
)
from perdure.workflow.hooks import ErrorHook, HistoryHook, make_hooks
from perdure.workflow.mailbox import MAILBOX_LIMIT
from perdure.workflow.typed import encode_input

__all__ = ["Supervisor", "open_supervisor"]

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

_log = logging.getLogger("perdure.actors")


@asynccontextmanager
async def open_supervisor(
    store: str | PathLike[str] | Store,
    workflows: Iterable[WorkflowLike] = (),
    *,
    durability: Literal["full", "normal"] = "full",
    codec: ValueCodec | None = None,
    grace: float = 10.0,
    idle_timeout: float | None = 60.0,
    max_live: int | None = None,
    mailbox_limit: int = MAILBOX_LIMIT,
    limits: Mapping[WorkflowLike | str, WorkflowLimit] | None = None,
    on_history_updated: HistoryHook | None = None,
    on_error: ErrorHook | None = None,
    clock: Clock | None = None,
    handle_signals: bool = False,
    retention: Mapping[str, float | timedelta] | None = None,
) -> AsyncGenerator[Supervisor]:
    """Host workflows for as long as the block runs.

    On entry the store is locked, and every workflow that was at work or has become due is activated, in the background.
    Leaving the block, however that happens, takes no more work, lets running steps finish for up to `grace` seconds, evicts
    the rest, commits, closes and unlocks. Code that shields itself from cancellation can exceed `grace`.

    Args:
        store: A directory (made if it is missing), or a `Store`.
        workflows: The functions that may run here: `@workflow` objects, or coroutine functions known by their `__name__`.
        durability: `full`: what is acknowledged survives a power cut. `normal`: it survives the death of the process; a power
            cut may lose the last moments, never consistency. Only for a directory; a `Store` has its own.
        codec: Wraps user data at rest (inputs, results, messages, errors), as for encryption. The same, or one that can read what
            it wrote, is needed from then on: without it a workflow is in trouble, with a `ValueCodecError`, and goes on later.
        grace: Seconds, 0 or more.
        idle_timeout: Seconds, 0 or more, after which a workflow that only waits leaves memory; its next message, alarm or wake
            brings it back. `None`: it stays until its place is needed.
        max_live: How many workflows may run at once, at least 1; each holds an open file of two descriptors. Past it, the
            longest idle leave memory, then activations queue. `None`: as many as there are descriptors for (the process's
            limit is raised as far as it may be), and at most 4,096.
        mailbox_limit: How many messages a workflow's mailbox may hold, at least 1, where `@workflow(mailbox_limit=)` does not
            say it. Whoever sends to a full one waits, or gets `MailboxFullError`.
        limits: How many workflows of a type may be at work, and begin in a time, by workflow or by name. What is over a limit
            waits, `pending`, until it is its turn: the first made is the first to begin.
        on_history_updated: Called with a `HistoryUpdated` for each commit that changed a workflow's history or state, after it.
        on_error: Called with a `StepErrorEvent`, `RollbackErrorEvent` or `WorkflowErrorEvent` for each failure, once it is
            durable, and not again on a replay. Either may be a plain function, which is to be quick, or a coroutine
            function, which runs besides, one event after another, and may go on for what is left of `grace` at the end;
            what they raise is logged. A crash before the call loses it.
        clock: Where the time comes from; the system's clock unless given.
        handle_signals: Whether SIGINT and SIGTERM end the block in order, with `SystemExit(128 + signal)` coming out of it;
            a second one ends the grace of running steps, a third the process, at once. Only in the main thread.
        retention: How long workflows are kept once they have ended, in seconds or as a `timedelta`, by `completed`, `failed`
            and `cancelled`; what is not named is kept for ever. They are deleted in the background, a few at a time.

    Raises:
        StoreLockedError: Another process has the directory; `holder_pid` says which.
        FormatVersionError: A newer Perdure wrote it.
        UnsupportedFileSystemError: It lies on a network file system.
        InvalidArgumentError: Two workflows have one name, or an argument is wrong.
    """
    supervisor = Supervisor(
        check_options(
            store,
            workflows,
            durability=durability,
            codec=codec,
            grace=grace,
            idle_timeout=idle_timeout,
            max_live=max_live,
            mailbox_limit=mailbox_limit,
            limits=limits,
            hooks=make_hooks(on_history_updated, on_error),
            clock=clock,
            retention=retention,
        )
    )
    check_signals(handle_signals)
    async with supervisor._hosting(handle_signals=handle_signals):  # pyright: ignore[reportPrivateUsage]
        yield supervisor


class Supervisor(Overseer, Scheduling):
    """Hosts workflows; made by `open_supervisor`."""

    def __init__(self, options: Options) -> None:
        store, definitions, clock = options.store, options.definitions, options.clock
        keeper = CatalogKeeper(store, clock)
        alarms = AlarmWatch(store, keeper, clock)
        residents = Residents(
            store,
            keeper,
            definitions,
            clock,
            max_live=options.max_live,
            lent_max=options.lent_max,
            idle_timeout=options.idle_timeout,
            hooks=options.hooks,
            mailbox_limit=options.mailbox_limit,
            on_dormant=alarms.expect,
            on_interrupt=self._interrupt,
        )
        Overseer.__init__(self, store, keeper, residents, alarms, definitions)
        coding_bytes = store.overhead_bytes if isinstance(store, CodedStore) else 0
        self._own = OwnNamespace(store)
        Scheduling.__init__(
            self,
            Schedules(self._own, clock, ScheduleRuns(residents, keeper, definitions)),
            clock,
            self._registered,
            VALUE_BYTES_MAX - USER_OVERHEAD_BYTES - coding_bytes,
        )
        self._hooks = options.hooks
        self._retention = Retention(options.retention, store, self._removal, clock) if options.retention else None
        self._admission = Admission(
            options.limits, store, self._keeper, self._own, clock, self._residents.want, self._residents.look_at
        )
        self._residents.admission = self._admission if options.limits else None
        self._residents.on_ended = self._note_ended
        self._residents.is_starting = self._schedules.is_starting
        self._shutdown = Shutdown(self._residents, options.hooks, options.grace)
        self._work_scope = trio.CancelScope(shield=True)
        self._has_begun = False
        self._has_ended = trio.Event()
        self._is_closed = trio.Event()
        self._closing_error: Exception | None = None

    @overload
    async def spawn(
        self,
        workflow: Callable[[Context, InputT], Awaitable[OutputT]],
        workflow_id: str,
        input: InputT,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> WorkflowHandle[OutputT]: ...

    @overload
    async def spawn(
        self,
        workflow: Callable[[Context, None], Awaitable[OutputT]],
        workflow_id: str,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> WorkflowHandle[OutputT]: ...

    @overload
    async def spawn(
        self,
        workflow: str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> WorkflowHandle: ...

    @rests_with_host
    async def spawn(
        self,
        workflow: WorkflowLike | str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> WorkflowHandle[Any]:
        """Start a workflow, or find it started: same id, same workflow and equal input give the existing one.

        Durable on return: the workflow will run, whatever happens to this process. Cancelled, it may have been started.

        Args:
            workflow: One of those given to `open_supervisor`, or its name.
            workflow_id: Any non-empty text.
            input: What its function gets; anything that a step could return, and what the annotation of its parameter says.
            start_at: When it is to start: seconds from now, or an aware `datetime`; one that is past is now. Until then it is
                `pending` and costs no memory. Messages are kept for it and do not start it; `wake()` does.
            deadline: When it fails with `WorkflowDeadlineError` unless it has ended, given likewise. It is rolled back then,
                if it has passed a rollback checkpoint; a step in progress is cancelled. So does one that is waiting, not in
                memory, not started or held back by a limit, or whose deadline has passed while no supervisor ran. One that is not
                in memory needs one of the `max_live` places for that, and fails as soon as one is free.
            attributes: By what it can be found: at most 64 names of at most 512 bytes, each with text (at most 1,024 bytes), a
                number, a boolean or `None`.

            The last three are for a workflow that is made; one that exists keeps what it has.

        Raises:
            WorkflowExistsError: The id is taken by another workflow, or by this one with another input.
            UnregisteredWorkflowError: The workflow was not given to `open_supervisor`.
            InvalidArgumentError: The input does not fit the annotation; nothing was written.
            EncodeError: The input cannot be stored.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        check_workflow_id(workflow_id)
        definition = self._registered(workflow)
        encoded = encode_input(definition.function, input, bytes_max=self._input_bytes_max)
        birth = _birth(start_at, deadline, attributes, self._clock.now_ms())
        await trio.lowlevel.checkpoint()

        def check(actor: Actor) -> None:
            check_same(actor, definition, encoded)

        await self._residents.create_or_find(definition, workflow_id, input, check, birth)
        return ActorHandle(self._residents, workflow_id)

    @rests_with_host
    async def get(self, workflow_id: str) -> WorkflowHandle:
        """The handle of a workflow that exists; never creates one.

        Raises:
            WorkflowNotFoundError: There is none.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        check_workflow_id(workflow_id)
        self._residents.check_open()
        await trio.lowlevel.checkpoint()
        if workflow_id not in self._residents.live and await self._store.get_row(workflow_id) is None:
            raise self._residents.not_found(workflow_id)
        return ActorHandle(self._residents, workflow_id)

    async def drain(self, *, grace: float | None = None) -> None:
        """Come to rest before the block is left: take nothing more, let running steps finish, have nothing live.

        From the call on, whatever would bring a workflow in is refused with `SupervisorClosedError`, and nothing is begun; who
        waits for a result is told that it goes on later. What goes on at the next start, and when, is durable on return.

        Cancelled, it waits no more; nothing more is taken all the same, and what runs leaves memory once its step has ended.

        Args:
            grace: Seconds, 0 or more, that running steps may take; then the rest is evicted. The supervisor's own unless given.

        Raises:
            StorageError: It has come to rest, and the catalog could not be written. What it says is too early then, which is
                harmless, and it is tried again; nothing of a workflow is lost.
        """
        await self._shutdown.drain(None if grace is None else check_duration(grace, "grace", "grace=10.0"))
        await self._keeper.flush()

    def describe(self, workflow_id: str) -> str:
        """Where a person finds the workflow's data: the path of its SQLite file, for a directory."""
        return self._store.describe(check_workflow_id(workflow_id))

    def troubles(self) -> dict[str, BaseException]:
        """The workflows that cannot run here, and why: unregistered, diverged, damaged, or stopped by their storage.

        Known from the activation on that met it; a workflow that waits is activated by its alarm or by what is listed next.
        They are tried again at the next message, `wake()` or `recover()`, and at the next start.
        """
        return dict(self._residents.troubles)

    def _registered(self, given: WorkflowLike | str) -> Workflow[Any, Any]:
        if isinstance(given, str):
            definition = self._definitions.get(given)
            if definition is None:
                raise self._residents.unregistered(given)
            return definition
        definition = definition_of(given)
        known = self._definitions.get(definition.name)
        if known is None or known.function != definition.function:  # a bound method is another object each time
            raise self._residents.unregistered(definition.name)
        return known

    # The block's beginning and end; called by `open_supervisor`.

    @asynccontextmanager
    async def _hosting(self, *, handle_signals: bool) -> AsyncGenerator[None]:
        outcome: BaseException | None = None
        await self._store.acquire()
        with self._signals(handle_signals=handle_signals):
            async with trio.open_nursery() as outer:
                try:
                    await self._begin(outer)
                    with self._shutdown.block:
                        yield
                except BaseException as error:  # comes out below: inside, the nursery would wrap it in a group
                    outcome = error
                outcome = await self._shutdown.leave() or outcome
                outer.start_soon(self._close)
                outcome = await outlast(self._is_closed.wait) or outcome or self._closing_error
        outcome = self._shutdown.interruption or outcome
        if outcome is not None:
            raise outcome

    def _signals(self, *, handle_signals: bool) -> AbstractContextManager[object]:
        if not handle_signals:
            return nullcontext()
        soon, shutdown = trio.lowlevel.current_trio_token().run_sync_soon, self._shutdown
        return Signals(lambda number: soon(shutdown.interrupt, SystemExit(128 + number)), lambda: soon(shutdown.hurry))

    async def _begin(self, outer: trio.Nursery) -> None:
        await self._schedules.open()
        is_open = trio.Event()
        self._has_begun = True
        outer.start_soon(self._work, is_open)
        await is_open.wait()
        nursery = self._residents.nursery
        assert nursery is not None, "it is open"
        if self._hooks is not None:
            self._hooks.open(nursery, on_interrupt=self._interrupt)
        nursery.start_soon(self._keeper.run)
        nursery.start_soon(self._residents.duties.run, nursery)
        nursery.start_soon(self._residents.late_parks.run)
        nursery.start_soon(self._alarms.run, self._residents)
        if self._retention is not None:
            nursery.start_soon(self._retention.run)
        nursery.start_soon(self._schedules.run, nursery)
        self._admission.start(nursery)

    async def _work(self, is_open: trio.Event) -> None:
        """Everything that runs besides the block, shielded: when that is cancelled, running steps get their `grace`, too."""
        try:
            with self._work_scope:
                async with trio.open_nursery() as nursery:
                    self._residents.start(nursery)
                    is_open.set()
                    await trio.sleep_forever()
        finally:
            self._has_ended.set()

    def _note_ended(self, workflow_id: str) -> None:
        self._schedules.note_ended(workflow_id)
        self._admission.note_gone(workflow_id)

    def _interrupt(self, error: BaseException) -> None:
        self._shutdown.interrupt(error)

    def hurry(self) -> None:
        """Give running steps no more grace when the block is left, or is being left; for whoever has another way to be told."""
        self._shutdown.hurry()

    @trio.lowlevel.enable_ki_protection
    async def _close(self) -> None:
        """End all that runs besides the block, and close the store. In a task of its own, which Ctrl-C does not reach."""
        with trio.CancelScope(shield=True):
            try:
                self._work_scope.cancel()
                if self._has_begun:
                    await self._has_ended.wait()
                await self._residents.asyncio.aclose()
                await self._close_store()
            except Exception as error:
                _log.warning("the supervisor did not close completely: %s", error)
                self._closing_error = error
            finally:
                self._is_closed.set()

    async def _close_store(self) -> None:
        self._residents.stop_intake()
        try:
            await self._keeper.flush()
        except StorageError as error:
            _log.warning("the catalog could not be written when the supervisor closed: %s", error)
        self._keeper.events.end()
        try:
            await self._own.aclose()
        finally:
            await self._store.aclose()


def _birth(
    start_at: float | datetime | None,
    deadline: float | datetime | None,
    attributes: Mapping[str, Any] | None,
    now_ms: int,
) -> Birth:
    return Birth(
        start_at_ms=None if start_at is None else check_time_ms(start_at, "start_at", now_ms),
        deadline_ms=None if deadline is None else check_time_ms(deadline, "deadline", now_ms),
        attributes=encode_attributes(attributes) if attributes else None,
    )
