"""The workflows that are in memory: bringing them in, starting them, letting them go.

1. A workflow is *live* (an `Actor` holds its driver and runs its function) or *dormant* (a catalog row and a file), but for
   *visits*, which open a dormant one and do not run it. There is one actor per workflow at most: making and closing one
   happens inside the workflow's gate.
2. A live actor is used without the gate: between looking at it and holding it nothing else can run.
3. Whatever goes wrong with one workflow (damaged file, unregistered type, divergence, its storage) is kept with its id and
   told to whoever asks for it; the others go on.
4. Creation: the catalog row (due at once) and the file, then the first batch. Killed in between, the next look finds a row
   without a workflow, and removes it; nobody was told that it exists. If it is to run at once, its place is taken before,
   and the first batch says that it runs. Should the supervisor close in between, it is recovered as a running one.
5. A workflow that is to run takes a place (`slots.py`). If none is free it goes back to sleep and is queued (`dispatch.py`);
   that it wants to run is durable before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from perdure.actors.actor import Actor, hosted_actor
from perdure.actors.admission import Admission
from perdure.actors.arrivals import Arrivals
from perdure.actors.catalog import CatalogedDriver, CatalogKeeper
from perdure.actors.deadlines import Deadlines
from perdure.actors.dispatch import Dispatcher
from perdure.actors.duties import Duties
from perdure.actors.errors import SupervisorClosedError, UnregisteredWorkflowError, WorkflowNotFoundError
from perdure.actors.gates import Gates
from perdure.actors.hosting import Hosting
from perdure.actors.mail import MailDesk
from perdure.actors.parks import LateParks
from perdure.actors.passivation import Passivation
from perdure.actors.restarts import Restarts
from perdure.actors.slots import Place, Slots
from perdure.actors.suspects import Suspects
from perdure.actors.troubles import Troubles
from perdure.storage import CatalogRow, NamespaceNotFoundError, PerdureError, Store, layout
from perdure.storage.attributes import decode_attributes
from perdure.storage.rebuild import parent_id_of
from perdure.storage.wake import TERMINAL_STATES
from perdure.workflow import Clock, Workflow, WorkflowState
from perdure.workflow.activation import Activation
from perdure.workflow.asyncio_thread import AsyncioThread, asyncio_home
from perdure.workflow.birth import NOTHING_SPECIAL, Birth
from perdure.workflow.deadline import has_passed
from perdure.workflow.failures import sole_exception
from perdure.workflow.hooks import Hooks
from perdure.workflow.mailbox import MAILBOX_LIMIT
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
        max_live: How many may run at once.
        lent_max: How many of them may lend their places at once.
        idle_timeout: Seconds after which one that only waits leaves memory.
        hooks: What is told of all workflows.
        mailbox_limit: How many messages a mailbox may hold, where the workflow does not say it.
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
        max_live: int,
        lent_max: int,
        idle_timeout: float,
        hooks: Hooks | None,
        mailbox_limit: int = MAILBOX_LIMIT,
        on_dormant: Callable[[int], None],
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        self.live: dict[str, Actor] = {}
        self.troubles: Troubles = Troubles(clock)
        self.activations: int = 0
        self.is_closing: bool = False
        self.nursery: trio.Nursery | None = None
        self.asyncio: AsyncioThread = AsyncioThread()
        self.on_ended: Callable[[str], None] | None = None
        self.is_starting: Callable[[str], bool] | None = None
        self.slots: Slots = Slots(max_live, lent_max)
        self.passivation: Passivation = Passivation(idle_timeout)
        self.dispatcher: Dispatcher = Dispatcher(self.slots, self.passivation.make_room, self._activate)
        self.restarts: Restarts = Restarts(self.dispatcher.want)
        self.deadlines: Deadlines = Deadlines(clock, self.dispatcher.want)
        self.mail: MailDesk = MailDesk(self, mailbox_limit)
        self.admission: Admission | None = None
        self._store = store
        self._keeper = keeper
        self._definitions = definitions
        self._clock = clock
        self._hooks = hooks
        self._on_dormant = on_dormant
        self._on_interrupt = on_interrupt
        self.duties: Duties = Duties(self)
        self._hosting = Hosting(self, keeper, definitions)
        self._gates = Gates()
        self._suspects = Suspects()
        self.late_parks: LateParks = LateParks(on_interrupt)
        self._arrivals = Arrivals()
        self._context: Context = copy_context()
        self._step_limiter = trio.CapacityLimiter(STEP_THREADS_MAX)

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to run what is wanted, in the nursery."""
        self.nursery = nursery
        self._context = copy_context()
        nursery.start_soon(self.dispatcher.run, nursery)
        nursery.start_soon(self.passivation.run)
        nursery.start_soon(self.restarts.run)
        nursery.start_soon(self.deadlines.run)

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
        """Hold the workflow's actor, bringing it in for a visit (not running it) if it is dormant."""
        actor = await self._hold(workflow_id)
        try:
            yield actor
        finally:
            await self.let_go(actor)

    async def look_at(self, workflow_id: str) -> None:
        """Bring a dormant workflow in for a visit; as it leaves, what it waits for is seen to."""
        if workflow_id not in self.live:
            try:
                async with self.using(workflow_id):
                    pass
            except WorkflowNotFoundError:
                self._arrivals.announce(workflow_id)

    async def let_go(self, actor: Actor) -> None:
        """Hold an actor no longer."""
        actor.release()
        if len(self.dispatcher):
            self.slots.poke()  # now it may leave, if it is idle
        if not actor.is_started:
            with trio.CancelScope(shield=True):
                async with self._gates.entered(actor.workflow_id):
                    if actor.driver.has_written:  # a message, a wake: it runs, whatever becomes of who sent it
                        await self._start_or_retire(actor)
                    else:
                        await self._retire_if_idle(actor)

    async def _hold(self, workflow_id: str) -> Actor:
        self.check_open()
        while True:
            actor = self.live.get(workflow_id)
            if actor is not None and actor.is_usable:
                actor.hold()
                return actor
            if actor is not None:
                await actor.stopped.wait()
            else:
                await self._visit(workflow_id)

    async def _visit(self, workflow_id: str) -> None:
        """See that there is an actor, which does not run.

        The place is waited for inside the gate, so that all who come for one workflow share one visit. Nobody who has a
        place needs this gate: it would be for an actor that is live.
        """
        async with self._gates.entered(workflow_id):
            self.check_open()
            if workflow_id in self.live:
                return
            place = await self.slots.visit()
            try:
                self.check_open()
                actor = await self._bring_in(workflow_id)
                actor.move_to(place)
            finally:
                _give_back(place)

    def is_held(self, row: CatalogRow) -> bool:
        """Whether a workflow that the catalog says is due waits for its turn among those of its type."""
        return self.admission is not None and self.admission.holds_row(row)

    def is_running(self, workflow_id: str) -> bool:
        """Whether the workflow's function was begun, and keeps its own time; being looked at is not enough."""
        actor = self.live.get(workflow_id)
        return actor is not None and actor.is_started

    async def ensure_running(self, workflow_id: str) -> None:
        """See that a workflow runs that has something to do: here and now if there is a place, else as soon as there is one."""
        actor = self.live.get(workflow_id)
        if self.is_closing or (actor is not None and actor.is_started and actor.is_usable):
            return
        is_leaving = actor is not None and not actor.is_usable  # which its code may hold up: nobody is to wait for that
        place = None if is_leaving else self._place_nowait()
        if place is None:
            self.dispatcher.want(workflow_id)
        else:
            await self._run_in(workflow_id, place)

    async def _activate(self, workflow_id: str, place: Place) -> None:
        """Make a workflow live that has something to do, in a place; what prevents it becomes its trouble."""
        try:
            await self._run_in(workflow_id, place)
        except WorkflowNotFoundError:
            _log.info(
                "workflow %r is not run: it was deleted, or never completely created, and is not in the catalog any more",
                workflow_id,
                extra={"workflow_id": workflow_id},
            )
            self._note_unusable(workflow_id)
            self._arrivals.announce(workflow_id)
        except Exception as error:
            self._note_unusable(workflow_id)
            self._note_trouble(workflow_id, error)

    def want(self, workflow_id: str) -> None:
        """See to it that a workflow runs that has something to do, as soon as there is a place."""
        if not self.is_closing:
            self.dispatcher.want(workflow_id)

    async def _run_in(self, workflow_id: str, place: Place) -> None:
        try:
            with trio.CancelScope(shield=True):
                while not self.is_closing:
                    async with self._gates.entered(workflow_id):
                        actor = self.live.get(workflow_id)
                        if actor is None or actor.is_usable:
                            actor = actor or await self._bring_in(workflow_id)
                            try:
                                await self._start(actor, place)
                            finally:
                                await self._retire_if_idle(actor)
                            return
                    await actor.stopped.wait()
        finally:
            _give_back(place)

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
                place: Place | None = None
                try:
                    if actor is None:
                        actor, place = await self._make(definition, workflow_id, input, birth, may_create)
                        if actor is None:
                            return False
                    try:
                        check(actor)
                    except BaseException:
                        await self._retire_if_idle(actor)
                        raise
                    await self._start_or_retire(actor, place)
                finally:
                    _give_back(place)
        return True

    def calling_actor(self) -> Actor | None:
        """The actor that is live here in whose workflow's code this is called; `None` outside of one."""
        actor = hosted_actor.get()
        return None if actor is None or self.live.get(actor.workflow_id) is not actor else actor

    @contextmanager
    def lending(self) -> Generator[None]:
        """Called in a step, what is done inside waits for another workflow, and keeps no place from it."""
        actor = self.calling_actor()
        if actor is None:
            yield
            return
        if actor.driver.when_sound is not None:  # a suspect that waits for another one keeps no turn from it, either
            actor.driver.when_sound()
        if actor.lendings == 0:
            actor.has_lent = self.slots.lend()
        actor.lendings += 1
        try:
            yield
        finally:
            actor.lendings -= 1
            if actor.lendings == 0 and actor.has_lent:
                actor.has_lent = False
                self.slots.take_back()

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

    async def await_arrival(self, workflow_id: str) -> tuple[CatalogRow, trio.Event | None]:
        """What is known of a dormant workflow, and what to wait for before looking again.

        Returns:
            Its catalog row, and an event that is set when it becomes live next, ends or is found in trouble, or when the
            supervisor leaves its block; no event if it has to be opened to know more.

        Raises:
            WorkflowNotFoundError: There is none.
            PerdureError: It cannot run here, and that will not pass by itself.
        """
        since = self._arrivals.count
        row = await self._keeper.get(workflow_id)
        if row is None:
            raise self.not_found(workflow_id)
        if row.problem is not None or row.state in TERMINAL_STATES:
            return row, None
        trouble = self.troubles.get(workflow_id)
        if trouble is not None and not self.restarts.is_coming(workflow_id):
            raise trouble
        if row.workflow_type not in self._definitions:
            raise self.unregistered(row.workflow_type)
        return row, self._arrivals.expect(workflow_id, since)

    def gate(self, workflow_id: str) -> AbstractAsyncContextManager[None]:
        """Inside of it the workflow's actor is neither made nor closed by anybody else."""
        return self._gates.entered(workflow_id)

    def forget(self, workflow_id: str) -> None:
        """The workflow was deleted; the caller is inside its gate."""
        self.troubles.clear_of(workflow_id)
        self.restarts.forget(workflow_id)
        self.deadlines.forget(workflow_id)
        self.mail.not_found(workflow_id)
        if self.on_ended is not None:
            self.on_ended(workflow_id)
        self._arrivals.announce(workflow_id)

    def must_stay(self, workflow_id: str) -> bool:
        """Whether it may not be deleted, as it would be made again: a schedule's run of which that is not noted yet."""
        return self.is_starting is not None and self.is_starting(workflow_id)

    def stop_intake(self) -> None:
        """From now on nothing is brought in or started."""
        self.is_closing = True
        self.mail.close()
        self._arrivals.close()

    async def until_empty(self) -> None:
        """Return once no actor is left, and none is being made."""
        while self.live or self._gates.is_busy:
            if self.live:
                await next(iter(self.live.values())).stopped.wait()
            else:
                await self._gates.until_free()
            await trio.lowlevel.checkpoint()

    # Making actors, and letting them go. The caller is inside the workflow's gate.

    @trio.lowlevel.enable_ki_protection  # Ctrl-C between two steps of it would leave a file open that nobody has
    async def _make(
        self,
        definition: Workflow[Any, Any],
        workflow_id: str,
        input: object,
        birth: Birth,
        may_create: Callable[[], bool] | None,
    ) -> tuple[Actor | None, Place | None]:
        """Bring the workflow in, or create it; with the place that it was told that it runs in, which the caller gives back."""
        visit = await self.slots.visit()
        place: Place | None = None
        try:
            actor = await self._find(workflow_id)
            if actor is None:
                if may_create is not None and not may_create():
                    return None, None
                place = self._place_at_once(definition, birth)
                actor = await self._create(definition, workflow_id, input, birth, begins=place is not None)
        except BaseException:
            _give_back(place)
            raise
        else:
            actor.move_to(visit)
            return actor, place
        finally:
            _give_back(visit)

    def _place_at_once(self, definition: Workflow[Any, Any], birth: Birth) -> Place | None:
        """A place for a new workflow, if nothing keeps it from being run as soon as it is made."""
        is_limited = self.admission is not None and self.admission.is_limited(definition.name)
        is_timed = birth.start_at_ms is not None or birth.deadline_ms is not None
        is_waiting = is_limited or is_timed or self.is_closing or self.nursery is None
        return None if is_waiting else self._place_nowait()

    async def _find(self, workflow_id: str) -> Actor | None:
        if await self._store.get_row(workflow_id) is None:
            return None
        try:
            return await self._bring_in(workflow_id)
        except WorkflowNotFoundError:  # its creation was never finished
            return None

    async def _create(
        self, definition: Workflow[Any, Any], workflow_id: str, input: object, birth: Birth, *, begins: bool
    ) -> Actor:
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
        inner, is_empty = await self._keeper.create(row)
        driver = CatalogedDriver(inner, self._keeper, row)
        try:
            # The usual case, in which there is nothing to be read; a message may have been there first.
            if is_empty or (
                await driver.get(layout.STATE_KEY) is None and not await driver.list(layout.MAILBOX_PREFIX)
            ):
                activation = Activation.blank(
                    workflow_id, driver, clock=self._clock, step_limiter=self._step_limiter, hooks=self._hooks
                )
            else:
                activation = await self._load(workflow_id, driver)
            activation.create(definition.name, input, definition.function, birth)
            if begins:
                activation.begin_at_once()
            await activation.commit_from_outside()
            return self._admit(driver, activation, definition)
        except BaseException:
            await driver.aclose()
            raise

    async def _bring_in(self, workflow_id: str) -> Actor:
        row = await self._keeper.get(workflow_id)
        if row is None:
            self.mail.not_found(workflow_id)
            raise self.not_found(workflow_id)
        try:
            inner = await self._store.open_driver(workflow_id)
        except NamespaceNotFoundError as error:
            if error.path is not None:
                raise  # there was a file, and somebody took it away
            await self._keeper.delete(workflow_id)
            self.mail.not_found(workflow_id)
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
        await self._keeper.delete(workflow_id)
        self.mail.not_found(workflow_id)
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
        self.mail.admitted(actor)
        return actor

    async def _start_or_retire(self, actor: Actor, place: Place | None = None) -> None:
        """Run it, if it has something to do: here and now if there is a place for it and nobody waits for one.

        The place may have been taken for it before; the caller gives it back, if it is not used.
        """
        try:
            if not actor.can_run:
                self._note_unregistered(actor)
            elif self._is_held(actor):
                pass  # it is woken when its turn comes
            elif not self.is_closing and (place := place or self._place_nowait()) is not None:
                try:
                    await self._start(actor, place)
                finally:
                    _give_back(place)
            else:
                self.dispatcher.want(actor.workflow_id)
        finally:
            await self._retire_if_idle(actor)

    def _place_nowait(self) -> Place | None:
        return None if len(self.dispatcher) else self.slots.take_nowait()

    async def _start(self, actor: Actor, place: Place) -> None:
        workflow_id = actor.workflow_id
        if not actor.can_run:
            self._note_unregistered(actor)
            self._note_undue(actor)
            return
        if self.is_closing or self.nursery is None or self._is_held(actor):
            return
        try:
            has_expired = self._has_expired(actor)
            if (
                not has_expired
                and self.admission is not None
                and self.admission.is_limited(actor.driver.row.workflow_type)
            ):
                await actor.driver.note_begun()
                self.admission.note_begun(actor.driver.row)
            await actor.driver.move_earlier(0)
        except BaseException:
            self._note_unusable(workflow_id)
            raise
        if has_expired:
            actor.activation.expire()  # whatever the clock says from now on: it may have no turn
        self.troubles.clear_of(workflow_id)
        actor.move_to(place)
        actor.is_started = True
        self.activations += 1
        actor.activation.is_forgiven = self.restarts.is_by_storage(workflow_id)
        actor.activation.when_quiet = partial(self._note_idle, actor)
        # In the supervisor's context: that of whoever spawned it or sent it a message may not be there the next time.
        self._context.run(self._start_task, self.nursery, actor)
        if actor.driver.has_duties:
            self.duties.remind(workflow_id)
        self._arrivals.announce(workflow_id)

    def _note_idle(self, actor: Actor) -> None:
        self.passivation.note_idle(actor)
        if len(self.dispatcher):
            self.slots.poke()

    def _note_unregistered(self, actor: Actor) -> None:
        history = actor.activation.history
        if actor.definition is None and not history.state.is_terminal:
            self.troubles[actor.workflow_id] = self.unregistered(history.workflow_type or "")
            self._arrivals.announce(actor.workflow_id)

    def _note_trouble(self, workflow_id: str, error: BaseException, actor: Actor | None = None) -> None:
        self.troubles[workflow_id] = error
        fields = {"workflow_id": workflow_id} if actor is None else actor.log_fields
        trace = None if isinstance(error, PerdureError) else error  # what we did not foresee is shown whole
        if self.restarts.note_fault(workflow_id, error):
            _log.warning(
                "workflow %r was stopped by a fault, and is restarted: %s",
                workflow_id,
                error,
                extra=fields,
                exc_info=trace,
            )
        else:
            _log.warning("workflow %r cannot run: %s", workflow_id, error, extra=fields, exc_info=trace)
        self._arrivals.announce(workflow_id)

    def _note_undue(self, actor: Actor) -> None:
        if not (actor.is_started or actor.activation.is_due):
            self._note_unusable(actor.workflow_id)

    def _note_unusable(self, workflow_id: str) -> None:
        if self.admission is not None:
            self.admission.note_gone(workflow_id)

    def _is_held(self, actor: Actor) -> bool:
        """Whether it waits for its turn among those of its type; it is woken when that comes."""
        admission, row = self.admission, actor.driver.row
        if admission is None or self._has_expired(actor):
            return False
        return admission.holds(row, actor.activation.history.state.value)

    def _has_expired(self, actor: Actor) -> bool:
        """Whether it fails without having begun: its deadline has passed."""
        history = actor.activation.history
        return history.state is WorkflowState.PENDING and has_passed(history, self._clock.now_ms())

    def _start_task(self, nursery: trio.Nursery, actor: Actor) -> None:
        nursery.start_soon(self._run, actor, name=f"workflow {actor.workflow_id!r}")

    @trio.lowlevel.enable_ki_protection
    async def _run(self, actor: Actor) -> None:
        asyncio_home.set(self.asyncio)
        hosted_actor.set(actor)
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
            self.passivation.forget(actor)
            if actor.driver.has_duties and not self.is_closing:
                self.duties.remind(actor.workflow_id)
            self.mail.gone(actor)
            self._hosting.gone(actor)
        if actor.error is not None:
            self._note_trouble(actor.workflow_id, actor.error, actor)
            return
        if actor.is_started:
            self.restarts.forget(actor.workflow_id)
        if actor.driver.is_terminal:
            self.deadlines.forget(actor.workflow_id)
            self.troubles.clear_of(actor.workflow_id)
            if self.on_ended is not None:
                self.on_ended(actor.workflow_id)
            self._arrivals.announce(actor.workflow_id)
        elif not self.is_closing:
            self._expect(actor)

    def _expect(self, actor: Actor) -> None:
        """See that a workflow that left memory, and has not ended, comes back when it wants to."""
        wake_ms = actor.driver.row.next_wake_ms
        deadline_ms = actor.activation.history.deadline_ms
        if self.admission is not None and not actor.is_started and self.admission.keeps(actor.driver.row):
            if deadline_ms is not None:
                self.deadlines.note(actor.workflow_id, deadline_ms)
        elif wake_ms:
            # One whose code is not here and that is due already would be found, and left, for ever.
            if actor.definition is not None or wake_ms > self._clock.now_ms():
                self._on_dormant(wake_ms)
        elif (wake_ms == 0 and actor.is_passivated) or (actor.is_started and actor.is_mail_wanted):
            # It is due already, or the message came while it was being evicted, and counts as its next one.
            self.dispatcher.want(actor.workflow_id)
        elif actor.is_started and deadline_ms is not None:
            self.deadlines.note(actor.workflow_id, deadline_ms)

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


def _give_back(place: Place | None) -> None:
    """Give back a place that was taken, unless an actor owns it by now."""
    if place is not None and not place.is_owned:
        place.give_back()
