"""The workflows that are in memory: bringing them in, starting them, letting them go.

1. A workflow is *live* (an `Actor` holds its driver and runs its function) or *dormant* (a catalog row and a file). There is
   one actor per workflow at most: making and closing one happens inside the workflow's gate.
2. A live actor is used without the gate: between looking at it and holding it nothing else can run.
3. Whatever goes wrong with one workflow (damaged file, unregistered type, divergence, its storage) is kept with its id and
   told to whoever asks for it; the others go on.
4. Creation: first the catalog row (due at once), then the file, then the first batch. Killed in between, the next look
   finds a row without a workflow, and removes it; nobody was told that it exists.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from perdure.actors.actor import Actor
from perdure.actors.catalog import CatalogedDriver, CatalogKeeper
from perdure.actors.duties import Duties
from perdure.actors.errors import SupervisorClosedError, UnregisteredWorkflowError, WorkflowNotFoundError
from perdure.actors.gates import Gates
from perdure.actors.hosting import Hosting
from perdure.actors.parks import LateParks
from perdure.actors.suspects import Suspects
from perdure.storage import CatalogRow, NamespaceNotFoundError, Store
from perdure.storage.attributes import decode_attributes
from perdure.storage.rebuild import parent_id_of
from perdure.workflow import Clock, Workflow, WorkflowState
from perdure.workflow.activation import Activation
from perdure.workflow.asyncio_thread import AsyncioThread, asyncio_home
from perdure.workflow.birth import NOTHING_SPECIAL, Birth
from perdure.workflow.failures import sole_exception
from perdure.workflow.hooks import Hooks
from perdure.workflow.threads import STEP_THREADS_MAX

__all__ = ["Residents"]

_log = logging.getLogger("perdure.actors")


class Residents:
    """The actors of one supervisor.

    Args:
        store: Where dormant workflows are.
        keeper: Writes their catalog rows.
        definitions: The registered workflows, by name.
        clock: The time.
        hooks: What is told of all workflows.
        on_dormant: Called with the alarm (milliseconds since the epoch) of a workflow that leaves memory asleep.
        on_interrupt: Called with what came out of a workflow and is meant for the program (Ctrl-C, `SystemExit`).
    """

    def __init__(
        self,
        store: Store,
        keeper: CatalogKeeper,
        definitions: dict[str, Workflow[Any, Any]],
        clock: Clock,
        *,
        hooks: Hooks | None,
        on_dormant: Callable[[int], None],
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        self.live: dict[str, Actor] = {}
        self.troubles: dict[str, BaseException] = {}
        self.is_closing: bool = False
        self.nursery: trio.Nursery | None = None
        self.asyncio: AsyncioThread = AsyncioThread()
        self.on_ended: Callable[[str], None] | None = None
        self._store = store
        self._keeper = keeper
        self._definitions = definitions
        self._clock = clock
        self._hooks = hooks
        self._on_dormant = on_dormant
        self._on_interrupt = on_interrupt
        self.duties = Duties(self)
        self._hosting = Hosting(self, keeper, definitions)
        self._gates = Gates()
        self._suspects = Suspects()
        self.late_parks: LateParks = LateParks(on_interrupt)
        self._arrivals: dict[str, trio.Event] = {}
        self._step_limiter = trio.CapacityLimiter(STEP_THREADS_MAX)

    # Using actors.

    def check_open(self) -> None:
        """Refuse work while the supervisor leaves its block.

        Raises:
            SupervisorClosedError: It does.
        """
        if self.is_closing:
            raise SupervisorClosedError(
                "the supervisor has left its block, or is leaving it, and takes nothing more; open another"
            )

    @asynccontextmanager
    async def using(self, workflow_id: str) -> AsyncGenerator[Actor]:
        """Hold the workflow's actor, bringing it in (but not running it) if it is dormant."""
        self.check_open()
        actor = self.live.get(workflow_id)
        while actor is None or not actor.is_usable:
            if actor is not None:
                await actor.stopped.wait()
            async with self._gates.entered(workflow_id):
                self.check_open()
                actor = self.live.get(workflow_id) or await self._bring_in(workflow_id)
        actor.hold()
        try:
            yield actor
        finally:
            actor.release()
            if not actor.is_started:
                with trio.CancelScope(shield=True):
                    async with self._gates.entered(workflow_id):
                        if actor.driver.has_written:  # a message, a wake: it runs, whatever becomes of who sent it
                            await self._start_or_retire(actor)
                        else:
                            await self._retire_if_idle(actor)

    def is_running(self, workflow_id: str) -> bool:
        """Whether the workflow's function was begun, and keeps its own time; being looked at is not enough."""
        actor = self.live.get(workflow_id)
        return actor is not None and actor.is_started

    async def activate(self, workflow_id: str) -> None:
        """Make a workflow live that has something to do; what prevents it becomes its trouble."""
        try:
            await self.ensure_running(workflow_id)
        except WorkflowNotFoundError:
            _log.info("workflow %r was never completely created; it was taken off the catalog", workflow_id)
        except Exception as error:
            self.troubles[workflow_id] = error
            _log.warning("workflow %r cannot be activated: %s", workflow_id, error)
            self._announce(workflow_id)

    def want(self, workflow_id: str) -> None:
        """See to it that a workflow runs that has something to do."""
        if self.nursery is not None and not self.is_closing:
            self.nursery.start_soon(self.activate, workflow_id)

    async def ensure_running(self, workflow_id: str) -> None:
        """Make a workflow live that has something to do."""
        actor = self.live.get(workflow_id)
        while not (self.is_closing or (actor is not None and actor.is_started and actor.is_usable)):
            if actor is not None and not actor.is_usable:
                await actor.stopped.wait()
            with trio.CancelScope(shield=True):
                async with self._gates.entered(workflow_id):
                    actor = self.live.get(workflow_id) or await self._bring_in(workflow_id)
                    if actor.is_usable:
                        await self._start_or_retire(actor)
                        return

    async def create_or_find(
        self,
        definition: Workflow[Any, Any],
        workflow_id: str,
        input: object,
        check: Callable[[Actor], None],
        birth: Birth = NOTHING_SPECIAL,
        may_create: Callable[[], bool] | None = None,
    ) -> bool:
        """See that the workflow exists, passes the check (which may raise), and runs.

        Returns:
            Whether it does; not if it did not and, as `may_create` said when it was to be made, is not to.

        Shielded from cancellation: a workflow that was created is started, whoever stops waiting for it meanwhile.
        """
        with trio.CancelScope(shield=True):
            async with self._gates.entered(workflow_id):
                self.check_open()
                actor = self.live.get(workflow_id)
                if actor is not None and actor.is_leaving:
                    await self._retire(actor)
                    actor = None
                actor = actor or await self._find(workflow_id)
                if actor is None:
                    if may_create is not None and not may_create():
                        return False
                    actor = await self._create(definition, workflow_id, input, birth)
                try:
                    check(actor)
                except BaseException:
                    await self._retire_if_idle(actor)
                    raise
                await self._start_or_retire(actor)
        return True

    async def evict(self, workflow_id: str) -> None:
        """Take a live workflow out of memory; returns when it is dormant."""
        self.check_open()
        await trio.lowlevel.checkpoint()
        actor = self.live.get(workflow_id)
        if actor is None and await self._store.get_row(workflow_id) is None:
            raise self.not_found(workflow_id)
        if actor is not None and actor.is_started:
            actor.evict()
            await actor.stopped.wait()

    def arrival(self, workflow_id: str) -> trio.Event:
        """Set when the workflow becomes live next, ends or is found in trouble, or the supervisor leaves its block."""
        return self._arrivals.setdefault(workflow_id, trio.Event())

    def _announce(self, workflow_id: str) -> None:
        arrival = self._arrivals.pop(workflow_id, None)
        if arrival is not None:
            arrival.set()

    def stop_intake(self) -> None:
        """From now on nothing is brought in or started."""
        self.is_closing = True
        arrivals, self._arrivals = self._arrivals, {}
        for arrival in arrivals.values():
            arrival.set()

    async def until_empty(self) -> None:
        """Return once no actor is left, and none is being made."""
        while self.live or self._gates.is_busy:
            if self.live:
                await next(iter(self.live.values())).stopped.wait()
            else:
                await self._gates.until_free()
            await trio.lowlevel.checkpoint()

    # Making actors, and letting them go. The caller is inside the workflow's gate.

    async def _find(self, workflow_id: str) -> Actor | None:
        if await self._store.get_row(workflow_id) is None:
            return None
        try:
            return await self._bring_in(workflow_id)
        except WorkflowNotFoundError:  # its creation was never finished
            return None

    async def _create(self, definition: Workflow[Any, Any], workflow_id: str, input: object, birth: Birth) -> Actor:
        now_ms = self._clock.now_ms()
        birth = replace(birth, created_at_ms=now_ms)
        row = CatalogRow(
            workflow_id,
            definition.name,
            WorkflowState.PENDING.value,
            0,
            False,
            now_ms,
            now_ms,
            attributes={} if birth.attributes is None else decode_attributes(birth.attributes),
            parent_id=None if birth.parent is None else parent_id_of(birth.parent),
        )
        await self._keeper.put(row)
        driver = CatalogedDriver(await self._store.open_driver(workflow_id, create=True), self._keeper, row)
        try:
            activation = await self._load(workflow_id, driver)
            activation.create(definition.name, input, definition.function, birth)
            await activation.commit_from_outside()
            return self._admit(driver, activation, definition)
        except BaseException:
            await driver.aclose()
            raise

    async def _bring_in(self, workflow_id: str) -> Actor:
        row = await self._keeper.get(workflow_id)
        if row is None:
            raise self.not_found(workflow_id)
        try:
            inner = await self._store.open_driver(workflow_id)
        except NamespaceNotFoundError as error:
            if error.path is not None:
                raise  # there was a file, and somebody took it away
            self._keeper.forget(workflow_id)
            await self._store.delete(workflow_id)
            raise self.not_found(workflow_id) from None
        try:
            # Opened, a file that was mended has its row read anew.
            driver = CatalogedDriver(inner, self._keeper, await self._keeper.get(workflow_id) or row)
            activation = await self._load(workflow_id, driver)
            if not activation.is_new:
                definition = self._definitions.get(activation.history.workflow_type or row.workflow_type)
                return self._admit(driver, activation, definition)
        except BaseException:
            with trio.CancelScope(shield=True):
                await inner.aclose()
            raise
        await inner.aclose()
        self._keeper.forget(workflow_id)
        await self._store.delete(workflow_id)
        raise self.not_found(workflow_id)

    async def _load(self, workflow_id: str, driver: CatalogedDriver) -> Activation:
        return await Activation.load(
            workflow_id, driver, clock=self._clock, step_limiter=self._step_limiter, hooks=self._hooks
        )

    def _admit(self, driver: CatalogedDriver, activation: Activation, definition: Workflow[Any, Any] | None) -> Actor:
        driver.follow(activation)
        activation.when_parked_late = partial(self.late_parks.note, activation)
        actor = Actor(activation.history.workflow_id, driver, activation, definition)
        activation.host = self._hosting
        driver.when_duties = partial(self.duties.want, actor.workflow_id)
        self.live[actor.workflow_id] = actor
        return actor

    async def _start_or_retire(self, actor: Actor) -> None:
        try:
            await self._start(actor)
        finally:
            await self._retire_if_idle(actor)

    async def _start(self, actor: Actor) -> None:
        workflow_id = actor.workflow_id
        history = actor.activation.history
        if actor.definition is None and not history.state.is_terminal:
            self.troubles[workflow_id] = self.unregistered(history.workflow_type or "")
        if self.is_closing or self.nursery is None or not actor.can_run:
            return
        await actor.driver.move_earlier(0)
        self.troubles.pop(workflow_id, None)
        actor.is_started = True
        self.nursery.start_soon(self._run, actor, name=f"workflow {workflow_id!r}")
        if actor.driver.has_duties:
            self.duties.want(workflow_id)
        self._announce(workflow_id)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, actor: Actor) -> None:
        asyncio_home.set(self.asyncio)
        try:
            async with self._suspects.turn(actor):
                await actor.run()
            await self.duties.see_to(actor)
        except trio.Cancelled:
            raise
        except BaseException as error:
            # Ctrl-C met the code of a workflow: it is for the program, which leaves its block in order.
            self._on_interrupt(sole_exception(error))
        finally:
            actor.is_leaving = True
            with trio.CancelScope(shield=True):
                async with self._gates.entered(actor.workflow_id):
                    await self._retire(actor)

    async def _retire(self, actor: Actor) -> None:
        """Close an actor and take it out; does nothing for one that is gone."""
        if self.live.get(actor.workflow_id) is not actor:
            return
        actor.is_leaving = True
        try:
            await actor.close()
        finally:
            del self.live[actor.workflow_id]
            if actor.driver.has_duties and not self.is_closing:
                self.duties.left(actor.workflow_id)
        if actor.error is not None:
            self.troubles[actor.workflow_id] = actor.error
        elif actor.driver.is_terminal:
            self.troubles.pop(actor.workflow_id, None)
            if self.on_ended is not None:
                self.on_ended(actor.workflow_id)
        if actor.error is not None or actor.driver.is_terminal:
            self._announce(actor.workflow_id)
        elif not self.is_closing:
            self._expect(actor)

    def _expect(self, actor: Actor) -> None:
        """See that a workflow that left memory, and has not ended, comes back when it wants to."""
        wake_ms = actor.driver.row.next_wake_ms
        if wake_ms:
            self._on_dormant(wake_ms)
        elif actor.is_started and actor.is_mail_wanted and self.nursery is not None:
            # The message came while it was being evicted, and counts as its next one.
            self.nursery.start_soon(self.activate, actor.workflow_id)

    async def _retire_if_idle(self, actor: Actor) -> None:
        if not actor.is_started and actor.in_use == 0:
            await self._retire(actor)

    # Errors.

    def unregistered(self, name: str) -> UnregisteredWorkflowError:
        """The error for a workflow whose function is not known here."""
        known = ", ".join(sorted(self._definitions)) or "none"
        return UnregisteredWorkflowError(
            f"no workflow {name!r} is registered here (registered: {known}), so it could not be run again after a restart; "
            f"name it in open_supervisor(..., workflows=[{name}])",
            workflow_type=name,
        )

    def not_found(self, workflow_id: str) -> WorkflowNotFoundError:
        """The error for an id that no workflow has."""
        return WorkflowNotFoundError(
            f"there is no workflow {workflow_id!r}; start it with supervisor.spawn(workflow, {workflow_id!r}, input)",
            workflow_id=workflow_id,
        )
