"""`Context`: what a workflow function is given, and the only way to have an effect that lasts.

1. A method here checks its arguments and claims its name; what it does is in the module of its primitive.
2. A wrong argument is a fault, not a failure: nothing is recorded, and with right code the workflow goes on.
3. Every operation is durable when it returns, unless it says otherwise, and is a checkpoint unless it replays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from datetime import datetime
from functools import wraps
from inspect import signature
from random import Random
from types import UnionType
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack, cast, overload
from uuid import UUID

from perdure.storage.attributes import Scalar
from perdure.workflow.attributes import check_changed, check_removed, run_attributes
from perdure.workflow.blocks import BLOCK_CATCH, STEP_CATCH, BlockCatchKind, check_catch, run_block, step_failure
from perdure.workflow.branches import Branch, JoinResult, check_branches
from perdure.workflow.calls import OnParentEnd
from perdure.workflow.checks import (
    check_count,
    check_duration,
    check_flag,
    check_message_names,
    check_when_ms,
    check_workflow_id,
    ms_ceil,
)
from perdure.workflow.children import check_on_parent_end, run_call
from perdure.workflow.derived import derive_random, derive_uuid, run_now
from perdure.workflow.errors import FailureKind, InvalidArgumentError, QueueTimeoutError, StepError
from perdure.workflow.history import Path
from perdure.workflow.join import run_join
from perdure.workflow.logs import fields_of
from perdure.workflow.loop import run_loop
from perdure.workflow.queue import run_queue_read
from perdure.workflow.race import run_race
from perdure.workflow.rollback import RollbackContext, check_rollback, run_rollback_checkpoint
from perdure.workflow.scope import Operation, OperationName, Scope
from perdure.workflow.sending import run_send
from perdure.workflow.sleep import run_sleep
from perdure.workflow.step import USUAL_OPTIONS, check_step_options, run_step
from perdure.workflow.typed import wanted as wanted_type
from perdure.workflow.types import (
    BlockFailure,
    BlockOk,
    Break,
    Continue,
    Message,
    RaceResult,
    SleepOutcome,
    StepFailure,
    StepOk,
)
from perdure.workflow.versions import RemovableKind, check_kind, run_get_version, run_removed

__all__ = ["Context", "QueueReader", "WorkflowLogger"]

T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Coroutine[Any, Any, Any]])
SyncMethodT = TypeVar("SyncMethodT", bound=Callable[..., Any])
S = TypeVar("S")
InputT = TypeVar("InputT")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger("perdure.workflow.user")


class WorkflowLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that is silent while recorded history is replayed, so that a line is not logged again by each run.

    Lines after the last recorded operation are: nothing tells that they were reached before.

    Records go to the logger `perdure.workflow.user`. They carry as attributes `workflow_id`, `workflow` (its type) and, below the
    workflow's top level, `entry` (the place of the context: names, and numbers for loop iterations); in a rollback handler the
    step's place, and `attempt`.
    """

    def __init__(self, scope: Scope, entry: Path | None = None, attempt: int | None = None) -> None:
        super().__init__(_log, {})
        self._scope = scope
        self._entry = entry
        self._attempt = attempt

    def isEnabledFor(self, level: int) -> bool:
        """Whether a line of this level is logged: never during replay."""
        return not self._scope.is_replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the workflow, and the place in it, to the record; fields of the caller's own come first."""
        history = self._scope.activation.history
        entry = self._entry or history.path_of(self._scope.location) or None
        kwargs["extra"] = {**fields_of(history, entry, self._attempt), **(kwargs.get("extra") or {})}
        return msg, kwargs


def _in_turn(operation: OperationName) -> Callable[[MethodT], MethodT]:
    """Make a method's call known to its scope at once, so that one that is never awaited is noticed."""

    def decorate(method: MethodT) -> MethodT:
        @wraps(method)
        def call(self: Context | QueueReader, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            scope = self._scope  # pyright: ignore[reportPrivateUsage]
            try:
                coroutine = method(self, *args, **kwargs)
            except TypeError as error:  # the arguments do not fit; the method itself has not begun
                fault = InvalidArgumentError(
                    f"ctx.{operation} does not take these arguments: {error}. Keywords for a function of your own go with "
                    "functools.partial(fn, key=value)"
                )
                scope.activation.fault(fault)
                raise fault from None
            return scope.hand_out(coroutine, args[0] if args else kwargs.get("name"), operation)

        return cast("MethodT", call)

    return decorate


def _on_the_spot(method: SyncMethodT) -> SyncMethodT:
    """Tell a call whose arguments do not fit as one of any other method is told: it stops the workflow, and fails nothing."""
    fits = signature(method)

    @wraps(method)
    def call(self: Context, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TypeError:
            try:
                fits.bind(self, *args, **kwargs)
            except TypeError as error:
                fault = InvalidArgumentError(
                    f"ctx.{method.__name__} does not take these arguments: {error}; write for example "
                    f'ctx.{method.__name__}("order-number")'
                )
                self._scope.activation.fault(fault)  # pyright: ignore[reportPrivateUsage]
                raise fault from None
            raise

    return cast("SyncMethodT", call)


class QueueReader:
    """The workflow's mailbox, as the workflow reads it (`ctx.queue`)."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @overload
    async def next(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        timeout: float | None = None,
        completable: bool = False,
    ) -> Message[Any]: ...

    @overload
    async def next(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        timeout: float | None = None,
        completable: bool = False,
        type: type[T],
    ) -> Message[T]: ...

    @overload
    async def next(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        timeout: float | None = None,
        completable: bool = False,
        type: UnionType,
    ) -> Message[Any]: ...

    @_in_turn("queue.next")
    async def next(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        timeout: float | None = None,
        completable: bool = False,
        type: Any = None,
    ) -> Message[Any]:
        """Take the oldest message, waiting for one if there is none.

        Durable on return: it is gone from the mailbox and in history. Cancelled by an eviction, it has taken nothing.

        Args:
            name: The read's name, unique within its scope.
            names: Which messages it takes, by name; any when left out.
            timeout: Seconds, 0 or more, until it gives up; `None` waits for ever. A message beats the timeout.
            completable: Whether the message is to be completed: `await message.complete()` records that it was dealt with.
            type: What its body is to be, as for an annotation: `type=Order`, `type=list[Order]`; plain data when left out.

        Raises:
            QueueTimeoutError: No message came in time; the same on every later run.
            ValueTypeError: The body does not fit `type`. The message counts as read; the same on every later run.
        """
        with Operation(self._scope, name, "queue.next") as operation:
            wanted = check_message_names(names)
            is_completable = check_flag(completable, "completable")
            messages = await run_queue_read(
                operation, wanted, 1, _timeout_ms(timeout), is_completable, wanted_type(type)
            )
            if messages:
                return messages[0]
        what = "any message" if wanted is None else " or ".join(repr(wanted_name) for wanted_name in wanted)
        raise QueueTimeoutError(
            f"the queue read {name!r} waited for {what}, and none came in time; catch QueueTimeoutError, or use "
            "ctx.queue.next_batch, which returns an empty list",
            name=name,
            names=wanted,
        )

    @overload
    async def next_batch(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        count: int = 1,
        timeout: float | None = None,
        completable: bool = False,
    ) -> list[Message[Any]]: ...

    @overload
    async def next_batch(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        count: int = 1,
        timeout: float | None = None,
        completable: bool = False,
        type: type[T],
    ) -> list[Message[T]]: ...

    @overload
    async def next_batch(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        count: int = 1,
        timeout: float | None = None,
        completable: bool = False,
        type: UnionType,
    ) -> list[Message[Any]]: ...

    @_in_turn("queue.next_batch")
    async def next_batch(
        self,
        name: str,
        *,
        names: Iterable[str] | None = None,
        count: int = 1,
        timeout: float | None = None,
        completable: bool = False,
        type: Any = None,
    ) -> list[Message[Any]]:
        """Take up to `count` messages, oldest first, waiting for the first if there is none.

        Durable on return, like `next`. Returns an empty list when the timeout passes.

        Args:
            name: The read's name, unique within its scope.
            names: Which messages it takes, by name; any when left out.
            count: At most how many, 1 to 2**32 - 1.
            timeout: Seconds, 0 or more, until it gives up; `None` waits for ever.
            completable: Whether the messages are to be completed, each by itself, like that of `next`.
            type: What their bodies are to be, as for `next`.

        Raises:
            ValueTypeError: A body does not fit `type`. All of the messages count as read; the same on every later run.
        """
        with Operation(self._scope, name, "queue.next_batch") as operation:
            wanted = check_message_names(names)
            most = check_count(count, "count", least=1, example="count=10")
            is_completable = check_flag(completable, "completable")
            return await run_queue_read(
                operation, wanted, most, _timeout_ms(timeout), is_completable, wanted_type(type)
            )


def _timeout_ms(timeout: float | None) -> int | None:
    return (
        None if timeout is None else ms_ceil(check_duration(timeout, "timeout", "timeout=60.0 (None waits for ever)"))
    )


class Context:
    """The context of one scope: of the workflow's function, an iteration of a loop, a branch, or a try block."""

    __slots__ = ("_scope", "logger", "queue")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.queue: QueueReader = QueueReader(scope)
        self.logger: WorkflowLogger = WorkflowLogger(scope)

    @property
    def workflow_id(self) -> str:
        """The workflow's id."""
        return self._scope.activation.history.workflow_id

    @property
    def is_replaying(self) -> bool:
        """Whether recorded history is still ahead of the code in this scope."""
        return self._scope.is_replaying

    def is_evicted(self) -> bool:
        """Whether this run is over and its results no longer count; long computations may look now and then."""
        return self._scope.activation.closing is not None

    @overload
    async def step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], Awaitable[T]],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, T], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
    ) -> T: ...

    @overload
    async def step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], T],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, T], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
    ) -> T: ...

    @_in_turn("step")
    async def step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], Any],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, Any], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
    ) -> Any:
        """Call `fn(*args)` once and record what it returns; later runs return the record without calling it.

        The outcome is durable on return (an `ephemeral` step's with the next durable write). If the process dies while
        the function runs, it runs again: effects happen at least once, unless they honour
        `current_step().idempotency_key`. If the workflow is evicted meanwhile, the function is cancelled; should it finish
        all the same, its result is recorded.

        Args:
            name: The step's name: non-empty text of at most 512 bytes, unique within its scope.
            fn: A coroutine function, or a plain one, which runs in a worker thread.
            args: Its arguments; use `functools.partial` for keywords.
            rollback: What undoes it, should the workflow fail: `rollback(ctx, output)`, a coroutine function or a plain one,
                given a `RollbackContext` and what the step returned. Only after a `rollback_checkpoint`. It is retried, and
                its time is limited, as this step's own options say; it runs at least once.
            max_retries: How often it is tried again after an exception, 0 to 2**32 - 1; 3 when left out (0 for
                `at_most_once`). `CriticalError`, `RollbackError` and an unstorable result are never retried.
            retry_backoff_base: Seconds; the n-th retry waits `retry_backoff_base * 2**n`, at most ...
            retry_backoff_max: ... this many seconds.
            timeout: Seconds after which the function is cancelled; 0 for no limit. A plain function cannot be stopped: its
                thread is abandoned, its late result ignored, and a retry waits for it.
            retry_on_timeout: Whether a timeout is retried like an exception, instead of failing the step at once.
            ephemeral: Write the result together with the next durable write; after a crash it may run again.
            at_most_once: Write that it begins before it begins. After a crash with unknown outcome it is not run again.

        Returns:
            What `fn` returned, as the type that its return annotation says: dataclasses, enums, named tuples, attrs and
            pydantic classes and containers of these come back as themselves. Without annotation as plain data: tuples come
            back as lists, and so on. The same on the first run as on every later one.

        Raises:
            StepExhaustedError: Every attempt failed.
            StepCriticalError: It raised `CriticalError` or `RollbackError`, or its result cannot be stored or does not fit
                its annotation (`error.name` is `ValueTypeError`).
            StoredValueError: The recorded result does not fit the annotation that the code has now. A fault.
            StepTimeoutError: It exceeded `timeout`.
            StepInterruptedError: An `at_most_once` step was begun by an earlier process, its outcome unknown.
            RollbackCheckpointError: A fault: it has a `rollback`, and no checkpoint was passed.
        """
        return await self._run_step(
            "step",
            name,
            fn,
            args,
            rollback,
            max_retries,
            retry_backoff_base,
            retry_backoff_max,
            timeout,
            retry_on_timeout,
            ephemeral,
            at_most_once,
        )

    async def _run_step(
        self,
        kind: Literal["step", "try_step"],
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        rollback: Callable[[RollbackContext, Any], object] | None,
        max_retries: int | None,
        retry_backoff_base: float,
        retry_backoff_max: float,
        timeout: float,
        retry_on_timeout: bool,
        ephemeral: bool,
        at_most_once: bool,
    ) -> Any:
        with Operation(self._scope, name, kind) as operation:
            if rollback is not None:
                check_rollback(self._scope, name, rollback)
            if (
                rollback is None
                and max_retries is None
                and timeout == 30.0
                and (retry_on_timeout is ephemeral is at_most_once is False)
                and retry_backoff_base == 0.1
                and retry_backoff_max == 30.0
            ):
                options = USUAL_OPTIONS
            else:
                options = check_step_options(
                    max_retries,
                    retry_backoff_base,
                    retry_backoff_max,
                    timeout,
                    retry_on_timeout,
                    ephemeral,
                    at_most_once,
                    rollback,
                )
            return await run_step(operation, fn, args, options)

    @overload
    async def try_step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], Awaitable[T]],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, T], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
        catch: Iterable[FailureKind] = STEP_CATCH,
    ) -> StepOk[T] | StepFailure: ...

    @overload
    async def try_step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], T],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, T], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
        catch: Iterable[FailureKind] = STEP_CATCH,
    ) -> StepOk[T] | StepFailure: ...

    @_in_turn("try_step")
    async def try_step(
        self,
        name: str,
        fn: Callable[[Unpack[Ts]], Any],
        *args: Unpack[Ts],
        rollback: Callable[[RollbackContext, Any], object] | None = None,
        max_retries: int | None = None,
        retry_backoff_base: float = 0.1,
        retry_backoff_max: float = 30.0,
        timeout: float = 30.0,
        retry_on_timeout: bool = False,
        ephemeral: bool = False,
        at_most_once: bool = False,
        catch: Iterable[FailureKind] = STEP_CATCH,
    ) -> StepOk[Any] | StepFailure:
        """Run a step like `step`, and return its failure as a value.

        Durable on return. The same value on every run; recorded as a step, so one may become the other in new code.

        Args:
            name, fn, args, rollback, max_retries, retry_backoff_base, retry_backoff_max, timeout, retry_on_timeout, ephemeral,
                at_most_once: As for `step`.
            catch: The kinds of failures to return; others are raised. All but `rollback` unless given.

        Returns:
            `StepOk(value)`, or `StepFailure(kind, step_name, attempts, error)`.

        Raises:
            StepError: The step failed in a way that `catch` does not hold.
        """
        try:
            kinds = check_catch(catch, "try_step")
        except InvalidArgumentError as fault:
            self._scope.activation.fault(fault)
            raise
        try:
            value = await self._run_step(
                "try_step",
                name,
                fn,
                args,
                rollback,
                max_retries,
                retry_backoff_base,
                retry_backoff_max,
                timeout,
                retry_on_timeout,
                ephemeral,
                at_most_once,
            )
        except StepError as error:
            if error.kind not in kinds:
                raise
            return step_failure(error)
        return StepOk(value)

    @_in_turn("try_block")
    async def try_block(
        self,
        name: str,
        fn: Callable[[Context, Unpack[Ts]], Awaitable[T]],
        *args: Unpack[Ts],
        catch: Iterable[BlockCatchKind] = BLOCK_CATCH,
    ) -> BlockOk[T] | BlockFailure:
        """Run `fn(ctx, *args)` with a context of its own, and return the failure of what is in it as a value.

        The block has no record of its own: on replay its function runs again, over what is recorded of its operations.

        Args:
            name: The block's name, unique within its scope.
            fn: A coroutine function, called with the block's context.
            args: Its further arguments; use `functools.partial` for keywords.
            catch: What to return as a failure: that of a `step`, a `join`, a `race`, or a `rollback` (`RollbackError` out
                of a step or of the block). Everything else is raised, the function's own exceptions among it.

        Returns:
            `BlockOk(value)`, or `BlockFailure(source, name, error, step)`.
        """
        with Operation(self._scope, name, "try_block") as operation:
            return await run_block(operation, fn, args, check_catch(catch, "try_block"))

    @overload
    async def join(self, name: str, branches: Mapping[str, Callable[[Context], Awaitable[T]]]) -> JoinResult[T]: ...

    @overload
    async def join(self, name: str, branches: Iterable[Branch[T]]) -> JoinResult[T]: ...

    @_in_turn("join")
    async def join(
        self, name: str, branches: Mapping[str, Callable[[Context], Awaitable[Any]]] | Iterable[Branch[Any]]
    ) -> JoinResult[Any]:
        """Run branches beside each other and wait for all of them.

        Each branch has a context of its own, and its outcome is durable as soon as it ends; one that waits holds no other.
        The branches' outcomes are durable on return. Cancelled by an eviction, each branch goes on where it was.

        Args:
            name: The join's name, unique within its scope.
            branches: Functions `async def branch(ctx)` by name, or `Branch(name, function)` objects; 1 to 2,048.

        Returns:
            The branches' values, as they are stored, by name in the order given; `result[branch]` with a `Branch` object
            has the type that its function returns.

        Raises:
            JoinError: Branches failed; raised once all are settled, the same on every run.
        """
        with Operation(self._scope, name, "join") as operation:
            return await run_join(operation, check_branches(branches, "join"))

    @overload
    async def race(self, name: str, branches: Mapping[str, Callable[[Context], Awaitable[T]]]) -> RaceResult[T]: ...

    @overload
    async def race(self, name: str, branches: Iterable[Branch[T]]) -> RaceResult[T]: ...

    @_in_turn("race")
    async def race(
        self, name: str, branches: Mapping[str, Callable[[Context], Awaitable[Any]]] | Iterable[Branch[Any]]
    ) -> RaceResult[Any]:
        """Run branches beside each other until one succeeds.

        The winner is durable before the others are cancelled, and on return. What the losers had recorded is forgotten in
        the same batch, and messages that they had taken and not completed are back in the mailbox. Steps of a loser may
        have taken effect outside.

        Args:
            name: The race's name, unique within its scope.
            branches: Functions `async def branch(ctx)` by name, or `Branch(name, function)` objects; 1 to 2,048.

        Returns:
            The winner's name and value; it does not wait for a loser longer than that takes to unwind.

        Raises:
            RaceError: Every branch failed; the same on every run.
        """
        with Operation(self._scope, name, "race") as operation:
            return await run_race(operation, check_branches(branches, "race"))

    @_in_turn("rollback_checkpoint")
    async def rollback_checkpoint(self, name: str) -> None:
        """From here on steps may have a `rollback=`; should the workflow fail, they are undone, the last completed first.

        Counts for this scope and those inside of it. Durable on return. An error that the workflow does not catch then puts
        it in the state `rolling_back`; it has failed once every handler has run, or one has given up.

        Args:
            name: The checkpoint's name, unique within its scope.
        """
        with Operation(self._scope, name, "rollback_checkpoint") as operation:
            await run_rollback_checkpoint(operation)

    @_in_turn("sleep")
    async def sleep(self, name: str, seconds: float) -> SleepOutcome:
        """Wait for a time that outlives the process.

        The deadline is durable before the wait begins, how it ended on return.

        Args:
            name: The sleep's name, unique within its scope.
            seconds: How long, 0 or more, rounded up to a millisecond; counted from the first run.
        """
        with Operation(self._scope, name, "sleep") as operation:
            delay_ms = ms_ceil(check_duration(seconds, "the time to sleep", f'ctx.sleep("{name}", 60.0)'))
            return await run_sleep(operation, self._scope.activation.clock.now_ms() + delay_ms)

    @_in_turn("sleep_until")
    async def sleep_until(self, name: str, when: float | datetime) -> SleepOutcome:
        """Wait until a moment, like `sleep`; a moment in the past returns at once.

        Args:
            name: The sleep's name, unique within its scope.
            when: Seconds since the epoch, or a `datetime` with a timezone; rounded up to a millisecond.
        """
        with Operation(self._scope, name, "sleep_until") as operation:
            return await run_sleep(operation, check_when_ms(when, "sleep_until"))

    @overload
    async def loop(
        self,
        name: str,
        body: Callable[[Context, None], Awaitable[Continue[None] | Break[T] | None]],
        state: None = None,
        *,
        history_prune_interval: int = 20,
        history_size: int | None = None,
    ) -> T: ...

    @overload
    async def loop(
        self,
        name: str,
        body: Callable[[Context, S], Awaitable[Continue[S] | Break[T]]],
        state: S,
        *,
        history_prune_interval: int = 20,
        history_size: int | None = None,
    ) -> T: ...

    @_in_turn("loop")
    async def loop(
        self,
        name: str,
        body: Callable[[Context, Any], Awaitable[Any]],
        state: object = None,
        *,
        history_prune_interval: int = 20,
        history_size: int | None = None,
    ) -> Any:
        """Run `body(ctx, state)` again and again until it returns `Break(value)`; only recent iterations stay in history.

        Each iteration has a context of its own, so its names may repeat. The value is durable on return.

        Args:
            name: The loop's name, unique within its scope.
            body: Returns `Continue(new_state)`, `Break(value)`, or `None` to go on in a loop without state.
            state: The first iteration's state; it is stored, and comes back as the type that the body's annotations say, as
                does the value: `async def body(ctx: Context, state: S) -> Continue[S] | Break[T]`.
            history_prune_interval: After how many iterations old ones are forgotten, 1 or more.
            history_size: How many finished iterations stay, 0 or more; as many as the interval unless given.

        Raises:
            ValueTypeError: A state or the value does not fit its annotation.
            StoredValueError: A recorded one does not fit the annotation that the code has now. A fault.
        """
        with Operation(self._scope, name, "loop") as operation:
            interval = check_count(
                history_prune_interval, "history_prune_interval", least=1, example="history_prune_interval=20"
            )
            size = interval
            if history_size is not None:
                size = check_count(history_size, "history_size", least=0, example="history_size=20")
            return await run_loop(operation, body, state, interval, size)

    @_in_turn("send")
    async def send(self, name: str, workflow_id: str, message_name: str, body: object = None) -> None:
        """Put a message into another workflow's mailbox, exactly once, whatever becomes of either workflow meanwhile.

        Everything recorded before is durable before the message leaves; the message, and that it was sent, are on return.
        If the mailbox is full, or the other's storage fails, this one waits, durably, and tries again. What one branch sends
        to one workflow arrives in that order. Replayed from a step, a workflow sends anew.

        Args:
            name: The name of the entry, unique within its scope.
            workflow_id: Whose mailbox; the workflow's own is as good as another's.
            message_name: Non-empty text of at most 512 bytes.
            body: What a step could return; also an instance of a dataclass, an enum, an attrs or a pydantic class, which is sent
                as plain data.

        Raises:
            StepCriticalError: There is no such workflow (`error.name` is `WorkflowNotFoundError`), it has ended
                (`WorkflowEndedError`), or the body cannot be stored. The same on every run.
            HostRequiredError: A fault: no supervisor hosts the workflow.
        """
        with Operation(self._scope, name, "send") as operation:
            await run_send(operation, workflow_id, message_name, body)

    @overload
    async def call(
        self,
        name: str,
        workflow: Callable[[Context, InputT], Awaitable[T]],
        input: InputT,
        *,
        workflow_id: str | None = None,
        on_parent_end: OnParentEnd = "cancel",
    ) -> T: ...

    @overload
    async def call(
        self,
        name: str,
        workflow: Callable[[Context, None], Awaitable[T]],
        *,
        workflow_id: str | None = None,
        on_parent_end: OnParentEnd = "cancel",
    ) -> T: ...

    @overload
    async def call(
        self,
        name: str,
        workflow: str,
        input: object = None,
        *,
        workflow_id: str | None = None,
        on_parent_end: OnParentEnd = "cancel",
    ) -> Any: ...

    @_in_turn("call")
    async def call(
        self,
        name: str,
        workflow: Callable[[Context, Any], Awaitable[Any]] | str,
        input: object = None,
        *,
        workflow_id: str | None = None,
        on_parent_end: OnParentEnd = "cancel",
    ) -> Any:
        """Start another workflow, and wait durably for its result; this one may leave memory meanwhile.

        The child is started once, whatever becomes of either workflow. Its result is durable here on return; later runs
        return it without a look at the child. If a workflow with the given id exists, runs the same function and has an equal
        input, it is joined: its result is waited for, and it is never cancelled from here.

        Args:
            name: The name of the entry, unique within its scope.
            workflow: One of those given to `open_supervisor`, or its name.
            input: What its function gets, typed by that function's annotation.
            workflow_id: The child's id. Left out, it derives from this workflow's own and the place: it is another for
                each place, and again another where the workflow is replayed from a step.
            on_parent_end: What becomes of a child that runs when nobody waits for it any more, as its branch has lost a
                race, or this workflow has ended or is rolled back: it is cancelled (`cancel`), or goes on (`leave`).

        Returns:
            What the child's function returned, as the type that its annotation says.

        Raises:
            ChildFailedError: The child failed. Also a `WorkflowFailedError`, and a `StepError`: `try_block` catches it, and
                `recover()` of this workflow recovers the child.
            ChildCancelledError: The child was cancelled. Also a `WorkflowCancelledError` and a `StepError`.
            CallCycleError: The workflow that was joined waits for this one, itself or through others.
            StepCriticalError: The id is taken by another workflow or input (`error.name` is `WorkflowExistsError`), or the
                input cannot be stored.
            HostRequiredError: A fault: no supervisor hosts the workflow.
            InvalidArgumentError: A fault: the workflow is not registered, or the input does not fit its annotation.
        """
        with Operation(self._scope, name, "call") as operation:
            child_id = None if workflow_id is None else check_workflow_id(workflow_id)
            return await run_call(operation, workflow, input, child_id, check_on_parent_end(on_parent_end))

    @_in_turn("get_version")
    async def get_version(self, name: str, latest: int) -> int:
        """Which version of the code that follows this workflow is to run: the same on every run.

        `latest` where the workflow gets here for the first time; 1 if earlier code, which did not ask, got past here already:
        recorded entries are still ahead in this scope. Each iteration of a loop, and each branch, decides for itself.

        Recorded, and durable before the next step function runs and before the next wait.

        Args:
            name: The decision's name, unique within its scope.
            latest: The newest version that the code knows, 1 to 2**32 - 1.

        Returns:
            1 to the `latest` of the run that decided. Code has to keep what a version did for as long as workflows have it.
        """
        with Operation(self._scope, name, "get_version") as operation:
            return await run_get_version(operation, check_count(latest, "latest", least=1, example="latest=2"))

    @_in_turn("removed")
    async def removed(self, name: str, kind: RemovableKind) -> None:
        """Stand where the code of an operation was taken out, so that history that holds it is no divergence.

        All that is recorded below the name is passed over. It has to come before new operations of its scope, as nothing new
        may begin while recorded entries are ahead. Where nothing is recorded, it records itself, durable with the next write;
        so it stays in the code until every workflow that has met it has ended.

        Args:
            name: What the operation was called.
            kind: What it was: `step`, `loop`, `sleep`, `message` (a queue read, waiting or finished), `rollback_checkpoint`,
                `join`, `race`, `version_check` or `try_block`.

        Raises:
            HistoryDivergedError: History holds another kind there.
        """
        with Operation(self._scope, name, "removed") as operation:
            await run_removed(operation, check_kind(kind))

    @_on_the_spot
    def uuid(self, name: str) -> UUID:
        """A UUID (version 8) that is the same on every run, for this name in this scope. Nothing is written.

        Not secret: it derives from a seed that is stored with the workflow. It is no step's `idempotency_key`.

        Args:
            name: Non-empty text of at most 512 bytes. No operation's name is taken by it: the same name gives the same UUID.
        """
        return derive_uuid(self._scope, name)

    @_on_the_spot
    def random(self, name: str) -> Random:
        """A generator of random numbers, the same stream on every run, for this name in this scope. Nothing is written.

        Each call gives a new generator at the beginning of its name's stream. Not secret, like `uuid`. Draw from it in the
        workflow's own code, in an order that does not depend on chance.

        Args:
            name: As for `uuid`; a UUID and a generator of one name have nothing in common.
        """
        return derive_random(self._scope, name)

    @_in_turn("now")
    async def now(self, name: str) -> float:
        """The time, in seconds since the epoch with whole milliseconds, as it was when the workflow first got here.

        Recorded, and durable before the next step function runs and before the next wait.

        Args:
            name: Its name, unique within its scope.
        """
        with Operation(self._scope, name, "now") as operation:
            return await run_now(operation)

    @_in_turn("set_attributes")
    async def set_attributes(
        self, name: str, attributes: Mapping[str, Scalar], *, remove: Iterable[str] = ()
    ) -> dict[str, Scalar]:
        """Change by what the workflow can be found: `supervisor.list(attributes=...)`. Those that are not named stay.

        Attributes are state, not history: the change is made once, in the write that records that it was made. Durable before
        the next step function runs and before the next wait. What a race's loser has set stays set.

        Args:
            name: The change's name, unique within its scope.
            attributes: Text (at most 1,024 bytes), numbers, booleans or `None`, by name; a workflow has at most 64.
            remove: Names of attributes to remove first; one that there is not is no error.

        Returns:
            All attributes after the change, as they were then: the same on every run.
        """
        with Operation(self._scope, name, "set_attributes") as operation:
            return await run_attributes(operation, check_changed(attributes), check_removed(remove))

    @_in_turn("attributes")
    async def attributes(self, name: str) -> dict[str, Scalar]:
        """By what the workflow can be found, as it was when it first got here; the same on every run.

        Recorded, and durable before the next step function runs and before the next wait.

        Args:
            name: Its name, unique within its scope.
        """
        with Operation(self._scope, name, "attributes") as operation:
            return await run_attributes(operation)
