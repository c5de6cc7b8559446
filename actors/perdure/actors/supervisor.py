"""The supervisor: hosts workflows as actors, one activation each, and brings them back when they are due.

1. Its directory has one owner, the store's lock; in it, one gate per workflow id makes opening and closing one at a time.
2. A workflow is *live* (an `Actor` holds its driver and runs its function) or *dormant* (a catalog row and a file). A
   message, a wake or an alarm makes a dormant one live; so does the start, for those that were at work or became due.
3. Whatever goes wrong with one workflow (damaged file, unregistered type, divergence, its storage) is kept with its id
   and told to whoever asks for it; the others go on.
4. The block that owns the supervisor ends in order: intake stops, running steps may finish for `grace` seconds, the rest is
   evicted, everything is committed and closed, the lock is released. What the block raised comes out as it was.
5. The supervisor speaks to a `Store`; it knows no files.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from os import PathLike
from typing import Any, Final, Literal, cast

import trio

from perdure.actors.actor import Actor
from perdure.actors.catalog import CatalogedDriver, CatalogKeeper
from perdure.actors.errors import (
    SupervisorClosedError,
    UnregisteredWorkflowError,
    WorkflowExistsError,
    WorkflowNotFoundError,
)
from perdure.actors.gates import Gates
from perdure.actors.handle import ActorHandle
from perdure.storage import (
    VALUE_BYTES_MAX,
    CatalogRow,
    FileStore,
    NamespaceNotFoundError,
    Store,
    decode_value,
    encode_value,
)
from perdure.workflow import (
    Clock,
    Context,
    InvalidArgumentError,
    SystemClock,
    Workflow,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    definition_of,
)
from perdure.workflow.activation import USER_OVERHEAD_BYTES, Activation
from perdure.workflow.checks import check_duration, check_workflow_id

__all__ = ["Supervisor", "open_supervisor"]

_log = logging.getLogger("perdure.actors")

_ACTIVATIONS_AT_ONCE: Final = 8
_ALL: Final = 2**62
_STEP_THREADS: Final = 40

WorkflowLike = Workflow[Any, Any] | Callable[[Context, Any], Awaitable[Any]]
"""A workflow as users hand it over: `@workflow`-made, or a coroutine function known by its `__name__`."""


@asynccontextmanager
async def open_supervisor(
    store: str | PathLike[str] | Store,
    workflows: Iterable[WorkflowLike] = (),
    *,
    durability: Literal["full", "normal"] = "full",
    grace: float = 10.0,
    clock: Clock | None = None,
    handle_signals: bool = False,
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
        grace: Seconds, 0 or more.
        clock: Where the time comes from; the system's clock unless given.
        handle_signals: Whether SIGINT and SIGTERM end the block in order, with `SystemExit(128 + signal)` coming out of it;
            a second signal ends the process at once. Only in the main thread.

    Raises:
        StoreLockedError: Another process has the directory; `holder_pid` says which.
        FormatVersionError: A newer Perdure wrote it.
        UnsupportedFileSystemError: It lies on a network file system.
        InvalidArgumentError: Two workflows have one name, or an argument is wrong.
    """
    supervisor = _make(store, workflows, durability, grace, clock)
    outcome: BaseException | None = None
    await supervisor.start()
    try:
        async with trio.open_nursery() as nursery:
            supervisor.open_for_work(nursery, handle_signals=handle_signals)
            try:
                with supervisor.block_scope:
                    yield supervisor
            except BaseException as error:  # comes out below: inside, the nursery would wrap it in a group
                outcome = error
            await supervisor.shut_down()
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await supervisor.aclose()
    if supervisor.interrupt is not None:
        raise supervisor.interrupt
    if outcome is not None:
        raise outcome


def _make(
    store: str | PathLike[str] | Store,
    workflows: Iterable[WorkflowLike],
    durability: Literal["full", "normal"],
    grace: float,
    clock: Clock | None,
) -> Supervisor:
    checked_grace = check_duration(grace, "grace", "grace=10.0")
    definitions: dict[str, Workflow[Any, Any]] = {}
    for given in _check_list(workflows):
        definition = definition_of(given)
        if definition.name in definitions:
            raise InvalidArgumentError(
                f'two workflows are named {definition.name!r}; give one another name with @workflow(name="...")'
            )
        definitions[definition.name] = definition
    if isinstance(store, str | PathLike):
        if durability not in ("full", "normal"):
            raise InvalidArgumentError(f'durability must be "full" or "normal", not {durability!r}')
        store = FileStore(store, durability=durability)
    return Supervisor(_check_store(store), definitions, checked_grace, clock or SystemClock())


def _check_list(workflows: object) -> Iterable[object]:
    if callable(workflows) or isinstance(workflows, str) or not isinstance(workflows, Iterable):
        raise InvalidArgumentError(f"workflows= takes a list of workflows, not {workflows!r}; write workflows=[order]")
    return cast("Iterable[object]", workflows)


def _check_store(store: object) -> Store:
    if not isinstance(store, Store):
        raise InvalidArgumentError(
            f'a directory or a Store is needed, not {type(store).__name__}; write open_supervisor("data/")'
        )
    return store


class Supervisor:
    """Hosts workflows; made by `open_supervisor`."""

    def __init__(self, store: Store, definitions: dict[str, Workflow[Any, Any]], grace: float, clock: Clock) -> None:
        self.block_scope = trio.CancelScope()
        self.interrupt: BaseException | None = None
        self._store = store
        self._definitions = definitions
        self._grace = grace
        self._clock = clock
        self._keeper = CatalogKeeper(store, clock)
        self._gates = Gates()
        self._actors: dict[str, Actor] = {}
        self._troubles: dict[str, BaseException] = {}
        self._arrivals: dict[str, trio.Event] = {}
        self._step_limiter = trio.CapacityLimiter(_STEP_THREADS)
        self._nursery: trio.Nursery | None = None
        self._is_closing = False
        self._alarm_floor_ms = 1
        self._alarm_scope = trio.CancelScope()

    # What users call.

    async def spawn(self, workflow: WorkflowLike | str, workflow_id: str, input: object = None) -> WorkflowHandle:
        """Start a workflow, or find it started: same id, same workflow and equal input give the existing one.

        Durable on return: the workflow will run, whatever happens to this process.

        Args:
            workflow: One of those given to `open_supervisor`, or its name.
            workflow_id: Any non-empty text.
            input: What its function gets; anything that a step could return.

        Raises:
            WorkflowExistsError: The id is taken by another workflow, or by this one with another input.
            UnregisteredWorkflowError: The workflow was not given to `open_supervisor`.
            EncodeError: The input cannot be stored.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        check_workflow_id(workflow_id)
        definition = self._registered(workflow)
        encoded = encode_value(input, bytes_max=VALUE_BYTES_MAX - USER_OVERHEAD_BYTES, what="the workflow's input")
        await trio.lowlevel.checkpoint()
        # Shielded: a workflow that was created is started, whoever stops waiting for it meanwhile.
        with trio.CancelScope(shield=True):
            async with self._gates.entered(workflow_id):
                self._check_open()
                actor = self._actors.get(workflow_id)
                if actor is not None and actor.is_leaving:
                    await self._retire(actor)
                    actor = None
                actor = actor or await self._find_or_create(definition, workflow_id, input)
                try:
                    self._check_same(actor, definition, encoded)
                    await self._start(actor)
                finally:
                    await self._retire_if_idle(actor)
        return ActorHandle(self, workflow_id)

    async def get(self, workflow_id: str) -> WorkflowHandle:
        """The handle of a workflow that exists; never creates one.

        Raises:
            WorkflowNotFoundError: There is none.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        check_workflow_id(workflow_id)
        self._check_open()
        if workflow_id not in self._actors and await self._store.get_row(workflow_id) is None:
            raise self._not_found(workflow_id)
        return ActorHandle(self, workflow_id)

    def describe(self, workflow_id: str) -> str:
        """Where a person finds the workflow's data: the path of its SQLite file, for a directory."""
        return self._store.describe(check_workflow_id(workflow_id))

    def troubles(self) -> dict[str, BaseException]:
        """The workflows that cannot run here, and why: unregistered, diverged, damaged, or stopped by their storage.

        They are tried again at the next message, `wake()` or `recover()`, and at the next start.
        """
        return dict(self._troubles)

    # What handles call.

    @asynccontextmanager
    async def using(self, workflow_id: str) -> AsyncGenerator[Actor]:
        """Hold the workflow's actor, bringing it in (but not running it) if it is dormant."""
        self._check_open()
        actor = self._actors.get(workflow_id)
        # Between this look and `hold` nothing else runs, so a live actor needs no gate.
        while actor is None or not actor.is_usable:
            if actor is not None:
                await actor.stopped.wait()
            async with self._gates.entered(workflow_id):
                actor = self._actors.get(workflow_id) or await self._bring_in(workflow_id)
        actor.hold()
        try:
            yield actor
        finally:
            actor.release()
            if not actor.is_started:
                with trio.CancelScope(shield=True):
                    async with self._gates.entered(workflow_id):
                        await self._retire_if_idle(actor)

    async def ensure_running(self, workflow_id: str) -> None:
        """Make a workflow live that has something to do."""
        actor = self._actors.get(workflow_id)
        while not (self._is_closing or (actor is not None and actor.is_started and actor.is_usable)):
            if actor is not None and not actor.is_usable:
                await actor.stopped.wait()
            with trio.CancelScope(shield=True):
                async with self._gates.entered(workflow_id):
                    actor = self._actors.get(workflow_id) or await self._bring_in(workflow_id)
                    if actor.is_usable:
                        try:
                            await self._start(actor)
                        finally:
                            await self._retire_if_idle(actor)
                        return

    async def evict(self, workflow_id: str) -> None:
        """Take a live workflow out of memory; returns when it is dormant."""
        self._check_open()
        await trio.lowlevel.checkpoint()
        actor = self._actors.get(workflow_id)
        if actor is None and await self._store.get_row(workflow_id) is None:
            raise self._not_found(workflow_id)
        if actor is not None and actor.is_started:
            actor.activation.evict()
            await actor.stopped.wait()

    async def result(self, workflow_id: str) -> Any:
        """Wait for the workflow's end."""
        while True:
            actor = self._actors.get(workflow_id)
            if actor is not None and actor.is_started:
                await actor.stopped.wait()
                if actor.is_ended:
                    return actor.result()
                if actor.error is not None:
                    raise actor.error
                await self._check_suspended(workflow_id, actor)
                continue
            if self._is_closing and actor is not None:
                await actor.stopped.wait()
                continue
            arrival = self._arrivals.setdefault(workflow_id, trio.Event())
            async with self.using(workflow_id) as dormant:
                if dormant.is_ended:
                    return dormant.result()
                if dormant.is_started:
                    continue
                self._raise_trouble(workflow_id, dormant)
            await arrival.wait()
            if self._is_closing:
                await self._check_suspended(workflow_id, dormant)

    async def _check_suspended(self, workflow_id: str, actor: Actor) -> None:
        await trio.lowlevel.checkpoint()
        if self._is_closing:
            state = actor.activation.history.state.value
            raise WorkflowSuspendedError(
                f"the supervisor left its block while workflow {workflow_id!r} was {state}; it goes on at the next start",
                workflow_id=workflow_id,
                state=state,
            )

    def _raise_trouble(self, workflow_id: str, actor: Actor) -> None:
        trouble = self._troubles.get(workflow_id)
        if trouble is not None:
            raise trouble
        if actor.definition is None:
            raise self._unregistered(actor.activation.history.workflow_type or "")

    # Making actors, and letting them go. The caller is inside the workflow's gate.

    async def _create(self, definition: Workflow[Any, Any], workflow_id: str, input: object) -> Actor:
        now_ms = self._clock.now_ms()
        row = CatalogRow(workflow_id, definition.name, WorkflowState.PENDING.value, 0, False, now_ms, now_ms)
        await self._keeper.put(row)
        driver = CatalogedDriver(await self._store.open_driver(workflow_id, create=True), self._keeper, row)
        try:
            activation = await self._load(workflow_id, driver)
            if activation.is_new:
                activation.create(definition.name, input)
                await activation.commit_from_outside()
            driver.follow(activation.history)
        except BaseException:
            with trio.CancelScope(shield=True):
                await driver.aclose()
            raise
        actor = Actor(workflow_id, driver, activation, definition)
        self._actors[workflow_id] = actor
        return actor

    async def _find_or_create(self, definition: Workflow[Any, Any], workflow_id: str, input: object) -> Actor:
        if await self._store.get_row(workflow_id) is not None:
            try:
                return await self._bring_in(workflow_id)
            except WorkflowNotFoundError:  # its creation was never finished
                pass
        return await self._create(definition, workflow_id, input)

    async def _bring_in(self, workflow_id: str) -> Actor:
        row = await self._store.get_row(workflow_id)
        if row is None:
            raise self._not_found(workflow_id)
        try:
            inner = await self._store.open_driver(workflow_id)
        except NamespaceNotFoundError as error:
            if error.path is not None:
                raise  # there was a file, and somebody took it away
            await self._store.delete(workflow_id)
            raise self._not_found(workflow_id) from None
        driver = CatalogedDriver(inner, self._keeper, row)
        try:
            activation = await self._load(workflow_id, driver)
        except BaseException:
            with trio.CancelScope(shield=True):
                await driver.aclose()
            raise
        if activation.is_new:  # its creation was never acknowledged
            await driver.aclose()
            self._keeper.forget(workflow_id)
            await self._store.delete(workflow_id)
            raise self._not_found(workflow_id)
        driver.follow(activation.history)
        definition = self._definitions.get(activation.history.workflow_type or row.workflow_type)
        actor = Actor(workflow_id, driver, activation, definition)
        self._actors[workflow_id] = actor
        return actor

    async def _load(self, workflow_id: str, driver: CatalogedDriver) -> Activation:
        return await Activation.load(workflow_id, driver, clock=self._clock, step_limiter=self._step_limiter)

    async def _start(self, actor: Actor) -> None:
        workflow_id = actor.workflow_id
        if actor.definition is None and not actor.activation.history.state.is_terminal:
            self._troubles[workflow_id] = self._unregistered(actor.activation.history.workflow_type or "")
        if self._is_closing or self._nursery is None or not actor.can_run:
            return
        await actor.driver.move_earlier(0)
        self._troubles.pop(workflow_id, None)
        actor.is_started = True
        self._nursery.start_soon(self._run, actor, name=f"workflow {workflow_id!r}")
        arrival = self._arrivals.pop(workflow_id, None)
        if arrival is not None:
            arrival.set()

    async def _run(self, actor: Actor) -> None:
        try:
            await actor.run()
        except trio.Cancelled:
            raise
        except Exception as error:
            actor.error = error
        except BaseException as error:
            # Ctrl-C met the code of a workflow: it is for the program, which leaves its block in order.
            self.interrupt = self.interrupt or error
            self.block_scope.cancel()
        finally:
            actor.is_leaving = True
            with trio.CancelScope(shield=True):
                async with self._gates.entered(actor.workflow_id):
                    await self._retire(actor)

    async def _retire(self, actor: Actor) -> None:
        """Close an actor and take it out; does nothing for one that is gone."""
        if self._actors.get(actor.workflow_id) is not actor:
            return
        actor.is_leaving = True
        await actor.close()
        del self._actors[actor.workflow_id]
        if actor.error is not None:
            self._troubles[actor.workflow_id] = actor.error
        history = actor.activation.history
        if history.state is WorkflowState.SLEEPING and history.alarm_ms is not None and not self._is_closing:
            self._expect_alarm(history.alarm_ms)

    async def _retire_if_idle(self, actor: Actor) -> None:
        if not actor.is_started and actor.in_use == 0:
            await self._retire(actor)

    # Recovery and alarms.

    async def start(self) -> None:
        """Take the store."""
        await self._store.acquire()

    def open_for_work(self, nursery: trio.Nursery, *, handle_signals: bool) -> None:
        """Begin to recover and to wake workflows."""
        self._nursery = nursery
        nursery.start_soon(self._keeper.run)
        nursery.start_soon(self._recover)
        if handle_signals:
            nursery.start_soon(self._watch_signals)

    async def _recover(self) -> None:
        await self._activate_due(0)
        await self._watch_alarms()

    async def _activate_due(self, since_ms: int) -> None:
        """Activate what is due, except what is live: that has its own alarm."""
        now_ms = self._clock.now_ms()
        due = await self._store.find_due(now_ms, since_ms=since_ms, limit=_ALL)
        self._alarm_floor_ms = now_ms + 1
        limiter = trio.CapacityLimiter(_ACTIVATIONS_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for row in due:
                if row.workflow_id not in self._actors:
                    await limiter.acquire_on_behalf_of(row.workflow_id)
                    nursery.start_soon(self._activate, row.workflow_id, limiter)

    async def _activate(self, workflow_id: str, limiter: trio.CapacityLimiter) -> None:
        try:
            await self.ensure_running(workflow_id)
        except WorkflowNotFoundError:
            _log.info(
                "workflow %r was never completely created, or its file is gone; it was taken off the catalog",
                workflow_id,
            )
        except Exception as error:
            self._troubles[workflow_id] = error
            _log.warning("workflow %r cannot be activated: %s", workflow_id, error)
        finally:
            limiter.release_on_behalf_of(workflow_id)

    def _expect_alarm(self, alarm_ms: int) -> None:
        self._alarm_floor_ms = min(self._alarm_floor_ms, max(1, alarm_ms))
        self._alarm_scope.cancel()

    async def _watch_alarms(self) -> None:
        """Activate dormant workflows when their time comes. Live ones, whose wake is 0 or theirs to keep, are passed over."""
        while True:
            await self._keeper.flush()
            with trio.CancelScope() as self._alarm_scope:
                next_ms = await self._store.next_wake_ms(since_ms=self._alarm_floor_ms)
                if next_ms is None:
                    await trio.sleep_forever()
                else:
                    await self._clock.wait_until_ms(next_ms)
            if self._alarm_scope.cancelled_caught:
                continue
            await self._activate_due(self._alarm_floor_ms)

    # The end.

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self.interrupt is not None:
                    os._exit(128 + number)
                self.interrupt = SystemExit(128 + number)
                self.block_scope.cancel()

    async def shut_down(self) -> None:
        """Stop intake, let running steps finish for `grace` seconds, evict the rest. Not interrupted by cancellation."""
        with trio.CancelScope(shield=True):
            self._is_closing = True
            for arrival in self._arrivals.values():
                arrival.set()
            self._arrivals.clear()
            for actor in list(self._actors.values()):
                actor.activation.drain()
            with trio.move_on_after(self._grace):
                await self._until_empty()
            for actor in list(self._actors.values()):
                actor.activation.evict()
            await self._until_empty()

    async def _until_empty(self) -> None:
        while self._actors:
            await next(iter(self._actors.values())).stopped.wait()
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Write the catalog and give up the store."""
        self._is_closing = True
        try:
            await self._keeper.flush()
        except Exception as error:
            _log.warning("the catalog could not be written when the supervisor closed: %s", error)
        await self._store.aclose()

    # Checks.

    def _check_open(self) -> None:
        if self._is_closing:
            raise SupervisorClosedError("the supervisor is leaving its block and takes nothing more; open another")

    def _registered(self, given: WorkflowLike | str) -> Workflow[Any, Any]:
        if isinstance(given, str):
            definition = self._definitions.get(given)
            if definition is None:
                raise self._unregistered(given)
            return definition
        definition = definition_of(given)
        known = self._definitions.get(definition.name)
        if known is None or known.function is not definition.function:
            raise self._unregistered(definition.name)
        return known

    def _unregistered(self, name: str) -> UnregisteredWorkflowError:
        known = ", ".join(sorted(self._definitions)) or "none"
        return UnregisteredWorkflowError(
            f"no workflow {name!r} is registered here (registered: {known}), so it could not be run again after a restart; name "
            f"it in open_supervisor(..., workflows=[{name}])",
            workflow_type=name,
        )

    def _not_found(self, workflow_id: str) -> WorkflowNotFoundError:
        return WorkflowNotFoundError(
            f"there is no workflow {workflow_id!r}; start it with supervisor.spawn(workflow, {workflow_id!r}, input)",
            workflow_id=workflow_id,
        )

    def _check_same(self, actor: Actor, definition: Workflow[Any, Any], encoded: bytes) -> None:
        history = actor.activation.history
        if history.workflow_type != definition.name:
            raise WorkflowExistsError(
                f"workflow {actor.workflow_id!r} exists and is a {history.workflow_type!r}, not a {definition.name!r}; choose "
                "another id",
                workflow_id=actor.workflow_id,
            )
        stored = history.input
        if stored != encoded and (stored is None or not _equal(decode_value(stored), decode_value(encoded))):
            raise WorkflowExistsError(
                f"workflow {actor.workflow_id!r} exists and was started with another input; choose another id, or use "
                f"supervisor.get({actor.workflow_id!r})",
                workflow_id=actor.workflow_id,
            )


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
