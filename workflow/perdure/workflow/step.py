"""`ctx.step`: an effect whose outcome is recorded.

1. A recorded outcome is returned (or raised) without calling the function.
2. The outcome is durable when the step returns. An ordinary step is written only at its outcome, so a crash in between
   runs it again; an `at_most_once` step is written before it begins, so a crash in between is known as such.
3. The value returned is the stored one, decoded, on the first run too.
4. An attempt that fails is recorded, then the branch parks until the retry is due; attempts never overlap.
5. A success is recorded even when the workflow is being evicted meanwhile; an error that comes out of an eviction is not
   the step's, and is not recorded.
6. Nothing of the storage's trouble counts as a failure of the step, nor that the workflow's host leaves.
7. A step with `rollback=` that completes is numbered, in the batch of its outcome: handlers run in the reverse of that order.
   Where the function is run for its handlers only (`collecting.py`), a completed step says what would undo it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, NoReturn, cast

import trio

from perdure.storage import decode_value
from perdure.storage.errors import EncodeError
from perdure.storage.schema import Entry, EntryMetadata, EntryStatus, StepEntry
from perdure.workflow.activation import Activation
from perdure.workflow.checks import (
    check_count,
    check_duration,
    check_flag,
    check_function,
    is_coroutine_function,
    ms_ceil,
)
from perdure.workflow.derived import derive_step_key
from perdure.workflow.errors import (
    ErrorInfo,
    FailureKind,
    InvalidArgumentError,
    MisuseError,
    StepError,
    SuspendSignal,
    ValueTypeError,
)
from perdure.workflow.failures import (
    cut_text,
    describe,
    failure_kind,
    info_from_map,
    info_from_text,
    info_to_map,
    kind_from_text,
    step_error,
)
from perdure.workflow.history import Node, Path
from perdure.workflow.hooks import StepErrorEvent
from perdure.workflow.lanes import lane_of
from perdure.workflow.logs import fields_of
from perdure.workflow.scope import Operation
from perdure.workflow.threads import run_in_thread, wait_for_abandoned
from perdure.workflow.typed import Converter, returns, round_trip
from perdure.workflow.waits import Wait

__all__ = [
    "USUAL_OPTIONS",
    "Compensation",
    "StepInfo",
    "StepOptions",
    "attempt_in_progress",
    "check_step_options",
    "current_step",
    "rest",
    "run_step",
]

DEFAULT_MAX_RETRIES: Final = 3

_log = logging.getLogger("perdure.workflow")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The step in whose function the caller is.

    Attributes:
        workflow_id: The workflow's id.
        name: The step's name.
        path: Its place in the workflow: names, and numbers for loop iterations.
        attempt: 1 for the first attempt, as far as outcomes were recorded.
    """

    workflow_id: str
    name: str
    path: tuple[str | int, ...]
    attempt: int
    _seed: bytes
    _undone: int = 0

    @property
    def idempotency_key(self) -> str:
        """A UUID for this step of this workflow: the same for every attempt, also after restarts; no other step has it.

        Hand it to services that accept one: effects outside of the workflow happen at least once. A step that was undone
        and runs again, after `recover()`, has another key: it is to have effect again.
        """
        return derive_step_key(self._seed, self.path, self._undone)


_current_step: ContextVar[_Attempts] = ContextVar("perdure_current_step")


def current_step() -> StepInfo:
    """The step in whose function (or worker thread) this is called.

    Raises:
        MisuseError: It is called outside of a step.
    """
    attempts = _current_step.get(None)
    if attempts is None:
        raise MisuseError(
            "current_step() was called outside of a step; call it in the function that you give to ctx.step (in a rollback "
            "handler, ctx.idempotency_key is what you may be looking for)"
        )
    return attempts.info()


def attempt_in_progress(activation: Activation) -> tuple[object, int] | None:
    """The step of this activation in whose function the caller is, and the number of its attempt; `None` outside of one."""
    attempts = _current_step.get(None)
    return None if attempts is None or not attempts.is_of(activation) else (attempts, attempts.number)


async def rest(activation: Activation) -> None:
    """Nothing comes of the call of a workflow's code any more: its host leaves, and the workflow with it.

    The step in whose function the caller is, if it is in one, is not recorded unless it succeeds all the same. Returns only
    for a task that the step, or the workflow, has left behind.

    Raises:
        SuspendSignal: The workflow was closed.
    """
    attempts = _current_step.get(None)
    if attempts is not None and attempts.is_of(activation):
        if attempts.is_in_function:
            attempts.is_held_back = True
            await activation.rest(attempts)
        return
    lane = lane_of(activation)
    if activation.closing is not None or not (activation.busy == 0 or (lane is not None and lane.is_waiting())):
        await activation.rest(lane or activation)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A step's checked options; durations in seconds."""

    max_retries: int
    retry_backoff_base: float
    retry_backoff_max: float
    timeout: float
    retry_on_timeout: bool
    ephemeral: bool
    at_most_once: bool
    rollback: Callable[..., object] | None = None

    def retry_delay(self, attempts: int) -> float:
        """Seconds between two attempts: exponential, without jitter, so that every run gives the same."""
        return min(self.retry_backoff_max, self.retry_backoff_base * 2.0 ** min(attempts, 1000))

    def retry_at_ms(self, attempts: int, last_attempt_at_ms: int) -> int:
        """When the next attempt is due."""
        return last_attempt_at_ms + ms_ceil(self.retry_delay(attempts))


@dataclass(frozen=True, slots=True)
class Compensation:
    """What undoes a completed step.

    Attributes:
        node: The step's node in history.
        name: Its name.
        path: Its place in the workflow.
        options: Its options, whose handler and retries count.
        output: Gives its recorded output, anew each time.
    """

    node: Node
    name: str
    path: Path
    options: StepOptions
    output: Callable[[], Any]

    @property
    def entry_id(self) -> str:
        """The id of the step's entry."""
        assert self.node.entry is not None, "a completed step is recorded"
        return self.node.entry.id


USUAL_OPTIONS: Final = StepOptions(DEFAULT_MAX_RETRIES, 0.1, 30.0, 30.0, False, False, False)
"""What a step does when no option is given."""


def check_step_options(
    max_retries: int | None,
    retry_backoff_base: float,
    retry_backoff_max: float,
    timeout: float,
    retry_on_timeout: bool,
    ephemeral: bool,
    at_most_once: bool,
    rollback: Callable[..., object] | None = None,
) -> StepOptions:
    """The options as they will be used.

    Raises:
        InvalidArgumentError: One is out of range, or two contradict each other.
    """
    if at_most_once:
        if max_retries or retry_on_timeout:
            raise InvalidArgumentError(
                "a step cannot be both at_most_once and retried; leave out max_retries= and retry_on_timeout=, or leave out "
                "at_most_once="
            )
        if ephemeral:
            raise InvalidArgumentError(
                "a step cannot be both at_most_once and ephemeral, which may run again; leave one out"
            )
        max_retries = 0
    elif max_retries is None:
        max_retries = DEFAULT_MAX_RETRIES
    return StepOptions(
        check_count(max_retries, "max_retries", least=0, example="max_retries=3 (0 for none)"),
        check_duration(retry_backoff_base, "retry_backoff_base", "retry_backoff_base=0.1"),
        check_duration(retry_backoff_max, "retry_backoff_max", "retry_backoff_max=30.0"),
        check_duration(timeout, "timeout", "timeout=30.0 (0 for none)"),
        check_flag(retry_on_timeout, "retry_on_timeout"),
        check_flag(ephemeral, "ephemeral"),
        check_flag(at_most_once, "at_most_once"),
        rollback,
    )


def run_step(
    operation: Operation, fn: Callable[..., Any], args: tuple[Any, ...], options: StepOptions
) -> Coroutine[Any, Any, Any]:
    """What to await: the step's recorded outcome, or its run until there is one."""
    check_function(fn, "a step's function", "ctx.step(name, fn, argument)")
    converter = returns(fn)
    activation = operation.scope.activation
    found = operation.find(StepEntry)
    if found is None:
        operation.check_is_next()
        return _Attempts(operation, activation, fn, args, options, converter, None, EntryMetadata()).run()
    node, entry, kind = found
    if kind.output is not None:
        if options.rollback is not None:
            _note_undoable(operation, node, options, partial(_decode, operation.name, converter, kind.output))
        return _replay(operation, converter, kind.output)
    metadata = activation.history.metadata(entry.id) or EntryMetadata()
    if metadata.status is EntryStatus.COMPLETED:
        if options.rollback is not None:
            _note_undoable(operation, node, options, partial(_decode, operation.name, converter, None))
        return _replay(operation, converter, None)
    if metadata.status is EntryStatus.EXHAUSTED:
        return _replay_failure(activation, _recorded_failure(activation, operation.name, entry, kind, metadata))
    if "call" in activation.history.detail(entry.id):
        raise operation.diverged(operation.name, node, "which calls a workflow, where the code asks for")
    operation.check_is_next()
    return _Attempts(operation, activation, fn, args, options, converter, node, metadata).run()


def _note_undoable(operation: Operation, node: Node, options: StepOptions, output: Callable[[], Any]) -> None:
    """A completed step can be undone; where the function is run for its handlers only, it says by what."""
    operation.scope.can_be_undone = True
    collected = operation.scope.activation.collected
    if collected is not None:
        path = (*operation.scope.activation.history.path_of(operation.scope.location), operation.name)
        collected.append(Compensation(node, operation.name, path, options, output))


async def _replay(operation: Operation, converter: Converter | None, output: bytes | None) -> Any:
    await operation.scope.activation.replayed()
    return _decode(operation.name, converter, output)


def _decode(name: str, converter: Converter | None, output: bytes | None) -> Any:
    if converter is None:  # what is only for errors is not made up then
        return None if output is None else decode_value(output)
    return converter.decode(output, what=f"the recorded result of step {name!r}", root="result")


async def _replay_failure(activation: Activation, error: StepError) -> NoReturn:
    await activation.replayed()
    raise error


def _recorded_failure(
    activation: Activation, name: str, entry: Entry, kind: StepEntry, metadata: EntryMetadata
) -> StepError:
    text = metadata.error or kind.error or "Error: no reason was recorded"
    failure, info = _read_failure(activation.history.detail(entry.id), text)
    return step_error(failure, name, metadata.attempts, info, entry.id)


def _read_failure(detail: dict[str, Any], text: str) -> tuple[FailureKind, ErrorInfo]:
    """What a failed attempt is recorded as: from its detail, or from its text where that is all that there is.

    The reference engine, running the step meanwhile, leaves the detail of an earlier attempt of ours, so the text decides.
    """
    if "error" in detail and cut_text(str(info := info_from_map(detail["error"]))) == text:
        return cast("FailureKind", detail.get("kind", "exhausted")), info
    return kind_from_text(text), info_from_text(text)


class _Attempts:
    """The attempts of one step in this activation, one after another.

    Attributes:
        is_in_function: Whether the function runs.
        is_held_back: Whether something that it asked for did not come of the workflow's host, which leaves.
    """

    __slots__ = (
        "_activation",
        "_args",
        "_begun_at_ms",
        "_converter",
        "_fn",
        "_is_async",
        "_metadata",
        "_node",
        "_number",
        "_operation",
        "_options",
        "is_held_back",
        "is_in_function",
    )

    def __init__(
        self,
        operation: Operation,
        activation: Activation,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: StepOptions,
        converter: Converter | None,
        node: Node | None,
        metadata: EntryMetadata,
    ) -> None:
        self._operation = operation
        self._activation = activation
        self._fn = fn
        self._args = args
        self._options = options
        self._converter = converter
        self._node = node
        self._metadata = metadata
        self._number = metadata.attempts
        self._begun_at_ms = metadata.last_attempt_at_ms
        self._is_async = is_coroutine_function(fn)
        self.is_in_function: bool = False
        self.is_held_back: bool = False

    async def run(self) -> Any:
        """Call the function, again if it has to be, until its value is recorded, or that it failed for good."""
        activation, metadata, options = self._activation, self._metadata, self._options
        if metadata.status is EntryStatus.RUNNING and options.at_most_once:
            info = ErrorInfo("StepInterruptedError", "the process ended while the step was running")
            raise await self._give_up("interrupted", info)
        while True:
            if metadata.status is EntryStatus.FAILED:
                await self._until_due()
            if not self._is_async:
                await wait_for_abandoned(self._thread_key())
            await trio.lowlevel.checkpoint_if_cancelled()  # a workflow that is being stopped begins nothing
            if not (lane := self._operation.scope.lane).is_open:
                await lane.leave()
            if activation.is_draining:  # since the operation was asked for, or during an attempt or the pause after it
                await activation.drained()
            if activation.held is not None:
                activation.held.append(self._path())
                await activation.drained()
            self._number = metadata.attempts + 1
            self._begun_at_ms = activation.clock.now_ms()
            if activation.must_commit_before_step or options.at_most_once:
                await self._begin_durably()
                if not lane.is_open:
                    await lane.leave()
            error: Exception | None = None
            value: Any = None
            has_timer = self._is_async and options.timeout
            timer = trio.CancelScope(deadline=trio.current_time() + options.timeout if has_timer else inf)
            token = _current_step.set(self)
            self.is_in_function = True
            try:
                with timer:
                    value = await (self._fn(*self._args) if self._is_async else self._call_in_thread(timer))
            except Exception as raised:  # also what is left of a group once the timer has taken its cancellations out
                error = raised
            finally:
                self.is_in_function = False
                _current_step.reset(token)
            if not lane.is_open:
                await lane.leave()
            if self.is_held_back and (error is not None or timer.cancelled_caught):
                await activation.drained()  # it could not do better
            if timer.cancelled_caught:
                await self._fail_by_timeout()
            elif error is not None:
                await self._fail(error)
            else:
                break
        try:
            value = self._record_value(value)
        except (EncodeError, ValueTypeError) as unstorable:
            raise await self._give_up("critical", describe(unstorable)) from unstorable
        if options.ephemeral:
            await trio.lowlevel.checkpoint()
        elif not activation.commit_nowait():
            await activation.commit()
        return value

    async def _until_due(self) -> None:
        """Wait until the next attempt is due, or give up if there is none left."""
        activation, metadata, options = self._activation, self._metadata, self._options
        if metadata.attempts > options.max_retries:
            raise await self._give_up("exhausted", self._last_error(), is_known=True)
        while activation.clock.now_ms() < (
            retry_at_ms := options.retry_at_ms(metadata.attempts, metadata.last_attempt_at_ms)
        ):  # wake() may make it due
            await activation.park(Wait(retry_at_ms, wakeable=True), self._operation)
        activation.hold_steps()  # the failure is durable before the next attempt, also without a pause

    async def _begin_durably(self) -> None:
        """Commit what must precede the function; one that was stopped during that commit begins nothing either."""
        if self._options.at_most_once:
            self._metadata.status = EntryStatus.RUNNING
            self._record(StepEntry(None, None))
        await self._activation.begin_step()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            if self._options.at_most_once and self._operation.scope.lane.is_open:  # it is known not to have run
                self._number -= 1
                self._metadata.status = EntryStatus.PENDING
                self._record(StepEntry(None, None))
            raise

    def info(self) -> StepInfo:
        """What the function may know of its step; made when asked for, as few ask."""
        history = self._activation.history
        undone = self._lasting_detail().get("undone", 0)
        return StepInfo(
            history.workflow_id, self._operation.name, self._path(), self._number, history.seed or b"", undone
        )

    @property
    def number(self) -> int:
        """Which attempt is in progress, from 1."""
        return self._number

    def is_of(self, activation: Activation) -> bool:
        """Whether the step is run by this activation."""
        return self._activation is activation

    def _path(self) -> tuple[str | int, ...]:
        return (*self._activation.history.path_of(self._operation.scope.location), self._operation.name)

    async def _call_in_thread(self, timer: trio.CancelScope) -> Any:
        def start_timer() -> None:  # waiting for a free thread does not count
            timer.relative_deadline = self._options.timeout or inf

        value = await run_in_thread(
            self._fn,
            self._args,
            key=self._thread_key(),
            limiter=self._activation.step_limiter,
            on_begun=start_timer,
        )
        if inspect.iscoroutine(value):
            value.close()
            error = InvalidArgumentError(
                f"the function of step {self._operation.name!r} is a plain function that returned a coroutine; pass "
                "the coroutine function itself: ctx.step(name, fn, argument)"
            )
            self._activation.fault(error)
            raise error
        return value

    def _thread_key(self) -> tuple[bytes, tuple[str | int, ...]]:
        return self._activation.history.seed or b"", self._path()

    def _record_value(self, value: Any) -> Any:
        """Record what the function returned, and return what a replay will.

        Raises:
            EncodeError: It cannot be stored; nothing is recorded.
            ValueTypeError: It does not fit the function's annotation; nothing is recorded.
        """
        activation, metadata = self._activation, self._metadata
        data: bytes | None = None
        if value is not None or self._converter is not None:
            what = f"the result of step {self._operation.name!r}"
            data, value = round_trip(
                self._converter, value, bytes_max=activation.user_bytes_max, what=what, root="result"
            )
        self._operation.progress()
        metadata.status = EntryStatus.COMPLETED
        metadata.error = None
        metadata.completed_at_ms = activation.clock.now_ms()
        # The reference keeps the last failed attempt's text beside the output; a large output leaves no room for it.
        last_error = None if self._node is None else self._recorded_text(self._node)
        if last_error is not None:
            self._put_detail({})
            if data is not None and len(data) + len(last_error.encode()) > activation.user_bytes_max:
                last_error = None
        self._record(StepEntry(data, last_error))
        if self._options.rollback is not None:
            self._operation.scope.can_be_undone = True
            self._put_detail({"completed": activation.history.next_completion()})
        return value

    async def _fail(self, error: Exception) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._activation.closing is not None:
            raise SuspendSignal from error  # it came out of the unwinding, not out of the step
        kind = failure_kind(error)
        info = describe(error)
        if kind is None and self._number > self._options.max_retries:
            kind = "exhausted"
        if kind is not None:
            raise await self._give_up(kind, info) from error
        _log.info(
            "workflow %r: attempt %d at step %r failed and will be retried: %s",
            self._activation.history.workflow_id,
            self._number,
            self._operation.name,
            info,
            extra=self._log_fields(),
        )
        self._record_failure(EntryStatus.FAILED, "exhausted", info)

    def _log_fields(self) -> dict[str, object]:
        history = self._activation.history
        path = (*history.path_of(self._operation.scope.location), self._operation.name)
        return fields_of(history, path, self._number)

    async def _fail_by_timeout(self) -> None:
        info = ErrorInfo("StepTimeoutError", f"it was cancelled after {self._options.timeout:g} seconds")
        if not self._options.retry_on_timeout or self._number > self._options.max_retries:
            raise await self._give_up("timeout", info)
        _log.info(
            "workflow %r: attempt %d at step %r took too long and will be retried",
            self._activation.history.workflow_id,
            self._number,
            self._operation.name,
            extra=self._log_fields(),
        )
        self._record_failure(EntryStatus.FAILED, "timeout", info)

    async def _give_up(self, kind: FailureKind, info: ErrorInfo, *, is_known: bool = False) -> StepError:
        """Record that the step failed for good; durable on return."""
        self._record_failure(EntryStatus.EXHAUSTED, kind, info, is_known=is_known)
        await self._activation.commit()
        _log.info(
            "workflow %r: step %r failed for good: %s",
            self._activation.history.workflow_id,
            self._operation.name,
            info,
            extra=self._log_fields(),
        )
        return step_error(kind, self._operation.name, self._number, info, self._entry_id())

    def _record_failure(
        self, status: EntryStatus, kind: FailureKind, info: ErrorInfo, *, is_known: bool = False
    ) -> None:
        self._operation.progress()
        text = cut_text(str(info))
        self._metadata.status = status
        self._metadata.error = text
        self._record(StepEntry(None, text))
        self._put_detail({"kind": kind, "error": info_to_map(info)})
        if self._activation.watch is not None and not is_known:
            event = self._error_event(info, will_retry=status is EntryStatus.FAILED)
            self._activation.watch.note(event, self._entry_id())

    def _error_event(self, info: ErrorInfo, *, will_retry: bool) -> StepErrorEvent:
        delay = self._options.retry_delay(self._number) if will_retry else None
        return StepErrorEvent(
            workflow_id=self._activation.history.workflow_id,
            path=self._path(),
            step_name=self._operation.name,
            attempt=self._number,
            max_retries=self._options.max_retries,
            will_retry=will_retry,
            retry_delay=delay,
            error=info,
        )

    def _record(self, kind: StepEntry) -> None:
        history, metadata = self._activation.history, self._metadata
        metadata.attempts = self._number
        metadata.last_attempt_at_ms = self._begun_at_ms
        if metadata.created_at_ms == 0:
            metadata.created_at_ms = self._begun_at_ms
        if self._node is None:
            self._node = self._operation.create(kind)
        else:
            history.change(self._node, kind)
        history.put_metadata(self._node, metadata)

    def _recorded_text(self, node: Node) -> str | None:
        return node.entry.kind.error if node.entry and isinstance(node.entry.kind, StepEntry) else None

    def _put_detail(self, facts: dict[str, Any]) -> None:
        history, detail = self._activation.history, self._lasting_detail() | facts
        if detail:
            history.put_detail(self._entry_id(), detail)
        else:
            history.delete_detail(self._entry_id())

    def _lasting_detail(self) -> dict[str, Any]:
        """What is kept of an earlier life of the step: how often it was undone, if it was."""
        undone = 0 if self._node is None else self._activation.history.detail(self._entry_id()).get("undone", 0)
        return {"undone": undone} if undone else {}

    def _entry_id(self) -> str:
        node = self._node
        assert node is not None, "the step was recorded"
        assert node.entry is not None, "the step was recorded"
        return node.entry.id

    def _last_error(self) -> ErrorInfo:
        return _read_failure(self._activation.history.detail(self._entry_id()), self._metadata.error or "Error")[1]
