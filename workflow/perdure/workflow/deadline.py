"""A workflow's deadline: the time at which it fails unless it has ended.

1. It is decided once: the error and the state that follows are one batch, as with any other failure, and what the function
   was doing at that time does not count. Where the workflow is rolled back, the deadline is over from then on.
2. A run is ended as by an eviction: the context is sealed, the step in progress is cancelled, nothing is recorded any more.
   Only once all has unwound the workflow fails, so that no handler meets the step that it undoes.
3. Nothing runs in an activation that begins after the deadline, so code that does not fit its history is no obstacle.
4. Where nothing runs the alarm brings the workflow back: it is never later than the deadline.
5. Only a workflow that has a deadline pays for one, with a task that waits for it while the function runs.

Rejected: to fail the workflow at the deadline itself, as `cancel()` ends it. Handlers would run beside a step that cleans up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import trio

from perdure.workflow.errors import WorkflowDeadlineError
from perdure.workflow.history import History
from perdure.workflow.states import WorkflowState

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.context import Context

__all__ = ["call_until_deadline", "deadline_error", "has_passed", "lift_if_passed", "no_later"]


def has_passed(history: History, now_ms: int) -> bool:
    """Whether the workflow has a deadline that still counts, and it is over."""
    return (
        history.deadline_ms is not None
        and now_ms >= history.deadline_ms
        and history.state is not WorkflowState.ROLLING_BACK
    )


def no_later(history: History, wake_at_ms: int | None) -> int | None:
    """A wake-up at this time, or at the deadline if that comes first; in milliseconds since the epoch."""
    deadline_ms = history.deadline_ms
    if deadline_ms is None or history.state is WorkflowState.ROLLING_BACK:
        return wake_at_ms
    return deadline_ms if wake_at_ms is None else min(wake_at_ms, deadline_ms)


def lift_if_passed(history: History, now_ms: int) -> None:
    """A workflow that is made runnable again goes on without a deadline that is over: else it would fail again at once."""
    if history.deadline_ms is not None and now_ms >= history.deadline_ms:
        history.set_deadline(None)


def deadline_error(history: History) -> WorkflowDeadlineError:
    """What a workflow fails with that has not ended in time."""
    deadline_ms = history.deadline_ms
    assert deadline_ms is not None, "it has a deadline"
    return WorkflowDeadlineError(
        f"the workflow had not ended by its deadline, {_shown(deadline_ms)}; recover() lets it go on without one",
        deadline_ms=deadline_ms,
    )


def _shown(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, OSError, ValueError):
        return f"{time_ms} ms after the epoch"


async def call_until_deadline(
    activation: Activation, function: Callable[[Context, Any], Awaitable[Any]]
) -> tuple[object, BaseException | None]:
    """`Activation.call` that is closed as expired at the deadline.

    Raises:
        FaultError, StorageError: As `Activation.run`.
    """
    history = activation.history
    deadline_ms = history.deadline_ms
    if deadline_ms is None:
        return await activation.call(function)
    if activation.closing is None and has_passed(history, activation.clock.now_ms()):
        activation.expire()
    if activation.closing is not None:
        return None, None
    called: tuple[object, BaseException | None] = None, None
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expire_in_time, activation, deadline_ms)
            try:
                called = await activation.call(function)
            except BaseException as error:  # comes out below: here, the nursery would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
    except BaseException as error:
        failure = failure or error
    if failure is not None:
        raise failure
    return called


async def _expire_in_time(activation: Activation, deadline_ms: int) -> None:
    await activation.clock.wait_until_ms(deadline_ms)
    activation.expire()
