"""Running one workflow on one driver: `run_workflow`, `start_workflow`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar, cast

import trio

from perdure.storage import Driver
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.birth import NOTHING_SPECIAL, Birth
from perdure.workflow.checks import check_driver, check_methods, check_time_ms, check_workflow_id
from perdure.workflow.children import children_of
from perdure.workflow.clock import Clock, SystemClock
from perdure.workflow.context import Context
from perdure.workflow.control import cancel, recover, wake
from perdure.workflow.definition import Workflow, definition_of
from perdure.workflow.errors import (
    ErrorInfo,
    InvalidArgumentError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowSuspendedError,
)
from perdure.workflow.handle import WorkflowHandle
from perdure.workflow.history import History
from perdure.workflow.hooks import ErrorHook, HistoryHook, Hooks, make_hooks
from perdure.workflow.ids import IdGenerator, new_seed
from perdure.workflow.local_site import LocalSite
from perdure.workflow.mailbox import MAILBOX_LIMIT
from perdure.workflow.post import check_clock
from perdure.workflow.snapshot import error_of, history_entries
from perdure.workflow.states import WorkflowState
from perdure.workflow.typed import decode_output
from perdure.workflow.types import ANY_MESSAGE, ChildInfo, HistoryEntry, Message, RunMode, WorkflowResult
from perdure.workflow.waits import Wait

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

__all__ = ["ending_error", "run_workflow", "start_workflow"]


async def run_workflow(
    workflow_id: str,
    fn: Callable[[Context, InputT], Awaitable[OutputT]],
    input: InputT,
    driver: Driver,
    *,
    mode: RunMode = "yield",
    deadline: float | datetime | None = None,
    on_history_updated: HistoryHook | None = None,
    on_error: ErrorHook | None = None,
    clock: Clock | None = None,
    ids: IdGenerator | None = None,
) -> WorkflowResult[OutputT]:
    """Run a workflow on its namespace, from the top, over what is recorded.

    In `yield` mode it returns when the workflow ends or has to wait; by then its state, and the alarm at
    `sleep_until`, are durable. Run it again when the time has come or a message was sent. In `live` mode it returns when
    the workflow ends. Nothing else may run the workflow meanwhile.

    Cancellation is an eviction: the function unwinds, what was recorded stays, and it can be run again.

    Args:
        workflow_id: Any non-empty text; part of what steps derive their idempotency keys from is stored with it.
        fn: `async def fn(ctx, input)`, or what `@workflow` made of it. Input and output are typed by its annotations.
        input: Kept from the first run; later runs get the stored one, whatever is passed.
        driver: The workflow's namespace; it stays open.
        mode: `yield` or `live`.
        deadline: When the workflow fails with `WorkflowDeadlineError` unless it has ended: seconds from now, or an aware
            `datetime`. Kept from the first run, whatever is passed later.
        on_history_updated: Called with a `HistoryUpdated` for each commit that changed history or state, after it.
        on_error: Called with a `StepErrorEvent`, `RollbackErrorEvent` or `WorkflowErrorEvent` for each failure, once it is
            durable, and not again on a replay. Either may be a plain function, which is to be quick, or a coroutine
            function, which runs besides; what they raise is logged. A crash before the call loses it.
        clock: Where the time comes from; the system's clock unless given.
        ids: Where entry ids come from; UUIDs of version 7 unless given.

    Raises:
        WorkflowFailedError: It ended as failed, now or in an earlier run.
        WorkflowCancelledError: It was cancelled.
        FaultError: The code cannot run it (divergence, misuse); nothing was written, right code goes on. Among them
            `InvalidArgumentError`, when the input does not fit its annotation, and `StoredValueError`, when what is stored
            no longer does.
        EncodeError: The input cannot be stored; nothing was written.
        StorageError: The storage failed; run it again with a driver that works.
    """
    hooks = make_hooks(on_history_updated, on_error)
    if hooks is None:
        definition, activation = await _run(workflow_id, fn, input, driver, mode, deadline, clock, ids, None)
    else:
        async with hooks.running():
            definition, activation = await _run(workflow_id, fn, input, driver, mode, deadline, clock, ids, hooks)
    error = ending_error(activation)
    if error is not None:
        raise error
    return _result(definition, activation)


async def _run(
    workflow_id: str,
    fn: Callable[[Context, Any], Awaitable[Any]],
    input: object,
    driver: Driver,
    mode: RunMode,
    deadline: float | datetime | None,
    clock: Clock | None,
    ids: IdGenerator | None,
    hooks: Hooks | None,
) -> tuple[Workflow[Any, Any], Activation]:
    definition, activation = await _prepare(workflow_id, fn, input, driver, mode, deadline, clock, ids, hooks)
    await activation.run(definition.function, mode=mode)
    return definition, activation


async def _prepare(
    workflow_id: str,
    fn: Callable[[Context, Any], Awaitable[Any]],
    input: object,
    driver: Driver,
    mode: RunMode,
    deadline: float | datetime | None,
    clock: Clock | None,
    ids: IdGenerator | None,
    hooks: Hooks | None,
) -> tuple[Workflow[Any, Any], Activation]:
    check_workflow_id(workflow_id)
    definition = definition_of(fn)
    check_driver(driver)
    if mode not in ("yield", "live"):
        raise InvalidArgumentError(f'mode must be "yield" or "live", not {mode!r}')
    check_clock(clock)
    _birth(deadline, SystemClock())
    if ids is not None:
        check_methods(ids, ("next_id", "start_after", "random_bytes"), "ids", "Uuid7Generator(SystemClock())")
    activation = await Activation.load(workflow_id, driver, clock=clock, ids=ids, hooks=hooks)
    if activation.is_new:
        activation.create(definition.name, input, definition.function, _birth(deadline, activation.clock))
    elif not activation.history.state.is_terminal:
        activation.history.adopt(definition.name, new_seed(workflow_id, activation.ids))
    return definition, activation


def _birth(deadline: float | datetime | None, clock: Clock) -> Birth:
    if deadline is None:
        return NOTHING_SPECIAL
    return Birth(deadline_ms=check_time_ms(deadline, "deadline", clock.now_ms()))


def ending_error(activation: Activation) -> WorkflowFailedError | WorkflowCancelledError | None:
    """The error with which an ended workflow's result is awaited, if it has one."""
    history = activation.history
    if history.state is WorkflowState.CANCELLED:
        return WorkflowCancelledError(
            f"workflow {history.workflow_id!r} was cancelled", workflow_id=history.workflow_id
        )
    if history.state is not WorkflowState.FAILED:
        return None
    info = cast("ErrorInfo", error_of(history) or ErrorInfo("Error", "no reason was recorded"))
    error = WorkflowFailedError(info.message, workflow_id=history.workflow_id, error=info)
    error.__cause__ = activation.failure
    return error


def _result(definition: Workflow[Any, OutputT], activation: Activation) -> WorkflowResult[OutputT]:
    history = activation.history
    if history.state is WorkflowState.COMPLETED:
        return WorkflowResult(history.state, decode_output(definition.function, history.output))
    wait = activation.waiting if activation.closing is Closing.PARKED else None
    if wait is None:
        return WorkflowResult(history.state)
    sleep_until = None if wait.deadline_ms is None else wait.deadline_ms / 1000
    return WorkflowResult(history.state, None, sleep_until, _message_names(wait))


def _message_names(wait: Wait) -> tuple[str, ...] | None:
    if wait.names is None:
        return ANY_MESSAGE
    return tuple(sorted(wait.names)) or None


async def start_workflow(
    nursery: trio.Nursery,
    workflow_id: str,
    fn: Callable[[Context, InputT], Awaitable[OutputT]],
    input: InputT,
    driver: Driver,
    *,
    mode: RunMode = "live",
    deadline: float | datetime | None = None,
    on_history_updated: HistoryHook | None = None,
    on_error: ErrorHook | None = None,
    clock: Clock | None = None,
    ids: IdGenerator | None = None,
) -> WorkflowHandle[OutputT]:
    """Run a workflow in the background, in `nursery`, and return its handle.

    The workflow's failure does not cancel the nursery; `handle.result()` raises it. Cancelling the nursery evicts the
    workflow. Arguments and errors are those of `run_workflow`; hooks that are coroutine functions run in the nursery, too.
    """
    check_methods(nursery, ("start_soon",), "nursery", "`async with trio.open_nursery() as nursery:`")
    hooks = make_hooks(on_history_updated, on_error)
    if hooks is not None:
        hooks.open(nursery)
    definition, activation = await _prepare(workflow_id, fn, input, driver, mode, deadline, clock, ids, hooks)
    await activation.commit_from_outside()
    handle = _LocalHandle(nursery, definition, activation, mode, hooks)
    handle.start()
    return handle


class _LocalHandle:
    """The handle of a workflow that runs in this process, in a nursery of the caller's."""

    def __init__(
        self,
        nursery: trio.Nursery,
        definition: Workflow[Any, Any],
        activation: Activation,
        mode: RunMode,
        hooks: Hooks | None,
    ) -> None:
        self._nursery = nursery
        self._definition = definition
        self._mode: RunMode = mode
        self._hooks = hooks
        self._stopped = trio.Event()
        self._error: BaseException | None = None
        self._site = LocalSite(self._usable)
        self._desk = self._site.desk
        self._take_over(activation)

    def start(self) -> None:
        self._stopped = trio.Event()
        self._error = None
        self._site.open()
        self._nursery.start_soon(self._run, name=f"workflow {self.workflow_id!r}")

    async def _run(self) -> None:
        stopped = self._stopped
        try:
            await self._activation.run(self._definition.function, mode=self._mode)
        except Exception as error:
            self._error = error
        finally:
            stopped.set()
            self._site.close(self._activation, self._error)

    @property
    def workflow_id(self) -> str:
        """The workflow's id."""
        return self._activation.history.workflow_id

    async def result(self) -> Any:
        """What the workflow returned, once it has ended."""
        await self._stopped.wait()
        if self._error is not None:
            raise self._error
        error = ending_error(self._activation)
        if error is not None:
            raise error
        history = self._activation.history
        if not history.state.is_terminal:
            raise WorkflowSuspendedError(
                f"workflow {self.workflow_id!r} is {history.state.value}: it waits or was evicted; run it again when it is due",
                workflow_id=self.workflow_id,
                state=history.state.value,
            )
        return decode_output(self._definition.function, history.output)

    async def message(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Put a message into the mailbox; durable on return. While the workflow runs here, it waits for room."""
        await self._desk.post(self.workflow_id, name, body, id)

    async def message_nowait(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Put a message into the mailbox, if there is room; durable on return."""
        await self._desk.post_nowait(self.workflow_id, name, body, id)

    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: Any = None
    ) -> Any:
        """Send a request, and wait for the reply while the workflow runs here."""
        return await self._desk.request(self.workflow_id, name, body, timeout, id, reply_type)

    async def undelivered(self) -> tuple[Message[Any], ...]:
        """What is in the mailbox."""
        return await self._desk.undelivered(self.workflow_id)

    async def wake(self) -> None:
        """End pending sleeps and retry backoffs."""
        activation = await self._usable()
        await wake(activation)

    async def _usable(self) -> Activation:
        """The activation; after a fault one that holds what is stored, since what faulty code recorded is not to be.

        A checkpoint; between its return and the caller's next one nothing else runs.
        """
        await trio.lowlevel.checkpoint()
        while self._activation.closing in (Closing.FAULT, Closing.USER_CANCELLED):
            faulty = self._activation
            await self._stopped.wait()
            fresh = await self._load(faulty)
            if self._activation is faulty:
                self._take_over(fresh)
        return self._activation

    def _take_over(self, activation: Activation) -> None:
        self._activation = activation
        self._desk.admitted(activation, self._definition.mailbox_limit or MAILBOX_LIMIT)

    async def _load(self, earlier: Activation) -> Activation:
        return await Activation.load(
            self.workflow_id, earlier.driver, clock=earlier.clock, ids=earlier.ids, hooks=self._hooks
        )

    async def _settled(self) -> History:
        """What is recorded, once it is durable."""
        activation = await self._usable()
        await activation.settled()
        return activation.history

    async def recover(self) -> None:
        """Make a failed workflow runnable again; in live mode it runs at once."""
        await self._stopped_if_failed()
        activation = await self._usable()
        if await recover(activation) and self._mode == "live":
            self._take_over(await self._load(self._activation))
            self.start()

    async def _stopped_if_failed(self) -> None:
        if self._activation.history.state is WorkflowState.FAILED:
            await self._stopped.wait()

    async def evict(self) -> None:
        """Make the function unwind; returns when it has."""
        self._activation.evict()
        await self._stopped.wait()

    async def cancel(self) -> None:
        """End the workflow as cancelled, for good; durable on return."""
        activation = await self._usable()
        await cancel(activation)

    async def get_state(self) -> WorkflowState:
        """Where it stands now."""
        return (await self._settled()).state

    async def get_output(self) -> Any:
        """What it returned, or `None`."""
        output = (await self._settled()).output
        return None if output is None else decode_output(self._definition.function, output)

    async def get_error(self) -> ErrorInfo | None:
        """What it failed with, or `None`."""
        error: ErrorInfo | None = error_of(await self._settled())
        return error

    async def children(self) -> tuple[ChildInfo, ...]:
        """The workflows that it has called; none, as nothing hosts it here, unless something did before."""
        return children_of(await self._settled())

    async def history(self) -> tuple[HistoryEntry, ...]:
        """Its entries, decoded."""
        return history_entries(await self._settled())
