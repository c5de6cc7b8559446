"""One workflow in memory: its history, its mailbox, and the run of its function.

1. An activation is the only writer of its namespace while it lives. Everything that changes the workflow, from inside
   (operations) or outside (message, wake, cancel, recover), changes `history` here and commits.
2. It is closed once, for one reason (`Closing`); from then on the context is sealed, and what the function returns or
   raises is discarded. A stronger reason replaces a weaker one.
3. Yield mode is live mode that closes (`PARKED`) once every lane is parked and that is durable. So both modes
   write the same history.
4. An error of the storage is not an outcome of the workflow: it closes the activation, and whoever runs it gets the error.
5. `state` is durable as `running` before the first new step function of an activation, with the count of activations
   that recorded nothing; recording, parking, eviction, shutdown and a fault clear the count. So a crash loop ends
   (promise 9). A host that is about to run a new workflow has it say so in the batch that creates it (`begin_at_once`).
6. In every durable state something brings a workflow back: it is `pending`, `running` or `rolling_back` (recovered at start),
   or it is `sleeping` with its alarm armed, or it waits for a message, whose arrival activates it. Hence the batch that takes a
   message or ends a sleep also sets `running`.
7. A host may let parks be *late*: where nothing else is to be written, `running` stays durable, which brings the
   workflow back as well, until the host asks (`settled`), the activation is left, or some other batch is written after
   that. So a workflow that is sent messages one after another does not pay for a park between each two.
   Rejected: to leave the park in `pending`. The next message's batch would write that the workflow sleeps, and the one
   after it that it does not.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Final, NoReturn

import trio

from perdure.storage import Batch, Driver, FormatVersionError, encode_value, layout
from perdure.storage.errors import DecodeError, EncodeError, StorageError
from perdure.workflow.arrivals import Arrivals
from perdure.workflow.birth import NOTHING_SPECIAL, Birth
from perdure.workflow.clock import Clock, SystemClock
from perdure.workflow.committer import Committer
from perdure.workflow.deadline import call_until_deadline, deadline_error, no_later
from perdure.workflow.errors import (
    CrashLoopError,
    FaultError,
    SuspendSignal,
    UserCancellationError,
    ValueTypeError,
)
from perdure.workflow.failures import causes_of, describe, ends_process, info_to_map
from perdure.workflow.history import FORMAT_VERSION, History, Path
from perdure.workflow.hooks import Hooks, WorkflowErrorEvent
from perdure.workflow.host import Host
from perdure.workflow.ids import IdGenerator, Uuid7Generator, new_seed
from perdure.workflow.logs import fields_of
from perdure.workflow.mailbox import MAILBOX_LIMIT, Letter, Mailbox
from perdure.workflow.readers import Readers
from perdure.workflow.reads import read_message_ids
from perdure.workflow.requests import Requests
from perdure.workflow.scope import Operation, Scope
from perdure.workflow.states import WorkflowEvent, WorkflowState
from perdure.workflow.typed import decode_input, encode_input, returns, round_trip
from perdure.workflow.waits import Parking, Signal, Wait, merge
from perdure.workflow.watch import Watch

if TYPE_CHECKING:
    from perdure.workflow.context import Context
    from perdure.workflow.requests import Askers
    from perdure.workflow.senders import Senders
    from perdure.workflow.step import Compensation
    from perdure.workflow.types import RunMode

__all__ = ["CRASH_LOOP_LIMIT", "USER_OVERHEAD_BYTES", "Activation", "Closing"]

CRASH_LOOP_LIMIT: Final = 10
"""How many activations in a row may begin a step and record nothing."""

USER_OVERHEAD_BYTES: Final = 4096
"""What an entry takes beside the user's value, at most: id, location and names."""

_REPLAYS_PER_CHECKPOINT: Final = 64

_log = logging.getLogger("perdure.workflow")


class Closing(enum.IntEnum):
    """Why an activation is over, weakest first."""

    PARKED = 1
    EVICTED = 2
    EXPIRED = 3
    USER_CANCELLED = 4
    FAULT = 5
    CANCELLED = 6
    STORAGE = 7


class Activation:
    """A workflow that is loaded, and perhaps running.

    Attributes:
        history: What is recorded.
        mailbox: What waits to be read.
        requests: Which of the messages are requests, and which of these were answered.
        user_bytes_max: Largest user value, encoded, in bytes.
        closing: Why it is over, or `None` while it is not.
        waiting: What it waits for, once parked.
        lanes: How many lanes there are.
        busy: How many of them run: neither parked nor waiting for their branches.
        must_commit_before_step: Whether `begin_step` must be awaited before a new step function runs.
        failure: The exception that failed it, if that happened in this process.
        collected: While the function is run for its handlers only: what would undo the steps that it has passed.
        held: While it is only seen whether the code fits what is recorded: the paths of the steps that would have been begun,
            in order, none of which is; the lanes come to rest there. `None` otherwise.
        watch: Tells hooks what became durable, if there are any.
        is_forgiven: Whether the activation before this one ended for a reason that is known not to lie in the workflow, so
            that this one is not counted in its place.
        host: Whoever hosts the workflow, or `None`.
        arrivals: What is remembered of the messages that other workflows sent.
        mailbox_limit: How many messages the mailbox may hold.
        senders: Those who wait for room in it, where senders may wait.
        askers: Those who wait for replies, where senders may wait.
        when_quiet: Called when every lane has parked and that is recorded.
        quiet_since: Since when every lane is parked (`trio.current_time()`), or `None` while one runs.
        when_parked_late: Called when the workflow parks late; the host then sees that it does not stay so for long. `None`:
            every park is durable before the workflow waits.
        is_parked_late: Whether the workflow waits and `running` is durable.
    """

    def __init__(
        self,
        driver: Driver,
        history: History,
        mailbox: Mailbox,
        requests: Requests,
        *,
        clock: Clock,
        ids: IdGenerator,
        step_limiter: trio.CapacityLimiter | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.driver = driver
        self.history = history
        self.mailbox = mailbox
        self.requests = requests
        self.clock = clock
        self.ids = ids
        self.step_limiter = step_limiter
        self.user_bytes_max: int = driver.value_bytes_max - USER_OVERHEAD_BYTES
        self.closing: Closing | None = None
        self.waiting: Wait | None = None
        self.failure: BaseException | None = None
        self.collected: list[Compensation] | None = None
        self.held: list[Path] | None = None
        self.busy: int = 1
        self.lanes: int = 1
        self.mode: RunMode = "yield"
        self.is_running: bool = False
        self.is_draining: bool = False
        self._is_held_back = False
        self._resting: dict[object, int] = {}
        self.is_forgiven: bool = False
        self.host: Host | None = None
        self.arrivals: Arrivals = Arrivals(history.pending)
        self.mailbox_limit: int = MAILBOX_LIMIT
        self.senders: Senders | None = None
        self.askers: Askers | None = None
        self.when_quiet: Callable[[], None] | None = None
        self.quiet_since: float | None = None
        self.when_parked_late: Callable[[], None] | None = None
        self.is_parked_late: bool = False
        self._error: BaseException | None = None
        self._interruption: BaseException | None = None
        self.watch: Watch | None = None if hooks is None else Watch(hooks, history)
        self._committer = Committer(driver, history.pending, is_alone=True, watch=self.watch)
        self._cancel_scope = trio.CancelScope()
        self._parked: dict[Parking, None] = {}
        self._readers = Readers()
        self._by_signal: dict[Signal, dict[Parking, None]] = {}
        self._closed = trio.Event()
        self._has_progressed = False
        self._has_begun_steps = False
        self._leaves_parked = False
        self._is_eviction_due = False
        self.must_commit_before_step: bool = True
        self._holds = 0
        self._replays = 0

    @classmethod
    async def load(
        cls,
        workflow_id: str,
        driver: Driver,
        *,
        clock: Clock | None = None,
        ids: IdGenerator | None = None,
        step_limiter: trio.CapacityLimiter | None = None,
        hooks: Hooks | None = None,
    ) -> Activation:
        """Read a workflow. Writes nothing.

        Raises:
            FormatVersionError: A newer Perdure wrote it.
            DecodeError: What is stored is damaged.
        """
        clock = clock or SystemClock()
        ids = ids or Uuid7Generator(clock)
        with _naming(workflow_id):
            history = await History.load(workflow_id, driver)
            _check_format(history)
            ids.start_after(history.last_entry_id)
            mailbox = await Mailbox.load(driver, history.pending)
            if not driver.atomic_batch:
                # The batch that recorded a message may have been cut before it took the message out of the mailbox.
                mailbox.drop(read_message_ids(history))
            requests = await Requests.load(driver, history.pending)
        return cls(driver, history, mailbox, requests, clock=clock, ids=ids, step_limiter=step_limiter, hooks=hooks)

    @classmethod
    def blank(
        cls,
        workflow_id: str,
        driver: Driver,
        *,
        clock: Clock,
        step_limiter: trio.CapacityLimiter | None = None,
        hooks: Hooks | None = None,
    ) -> Activation:
        """What `load` gives for a namespace that is known to be empty, as it was just made."""
        history = History(workflow_id)
        mailbox, requests = Mailbox(history.pending), Requests(history.pending)
        ids = Uuid7Generator(clock)
        return cls(driver, history, mailbox, requests, clock=clock, ids=ids, step_limiter=step_limiter, hooks=hooks)

    @classmethod
    async def load_for_mail(
        cls, driver: Driver, *, clock: Clock | None = None, mailbox_limit: int = MAILBOX_LIMIT
    ) -> Activation:
        """Read only what sending a message takes, whatever the length of the history. Not to be run.

        Raises:
            FormatVersionError, DecodeError: As `load`.
        """
        clock = clock or SystemClock()
        workflow_id = (await driver.get(layout.WORKFLOW_ID_KEY) or b"").decode(errors="replace")
        with _naming(workflow_id):
            history = await History.load_fields(workflow_id, driver)
            _check_format(history)
            mailbox = await Mailbox.load_end(driver, history.pending, limit=mailbox_limit)
            requests = await Requests.load(driver, history.pending)
        activation = cls(driver, history, mailbox, requests, clock=clock, ids=Uuid7Generator(clock))
        activation.mailbox_limit = mailbox_limit
        return activation

    # Creation and storage.

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever started in this namespace."""
        return self.history.input is None

    @property
    def is_collecting(self) -> bool:
        """Whether the function is run for its handlers only: it is told what is recorded, and does nothing new."""
        return self.collected is not None

    @property
    def is_due(self) -> bool:
        """Whether it may be begun: it was begun before, or need not wait for its start any more."""
        history = self.history
        return (
            history.state is not WorkflowState.PENDING
            or history.alarm_ms is None
            or self.clock.now_ms() >= history.alarm_ms
        )

    @property
    def is_full(self) -> bool:
        """Whether a message has to wait: there is no room in the mailbox, or others wait already."""
        senders = self.senders
        return self.mailbox.size >= self.mailbox_limit or (
            senders is not None and senders.are_waiting(self.history.workflow_id)
        )

    def knows(self, message_id: str) -> bool:
        """Whether a message with this id was sent before, as far as that is remembered; `load_known_ids` comes first."""
        return self.mailbox.is_known(message_id) or self.requests.is_known(message_id)

    @property
    def takes_mail(self) -> bool:
        """Whether messages may be put into the mailbox here: whatever closed it, it was neither faulty code nor the storage."""
        return self.closing is None or self.closing <= Closing.EVICTED

    @property
    def has_wanted_mail(self) -> bool:
        """Whether the mailbox holds what the parked function waits for; any mail at all, if it has not parked here."""
        waiting = self.waiting
        return any(waiting is None or waiting.wants(name) for name in self.mailbox.names())

    def create(
        self,
        workflow_type: str,
        input_value: object,
        function: Callable[..., Any] | None = None,
        birth: Birth = NOTHING_SPECIAL,
    ) -> None:
        """Begin a new workflow, with an input for its function; durable with the next commit.

        Raises:
            InvalidArgumentError: The input does not fit the function's annotation.
            EncodeError: It cannot be stored.
        """
        data = encode_input(function, input_value, bytes_max=self.user_bytes_max)
        self.history.create(workflow_type, data, new_seed(self.history.workflow_id, self.ids), birth)

    def begin_at_once(self) -> None:
        """Say with the creation that the workflow runs, as it is about to: its first step then needs no commit before it.

        So this activation is counted before it is known that it begins a step. Should the process die, or the host close,
        before the function is run, then one of the `CRASH_LOOP_LIMIT` activations is that one; it can be only the first.
        """
        assert self.history.state is WorkflowState.PENDING, "it is just being created"
        self._note_begun()
        self.must_commit_before_step = False

    async def commit(self) -> None:
        """Make everything recorded durable; for operations.

        Raises:
            SuspendSignal: The storage failed, and the activation is over.
        """
        try:
            await self._committer.commit()
        except Exception as error:
            self.close(Closing.STORAGE, error)
            raise SuspendSignal from error

    def commit_nowait(self) -> bool:
        """`commit`, where it can be done without waiting; returns whether it was."""
        try:
            return self._committer.commit_nowait()
        except Exception as error:
            self.close(Closing.STORAGE, error)
            raise SuspendSignal from error

    async def commit_from_outside(self) -> None:
        """The same for callers outside of the workflow, who get the storage's error."""
        with self._telling_storage_errors():
            await self._committer.commit()

    @contextmanager
    def _telling_storage_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self.close(Closing.STORAGE, error)
            raise

    async def settled(self) -> None:
        """Return once `history` holds nothing that is not durable, a late park included, so that it can be told to the outside.

        Raises:
            StorageError: It cannot be made durable; what is stored has to be read again.
        """
        self._record_late_park()
        with self._telling_storage_errors():
            await self._committer.settle()

    # Closing.

    def close(self, reason: Closing, error: BaseException | None = None) -> None:
        if self.is_parked_late:
            if reason <= Closing.USER_CANCELLED:
                self._leaves_parked = True
                self._record_late_park()  # it leaves as one that waits
            self.is_parked_late = False
        if self.closing is None or reason > self.closing:
            self.closing = reason
            self._error = error
            if reason is Closing.FAULT:
                self.history.pending.keep_mail()  # the code was wrong: nothing that it recorded is written
                if self.watch is not None:
                    self.watch.forget_failures()
        self._cancel_scope.cancel()
        # A scope of the user's may hold that off (`shield=True`): what waits durably is told all the same.
        self._closed.set()
        for parking in self._parked:
            parking.wake()

    def fault(self, error: FaultError) -> None:
        """The code cannot run this workflow: seal the context and write nothing more."""
        self.close(Closing.FAULT, error)

    def note_cancelled(self, name: str, operation: str) -> None:
        """An operation was cancelled: if not by us, then by the workflow's own scope, or from outside; `run` tells which."""
        if self.closing is None:
            self.close(Closing.USER_CANCELLED, _user_cancellation(name, operation, "ended"))

    def interrupt(self, error: BaseException) -> None:
        """A KeyboardInterrupt or the like came out of an operation: the process is ending, and the run with it.

        No `finally` of the workflow's records anything on the way out: it would come before the interrupted operation.
        """
        if self._interruption is None:
            self._interruption = error
        self.close(Closing.EVICTED)

    def check_may_record(self) -> None:
        """An operation in progress has an outcome: is it to be recorded?

        Raises:
            SuspendSignal: No: nothing is recorded after a fault, a cancellation or a storage error.
        """
        if self.closing is not None and self.closing > Closing.EVICTED:
            raise SuspendSignal

    # What operations tell.

    def progress(self) -> None:
        """Something was recorded that another run would not have to do again."""
        if self.closing is not None:
            self.check_may_record()
        self._has_progressed = True
        if self.history.idle_activations:
            self.history.set_idle_activations(0)
        if self.history.state is not WorkflowState.RUNNING:
            self.history.apply(WorkflowEvent.RUN)

    def hold_steps(self) -> None:
        """What was just recorded must be durable before a step function runs (a parent before its children)."""
        self._holds += 1
        self.must_commit_before_step = True

    async def begin_step(self) -> None:
        """Make durable what must precede a new step function; for the first one, that the workflow runs."""
        if not self._has_begun_steps:
            self._note_begun()
        holds = self._holds
        await self.commit()
        if holds == self._holds:  # until here branches that begin meanwhile wait for the same commit
            self.must_commit_before_step = False

    def _note_begun(self) -> None:
        self._has_begun_steps = True
        if not self._has_progressed and not self.is_forgiven:
            self.history.set_idle_activations(self.history.idle_activations + 1)
        if self.history.state is not WorkflowState.RUNNING:
            self.history.apply(WorkflowEvent.RUN)

    async def replayed(self) -> None:
        """An operation returned what is recorded. A checkpoint, but not every time, so that replay is quick."""
        self._replays += 1
        if self._replays % _REPLAYS_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()

    async def park(self, wait: Wait, operation: Operation) -> None:
        """Wait durably. Returns when the wait ended; what was pending at the call is durable then.

        Raises:
            UserCancellationError: A scope of the user's own with a deadline surrounds the wait. It could fire in one run
                and not in another, and never would in yield mode.
        """
        self.check_may_record()
        await trio.lowlevel.checkpoint_if_cancelled()  # by a scope of the user's that has fired, in yield mode too
        if self._user_deadline() < inf:
            raise _user_cancellation(operation.name, operation.operation, "is around")
        lane = operation.scope.lane
        parking = Parking(wait)
        self._parked[parking] = None
        self._readers.add(parking)
        if wait.signal is not None:
            self._by_signal.setdefault(wait.signal, {})[parking] = None
        lane.is_parked = True
        self.busy -= 1
        goes_on = False
        try:
            await self.settle()
            await parking.until_woken(self.clock)
            goes_on = lane.is_open
        finally:
            self.busy += 1
            self.quiet_since = None
            lane.is_parked = False
            del self._parked[parking]
            self._readers.discard(parking)
            if wait.signal is not None:
                self._forget_signal(wait.signal, parking)
            if not goes_on and parking.is_woken:
                self.pass_on(wait.names)  # it takes nothing
        if self.closing is not None:
            raise SuspendSignal
        if not lane.is_open:
            await lane.leave()
        self.unpark()

    def unpark(self) -> None:
        """The workflow goes on: a late park need not be written any more, one that was is taken back with the next commit."""
        self.is_parked_late = False
        if self.history.state is WorkflowState.SLEEPING:
            self.history.apply(WorkflowEvent.RUN)

    async def settle(self) -> None:
        """A lane has parked or ended: make that durable and, if by it all are parked, that the workflow waits.

        Where parks may be late, the latter is recorded some time.
        """
        was_quiet = self._is_quiet()
        if was_quiet and not self._is_held_back:  # else a lane wants to go on, and the workflow stays `running`
            self.waiting = self._merged_wait()
            if self.when_parked_late is not None and self._may_park_late():
                self.is_parked_late = True
                self.when_parked_late()
            else:
                self._record_park(self.waiting)
        if not self.is_parked_late:
            await self.commit()
        if was_quiet and self._is_quiet():
            if self.is_draining:
                self.evict()
            elif self.mode == "yield":
                self.close(Closing.PARKED)
            else:
                self.quiet_since = trio.current_time()
                if self.when_quiet is not None:
                    self.when_quiet()

    def _merged_wait(self) -> Wait:
        """What the parked lanes wait for, and no longer than until the workflow's deadline."""
        waits = [parked.wait for parked in self._parked]
        if (deadline_ms := no_later(self.history, None)) is not None:
            waits.append(Wait(deadline_ms))
        return merge(waits)

    def _may_park_late(self) -> bool:
        """Whether `running`, and no activation without progress, is durable, and nothing is to be written but names.

        A name is registered when an operation asks for it, and matters once something is recorded under it.
        """
        history = self.history
        return (
            history.state is WorkflowState.RUNNING
            and history.idle_activations == 0
            and not self._committer.is_writing
            and history.pending.holds_only(layout.NAMES_PREFIX)
            and self.mode == "live"
            and not self.is_draining
        )

    def _record_park(self, wait: Wait) -> None:
        self.is_parked_late = False
        self.history.apply(WorkflowEvent.PARK)
        self.history.set_alarm(wait.deadline_ms)
        self.history.set_idle_activations(0)

    def _record_late_park(self) -> None:
        if self.is_parked_late and self.waiting is not None:
            self._record_park(self.waiting)

    async def drained(self) -> NoReturn:
        """Let nothing begin any more in a workflow that leaves: wait until the last lane has come to rest, and be evicted."""
        self._is_held_back = True
        self.busy -= 1
        try:
            if self.busy == 0:
                self.evict()
            await self._closed.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            self.busy += 1
        raise SuspendSignal

    async def rest(self, whose: object) -> NoReturn:
        """`drained()` for what may be several tasks of one lane, told by what is given; cancelled, the lane goes on."""
        self._resting[whose] = self._resting.get(whose, 0) + 1
        try:
            if self._resting[whose] == 1:
                self.busy -= 1
                self._is_held_back = True
                if self.busy == 0:
                    self.evict()
            await self._closed.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            self._resting[whose] -= 1
            if not self._resting[whose]:
                del self._resting[whose]
                self.busy += 1
        raise SuspendSignal

    def fork(self, lanes: int) -> None:
        """A lane now waits for this many new ones."""
        self.busy += lanes - 1
        self.lanes += lanes
        self._committer.is_alone = False

    def end_lane(self, *, hands_over: bool) -> None:
        """A branch is over; `hands_over` if the lane that waits for it is to run from here on."""
        if not hands_over:
            self.busy -= 1
        self.lanes -= 1
        self._committer.is_alone = self.lanes == 1

    def _user_deadline(self) -> float:
        """The earliest deadline of the scopes that the workflow's own code has opened around the caller."""
        if trio.current_effective_deadline() == inf:
            return inf  # the usual case, at a fraction of the cost
        # For this moment the scopes outside of the run do not count; nothing else runs meanwhile.
        self._cancel_scope.shield = True
        try:
            return trio.current_effective_deadline()
        finally:
            self._cancel_scope.shield = False

    @property
    def is_at_rest(self) -> bool:
        """Whether every lane is parked, and none was woken and is about to go on."""
        return self.quiet_since is not None and self._is_quiet()

    def _is_quiet(self) -> bool:
        return self.busy == 0 and not any(parking.is_woken for parking in self._parked)

    # For what the outside asks for (`control.py`).

    def offer(self, letters: Iterable[Letter]) -> None:
        """Let readers see messages that are durable now, and wake whoever waits for one."""
        for letter in letters:
            name = letter.message.name
            self.mailbox.offer(letter)
            if self._readers:
                self._readers.wake(name, self.mailbox.count_of(name))

    def pass_on(self, names: Iterable[str] | None) -> None:
        """Whoever waited for messages of these names (`None`: of any) has taken what it takes: wake others for what is left."""
        if self._readers:
            for name in list(self.mailbox.names()) if names is None else names:
                self._readers.wake(name, self.mailbox.count_of(name))

    def awaits(self, signal: Signal) -> bool:
        """Whether a branch is parked until this is told."""
        return signal in self._by_signal

    def signal(self, signal: Signal) -> None:
        """Wake whoever waits for this."""
        for parking in self._by_signal.get(signal, ()):
            parking.wake()

    def _forget_signal(self, signal: Signal, parking: Parking) -> None:
        waiting = self._by_signal[signal]
        del waiting[parking]
        if not waiting:
            del self._by_signal[signal]

    def make_room(self, count: int) -> None:
        """It is durable that so many messages were read: let as many in that wait for room."""
        self.mailbox.make_room(count)
        if self.host is None or not self.host.has_room(self.history.workflow_id, count):
            self.let_in()

    def let_in(self) -> None:
        """Let as many in as there is room for of those who wait for it outside of workflows."""
        if self.senders is not None:
            self.senders.let_in(self)

    def answered(self, request_id: str, reply: bytes) -> None:
        """A reply was recorded and the batch written that was to hold it: tell whoever waits for it.

        Nobody is told where the batch may have been written without it, which whoever loads the workflow next will see.
        """
        if self.askers is not None and self.takes_mail:
            self.askers.answer(self.history.workflow_id, request_id, reply)

    def wake_parked(self) -> None:
        """Let go on what `wake()` ends: sleeps and the pauses before retries."""
        for parking in list(self._parked):
            if parking.wait.wakeable:
                parking.wake()

    def arm_if_dormant(self) -> None:
        """Arm the alarm for now if no run will see what was just recorded; durable with the next commit.

        That of a workflow that is to start later stays: it sees what was recorded then.
        """
        if not self.is_due:
            return
        if not self.is_running or self.closing is not None:
            now_ms = self.clock.now_ms()
            alarm_ms = self.history.alarm_ms
            self.history.set_alarm(now_ms if alarm_ms is None else min(alarm_ms, now_ms))

    def evict(self) -> None:
        """Make the function unwind; what is recorded stays, and the workflow can be run again elsewhere."""
        self._is_eviction_due = True  # should it be unwinding for its deadline, it is not to be rolled back here
        self.close(Closing.EVICTED)

    def expire(self) -> None:
        """The workflow's deadline has come: make the function unwind; the workflow fails then."""
        self.close(Closing.EXPIRED)

    def drain(self) -> None:
        """Evict the workflow as soon as no step function runs: at once if it waits, else before its next operation."""
        self.is_draining = True
        if self.busy == 0:
            self.evict()

    # The run.

    async def run(self, function: Callable[[Context, Any], Awaitable[Any]], *, mode: RunMode) -> None:
        """Run the function until it ends, parks (in yield mode) or is closed; `history.state` says where it stands then.

        Cancellation from outside is an eviction.

        Raises:
            FaultError: The code cannot run this workflow; its state is unchanged.
            StorageError: The storage failed; what it holds has to be read again.
        """
        from perdure.workflow.rollback import roll_back

        if self.history.state.is_terminal:
            return
        self.mode = mode
        self.is_running = True
        if _log.isEnabledFor(logging.DEBUG):
            state = self.history.state.value
            _log.debug(
                "workflow %r is activated; it is %s", self.history.workflow_id, state, extra=fields_of(self.history)
            )
        try:
            if self.history.idle_activations >= CRASH_LOOP_LIMIT:
                await self._end_crash_loop()
                return
            if self.history.state is not WorkflowState.ROLLING_BACK:
                value, error = await call_until_deadline(self, function)
                if self.closing is None:
                    await self._end(function, value, error)
                elif self.closing is Closing.EXPIRED:
                    await self._end_expired()
            if self.history.state is WorkflowState.ROLLING_BACK and self.closing is None:
                await roll_back(self, function)
            await self._settle_closing()
        except BaseException as error:
            if self.closing is None:
                self.close(Closing.EVICTED)
            await self._leave(error)
            raise
        finally:
            self.is_running = False

    async def call(self, function: Callable[[Context, Any], Awaitable[Any]]) -> tuple[object, BaseException | None]:
        """Run the function once, from the top; returns what it returned or raised, which counts unless `closing` is set.

        Raises:
            FaultError, StorageError: As `run`.
        """
        from perdure.workflow.context import Context

        scope = Scope(self, (), self.history.root)
        try:
            returns(function)  # an annotation that cannot be used is told before anything runs
            input_value = decode_input(function, self.history.input)
        except FaultError as fault:
            self.fault(fault)
            raise
        value, error = await self.guarded(lambda: function(Context(scope), input_value))
        if self.closing is None:
            try:
                scope.close(cause=error)
                if isinstance(error, FaultError):
                    raise error  # of something other than an operation: current_step() outside of a step, say
            except FaultError as fault:
                self.fault(fault)
                raise
        return value, error

    async def guarded(self, call: Callable[[], Awaitable[object]]) -> tuple[object, BaseException | None]:
        """Await what runs code of the user's, until it ends or the activation is closed, and settle why that was.

        Returns:
            What it returned or raised; this counts unless `closing` is set.

        Raises:
            FaultError, StorageError: As `run`.
        """
        value: object = None
        error: BaseException | None = None
        self._cancel_scope = trio.CancelScope()
        if self.closing is not None:
            self._cancel_scope.cancel()
        with self._cancel_scope:
            try:
                value = await call()
            except SuspendSignal:
                assert self.closing is not None or self.is_collecting, "only a closed context raises the signal"
            except Exception as raised:
                error = raised
            except BaseExceptionGroup as group:
                # Not an outcome: either we closed, and signals came out of the user's nursery, or the process is ending.
                _, rest = group.split((SuspendSignal, Exception))
                if rest is not None:
                    raise rest from None
        if self._interruption is not None:
            raise self._interruption  # a signal out of the workflow's own `finally` may have taken its place
        await self._settle_closing()
        return value, error

    async def _end_crash_loop(self) -> None:
        from perdure.workflow.rollback import end_rollback

        error = CrashLoopError(
            f"the workflow was activated {self.history.idle_activations} times without recording anything, so a step seems "
            "to end the process each time; mend it, then call recover()"
        )
        if self.history.state is WorkflowState.ROLLING_BACK:
            await end_rollback(self, describe(error))
        else:
            await self._fail(error)

    async def _end_expired(self) -> None:
        """Fail a workflow whose function has unwound at its deadline. Where it is rolled back, that is of the same activation."""
        self.closing = None
        self._closed = trio.Event()
        self.waiting = None
        await self._fail(deadline_error(self.history))
        if self._is_eviction_due:
            self.evict()

    async def _settle_closing(self) -> None:
        if self.closing is Closing.USER_CANCELLED:
            await trio.lowlevel.checkpoint_if_cancelled()  # cancelled from outside after all: an eviction
            self.close(Closing.FAULT, self._error)
        match self.closing:
            case None | Closing.PARKED | Closing.EXPIRED:
                pass
            case Closing.CANCELLED:
                await self.commit_from_outside()  # not told to anybody before it is durable
            case Closing.EVICTED:
                await self._leave()
            case Closing.USER_CANCELLED | Closing.FAULT | Closing.STORAGE:
                assert self._error is not None, "these reasons come with an error"
                raise self._error

    async def _end(
        self, function: Callable[[Context, Any], Awaitable[Any]], value: object, error: BaseException | None
    ) -> None:
        if error is None:
            try:
                what = "the workflow's result"
                data, _ = round_trip(returns(function), value, bytes_max=self.user_bytes_max, what=what, root="output")
            except (EncodeError, ValueTypeError) as unstorable:
                error = unstorable
            else:
                self.history.apply(WorkflowEvent.COMPLETE)
                self.history.set_output(data)
        if error is not None:
            await self._fail(error)
            return
        self.history.set_alarm(None)
        self.history.set_idle_activations(0)
        await self.commit_from_outside()
        _log.info("workflow %r completed", self.history.workflow_id, extra=fields_of(self.history))

    async def _fail(self, error: BaseException) -> None:
        self.failure = error
        info = describe(error)
        is_rolled_back = bool(self.history.checkpoints) and not isinstance(error, CrashLoopError)
        self.history.apply(WorkflowEvent.ROLL_BACK if is_rolled_back else WorkflowEvent.FAIL)
        self.history.set_error(encode_value(info_to_map(info)), causes_of(error))
        if self.watch is not None:
            self.watch.note(WorkflowErrorEvent(self.history.workflow_id, info))
        self.history.set_alarm(None)
        self.history.set_idle_activations(0)
        await self.commit_from_outside()
        _log.warning(
            "workflow %r failed%s: %s",
            self.history.workflow_id,
            ", and is rolled back" if is_rolled_back else "",
            info,
            extra=fields_of(self.history),
        )

    async def _leave(self, error: BaseException | None = None) -> None:
        """Leave a workflow that goes on elsewhere: keep what was recorded (unless the code was wrong).

        That is no crash, and is not counted as one, unless the workflow's own code ends the process (`SystemExit`), or ours
        has a bug.

        Raises:
            StorageError: A late park could not be written, so that nobody would know when to bring the workflow back.
        """
        try:
            if self.closing is Closing.FAULT and self._has_begun_steps:
                await self._committer.commit_alone(Batch(deletes=[layout.IDLE_ACTIVATIONS_KEY]))
            elif self.closing is Closing.EVICTED or self.closing is Closing.USER_CANCELLED:
                is_counted = isinstance(error, Exception) or (
                    error is not None and ends_process(error, KeyboardInterrupt)
                )
                if not is_counted:
                    self.history.set_idle_activations(0)
                elif not self._has_progressed and not self._has_begun_steps:
                    self.history.set_idle_activations(self.history.idle_activations + 1)
                await self._committer.commit()
        except StorageError as failure:
            _log.warning(
                "workflow %r: not everything could be written when it left: %s",
                self.history.workflow_id,
                failure,
                extra=fields_of(self.history),
            )
            if self._leaves_parked and error is None:
                self.close(Closing.STORAGE, failure)
                raise


@contextmanager
def _naming(workflow_id: str) -> Generator[None]:
    """Whoever meets damage is told whose it is."""
    try:
        yield
    except DecodeError as error:
        error.message = f"workflow {workflow_id!r} cannot be read, as what is stored of it is damaged: {error.message}"
        raise


def _check_format(history: History) -> None:
    if history.format_version > FORMAT_VERSION:
        raise FormatVersionError(
            f"workflow {history.workflow_id!r} was written in format {history.format_version}; this Perdure knows up to "
            f"{FORMAT_VERSION}. Upgrade Perdure to run it",
            found=history.format_version,
            supported=FORMAT_VERSION,
        )


def _user_cancellation(name: str, operation: str, what: str) -> UserCancellationError:
    return UserCancellationError(
        f"a cancel scope in the workflow's own code {what} ctx.{operation}({name!r}, ...); whether and when it fires cannot "
        "be replayed. Use the timeout= of the operation, or ctx.race with a ctx.sleep",
        name=name,
    )
