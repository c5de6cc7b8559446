"""`ctx.rollback_checkpoint`, and what happens when a workflow that passed one fails: the rollback run.

1. The workflow's error and the state `rolling_back` are one batch. From then on the function is never run forward again, by
   this or any later activation, until `recover()` or `replay_from_step`.
2. Which handlers there are is asked of the code: the function is run once more, for its handlers only (`collecting.py`). It
   is told what is recorded, as on replay, so a failure that the workflow caught hides nothing that comes after it.
   Rejected: to remember the handlers of the forward run. An activation after a crash would not have them.
3. Code that does not fit its history is a fault there as elsewhere: nothing is written, and with right code it goes on.
4. Handlers run one at a time, in the reverse of the order in which their steps completed. Each outcome is durable before the
   next handler begins; a crash in a handler runs it again.
5. A handler that fails is retried by its step's own policy; after the last attempt the workflow ends as failed, with both
   errors. The handlers of earlier steps do not run then: they may rely on what was to be undone first.
6. History is left as it is: of an undone step only its metadata and its details change.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

import trio

from perdure.storage import decode_value, encode_value
from perdure.storage.schema import EntryMetadata, RollbackCheckpointEntry
from perdure.workflow.checks import check_function, is_coroutine_function
from perdure.workflow.collecting import collect
from perdure.workflow.derived import derive_rollback_key
from perdure.workflow.errors import (
    ErrorInfo,
    FaultError,
    InvalidArgumentError,
    RollbackCheckpointError,
    SuspendSignal,
)
from perdure.workflow.failures import cut_text, describe, failure_kind, info_from_map, info_from_text, info_to_map
from perdure.workflow.history import History, Node, Path
from perdure.workflow.hooks import RollbackErrorEvent
from perdure.workflow.logs import fields_of
from perdure.workflow.scope import Operation, Scope
from perdure.workflow.states import WorkflowEvent
from perdure.workflow.step import Compensation
from perdure.workflow.threads import run_in_thread, wait_for_abandoned
from perdure.workflow.waits import Wait

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.context import Context, WorkflowLogger

__all__ = [
    "UNDOING",
    "RollbackContext",
    "check_rollback",
    "end_rollback",
    "handler_in_progress",
    "roll_back",
    "run_rollback_checkpoint",
    "wake_rollback",
    "workflow_error",
]

UNDOING: Final = ("rollback_attempts", "rollback_last_ms")
"""What a step's detail holds while its handler is retried: how often it failed, and when it was last begun."""

_ATTRIBUTE_BYTES_MAX: Final = 4096
_PURPOSE: Final = b"rollback\0"

_log = logging.getLogger("perdure.workflow")


@dataclass(frozen=True, slots=True)
class RollbackContext:
    """What a rollback handler is given: which step it undoes, and why.

    Attributes:
        workflow_id: The workflow's id.
        step_name: The name of the step to undo.
        path: The step's place in the workflow: names, and numbers for loop iterations.
        attempt: 1 for the handler's first attempt, as far as outcomes were recorded.
        error: What the workflow failed with.
        idempotency_key: A UUID for undoing this step of this workflow: the same for every attempt, also after restarts, and
            another than the step's own. Hand it to services that accept one: a handler runs at least once.
        logger: Its lines carry the workflow's id.
    """

    workflow_id: str
    step_name: str
    path: Path
    attempt: int
    error: ErrorInfo
    idempotency_key: str
    logger: WorkflowLogger
    _activation: Activation = field(repr=False)

    def is_evicted(self) -> bool:
        """Whether this run is over and its results no longer count; long computations may look now and then."""
        return self._activation.closing is not None


handler_in_progress: Final[ContextVar[RollbackContext | None]] = ContextVar("perdure_rollback_handler", default=None)
"""What the rollback handler was given in which the caller is; `None` outside of one. For the test kit, which tells where an
effect happened."""


async def run_rollback_checkpoint(operation: Operation) -> None:
    """Record that steps from here on may be rolled back; durable on return."""
    activation = operation.scope.activation
    if operation.find(RollbackCheckpointEntry) is not None:
        await activation.replayed()
    else:
        operation.check_is_next()
        activation.progress()
        operation.create(RollbackCheckpointEntry(operation.name))
        await activation.commit()
    operation.scope.has_checkpoint = True


def check_rollback(scope: Scope, step_name: str, handler: object) -> None:
    """See that a step may have a handler here, and that this is one.

    Raises:
        RollbackCheckpointError: No rollback checkpoint was passed.
        InvalidArgumentError: It is no function of two arguments.
    """
    if not scope.has_checkpoint:
        raise RollbackCheckpointError(
            f"step {step_name!r} at {scope.path_text()} has a rollback=, but no rollback checkpoint was passed before it; "
            'write `await ctx.rollback_checkpoint("name")` where undoing is to end',
            name=step_name,
        )
    example = "`async def undo(ctx, output): ...` and rollback=undo"
    checked = check_function(handler, f"the rollback= of step {step_name!r}", example)
    try:
        inspect.signature(checked).bind(None, None)
    except ValueError:  # it has no signature that can be told
        return
    except TypeError:
        raise InvalidArgumentError(
            f"the rollback= of step {step_name!r} is called with a context and what the step returned, but does not take "
            f"these; write {example}"
        ) from None


async def roll_back(activation: Activation, function: Callable[[Context, Any], Awaitable[Any]]) -> None:
    """Undo what the workflow did since its checkpoints, and end it as failed, unless the activation is closed before.

    Raises:
        FaultError: The code does not fit its history; nothing was written.
        StorageError: The storage failed; what it holds has to be read again.
    """
    compensations = await collect(activation, function)
    if activation.closing is not None:
        return
    rollback = _Rollback(activation)
    _, error = await activation.guarded(lambda: rollback.undo(compensations))
    if activation.closing is not None:
        return
    if error is not None:
        raise error  # not a handler's: those are recorded
    await end_rollback(activation, rollback.failure, rollback.failed_step)


async def end_rollback(activation: Activation, failure: ErrorInfo | None = None, step_name: str | None = None) -> None:
    """End the workflow as failed, with the error that it has; durable on return.

    Args:
        activation: Whose workflow.
        failure: What kept the rollback from being completed; it is kept in the error's metadata.
        step_name: In the handler of which step.
    """
    history = activation.history
    history.apply(WorkflowEvent.FAIL)
    if failure is not None:
        error = workflow_error(history)
        metadata = dict(error.metadata)
        if step_name is not None:
            metadata["rollback_step"] = step_name
        metadata["rollback_error"] = cut_text(str(failure), _ATTRIBUTE_BYTES_MAX)
        stored = ErrorInfo(error.name, error.message, error.stack, metadata)
        history.set_error(encode_value(info_to_map(stored)), history.failure_causes)
        if step_name is None and activation.watch is not None:
            activation.watch.note(RollbackErrorEvent(history.workflow_id, None, 0, False, failure))
    history.set_alarm(None)
    history.set_idle_activations(0)
    await activation.commit_from_outside()
    if failure is None:
        _log.info("workflow %r was rolled back", history.workflow_id, extra=fields_of(history))
    else:
        text = "workflow %r was not rolled back completely: %s"
        _log.warning(text, history.workflow_id, failure, extra=fields_of(history))


def wake_rollback(history: History) -> None:
    """End the pause before a handler's next attempt."""
    for node in history.root.walk():
        entry = node.entry
        if entry is not None and history.detail(entry.id).get("rollback_last_ms"):
            history.put_detail(entry.id, {**history.detail(entry.id), "rollback_last_ms": 0})


def workflow_error(history: History) -> ErrorInfo:
    """The stored error of a workflow that is rolled back."""
    if history.error is None:  # written by another engine, which stores it at the end
        return ErrorInfo("Error", "no reason was recorded")
    return info_from_map(decode_value(history.error))


class _Rollback:
    """The handlers of one workflow, one after another.

    Attributes:
        failure: Why the rollback cannot be completed, once that is so.
        failed_step: The step whose handler gave up.
    """

    def __init__(self, activation: Activation) -> None:
        self.failure: ErrorInfo | None = None
        self.failed_step: str | None = None
        self._activation = activation
        self._scope = Scope(activation, (), Node())
        self._error = workflow_error(activation.history)

    async def undo(self, compensations: list[Compensation]) -> None:
        """Run the handlers until none is left or one gives up."""
        for compensation in compensations:
            self.failure = await _Handler(self._activation, self._scope, self._error, compensation).run()
            if self.failure is not None:
                self.failed_step = compensation.name
                return


class _Handler:
    """The attempts of one handler, one after another."""

    def __init__(self, activation: Activation, scope: Scope, error: ErrorInfo, compensation: Compensation) -> None:
        self._activation = activation
        self._history = activation.history
        self._scope = scope
        self._error = error
        self._compensation = compensation
        self._options = compensation.options
        self._entry_id = compensation.entry_id
        handler = compensation.options.rollback
        assert handler is not None, "a compensation has a handler"
        self._handler: Callable[..., Any] = handler
        self._is_async = is_coroutine_function(handler)
        # A thread of the step itself, should one still run, is another than the handler's.
        self._thread_key = (_PURPOSE + (self._history.seed or b""), compensation.path)

    async def run(self) -> ErrorInfo | None:
        """Undo the step; durable on return.

        Returns:
            The last error, if the handler gave up: that is recorded, to be committed with the workflow's end.
        """
        while True:
            detail = self._history.detail(self._entry_id)
            attempts = detail.get("rollback_attempts", 0)
            if attempts > self._options.max_retries:  # the code allows fewer than when it was recorded
                return info_from_text(self._metadata().rollback_error or "no reason was recorded")
            if attempts:
                retry_at_ms = self._options.retry_at_ms(attempts, detail.get("rollback_last_ms", 0))
                if self._activation.clock.now_ms() < retry_at_ms:
                    self._check_open()
                    operation = Operation(self._scope, self._compensation.name, "step")
                    await self._activation.park(Wait(retry_at_ms, wakeable=True), operation)
                    continue  # wake() may have made it due
            begun_at_ms = await self._begin()
            is_timed_out, error = await self._attempt(attempts + 1)
            if error is None:
                await self._succeed()
                return None
            info = error if isinstance(error, ErrorInfo) else describe(error)
            is_final = attempts + 1 > self._options.max_retries
            if is_timed_out:
                is_final = is_final or not self._options.retry_on_timeout
            elif not isinstance(error, ErrorInfo):
                is_final = is_final or failure_kind(error) is not None
            self._record_failure(attempts + 1, begun_at_ms, info, is_final=is_final)
            if is_final:
                return info
            await self._activation.commit()

    def _metadata(self) -> EntryMetadata:
        metadata = self._history.metadata(self._entry_id)
        if metadata is None:
            raise AssertionError("a completed step has metadata")
        return metadata

    def _check_open(self) -> None:
        if self._activation.is_draining:
            self._activation.evict()
        if self._activation.closing is not None:
            raise SuspendSignal

    async def _begin(self) -> int:
        """Make durable what must precede the handler; returns the time, in milliseconds since the epoch."""
        self._check_open()
        if not self._is_async:
            await wait_for_abandoned(self._thread_key)
            self._check_open()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._history.set_alarm(None)
        if self._activation.must_commit_before_step:
            await self._activation.begin_step()
            await trio.lowlevel.checkpoint_if_cancelled()
        return self._activation.clock.now_ms()

    async def _attempt(self, number: int) -> tuple[bool, Exception | ErrorInfo | None]:
        """Call the handler once; returns whether it took too long, and its error if there is one."""
        timer = trio.CancelScope()
        error: Exception | None = None

        def start_timer() -> None:  # waiting for a free thread does not count
            timer.deadline = trio.current_time() + self._options.timeout if self._options.timeout else inf

        try:
            with timer:
                context, output = self._context(number), self._compensation.output()
                token = handler_in_progress.set(context)
                try:
                    if self._is_async:
                        start_timer()
                        await self._handler(context, output)
                    else:
                        await self._call_in_thread(context, output, start_timer)
                finally:
                    handler_in_progress.reset(token)
        except FaultError as fault:
            self._activation.fault(fault)
            raise
        except Exception as raised:
            error = raised
        if timer.cancelled_caught:
            return True, ErrorInfo("StepTimeoutError", f"it was cancelled after {self._options.timeout:g} seconds")
        if error is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._activation.closing is not None:
                raise SuspendSignal from error  # it came out of the unwinding, not out of the handler
        return False, error

    async def _call_in_thread(self, context: RollbackContext, output: Any, start_timer: Callable[[], None]) -> None:
        value = await run_in_thread(
            self._handler,
            (context, output),
            key=self._thread_key,
            limiter=self._activation.step_limiter,
            on_begun=start_timer,
        )
        if inspect.iscoroutine(value):
            value.close()
            raise InvalidArgumentError(
                f"the rollback= of step {self._compensation.name!r} is a plain function that returned a coroutine; pass the "
                "coroutine function itself: rollback=undo"
            )

    def _context(self, number: int) -> RollbackContext:
        from perdure.workflow.context import WorkflowLogger

        detail = self._history.detail(self._entry_id)
        return RollbackContext(
            self._history.workflow_id,
            self._compensation.name,
            self._compensation.path,
            number,
            self._error,
            derive_rollback_key(self._history.seed or b"", self._compensation.path, detail.get("undone", 0)),
            WorkflowLogger(self._scope, self._compensation.path, number),
            self._activation,
        )

    async def _succeed(self) -> None:
        self._activation.progress()
        metadata = self._metadata()
        metadata.rollback_completed_at_ms = self._activation.clock.now_ms()
        metadata.rollback_error = None
        self._history.put_metadata(self._compensation.node, metadata)
        detail = self._history.detail(self._entry_id)
        kept = {key: value for key, value in detail.items() if key not in UNDOING}
        if kept != detail:
            self._put_detail(kept)
        await self._activation.commit()

    def _record_failure(self, number: int, begun_at_ms: int, info: ErrorInfo, *, is_final: bool) -> None:
        self._activation.progress()
        _log.info(
            "workflow %r: attempt %d at undoing step %r failed%s: %s",
            self._history.workflow_id,
            number,
            self._compensation.name,
            "" if is_final else " and will be retried",
            info,
            extra=fields_of(self._history, self._compensation.path, number),
        )
        metadata = self._metadata()
        metadata.rollback_error = cut_text(str(info))
        self._history.put_metadata(self._compensation.node, metadata)
        detail = self._history.detail(self._entry_id)
        self._put_detail({**detail, "rollback_attempts": number, "rollback_last_ms": begun_at_ms})
        if self._activation.watch is not None:
            step_name = self._compensation.name
            event = RollbackErrorEvent(self._history.workflow_id, step_name, number, not is_final, info)
            self._activation.watch.note(event, self._entry_id)

    def _put_detail(self, detail: dict[str, Any]) -> None:
        if detail:
            self._history.put_detail(self._entry_id, detail)
        else:
            self._history.delete_detail(self._entry_id)
