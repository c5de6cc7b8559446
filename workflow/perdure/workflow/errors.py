"""The errors of the engine, and the signal that suspends a workflow.

1. *Failures* are outcomes of the user's work (`StepError`, `QueueTimeoutError`): a workflow may catch them, and they are
   the same class with the same data on the first run and on replay.
2. *Faults* (`FaultError`: divergence and misuse) are mistakes in the code, not outcomes. They write nothing and keep the
   workflow's state; with right code it goes on.
3. *Endings* (`WorkflowFailedError`, `WorkflowCancelledError`, `WorkflowSuspendedError`) tell whoever runs or awaits a
   workflow how it ended.
4. `SuspendSignal` is a `BaseException`, so that a user's `except Exception` cannot eat it (Trio's rule for `Cancelled`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from perdure.storage import PerdureError

__all__ = [
    "CallCycleError",
    "ChildCancelledError",
    "ChildFailedError",
    "CrashLoopError",
    "CriticalError",
    "DuplicateNameError",
    "ErrorInfo",
    "FailureKind",
    "FaultError",
    "HistoryDivergedError",
    "HostRequiredError",
    "InvalidArgumentError",
    "JoinError",
    "MailboxFullError",
    "MessageCompletedError",
    "MisuseError",
    "NotARequestError",
    "OperationInProgressError",
    "QueueTimeoutError",
    "RaceError",
    "RequestTimeoutError",
    "RequestUnansweredError",
    "RewindError",
    "RollbackCheckpointError",
    "RollbackError",
    "StoredValueError",
    "StepCriticalError",
    "StepError",
    "StepExhaustedError",
    "StepInterruptedError",
    "StepTimeoutError",
    "SuspendSignal",
    "UserCancellationError",
    "ValueTypeError",
    "WorkflowCancelledError",
    "WorkflowDeadlineError",
    "WorkflowEndedError",
    "WorkflowError",
    "WorkflowFailedError",
    "WorkflowSuspendedError",
]

FailureKind: TypeAlias = Literal["exhausted", "critical", "rollback", "timeout", "interrupted"]
"""Why a step failed for good; stored with its entry."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it is stored: the same after a restart as on the first run.

    Attributes:
        name: The class's name.
        message: The message, at most 64 KiB, cut between characters and marked when longer.
        stack: The traceback as text, bounded like the message, or `None` where none was kept.
        metadata: The error's own attributes of plain type (text, number, bool, `None`).
    """

    name: str
    message: str
    stack: str | None = None
    metadata: Mapping[str, str | int | float | bool | None] = field(
        default_factory=dict[str, "str | int | float | bool | None"]
    )

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


class WorkflowError(PerdureError):
    """The root of the engine's errors."""


# Faults: mistakes in the code.


class FaultError(WorkflowError):
    """The code cannot run this workflow. Nothing was written; with right code the workflow goes on."""


class HistoryDivergedError(FaultError):
    """The code asks for something else than its recorded history holds at this place.

    Attributes:
        location: The place, as a readable path.
        found: What history holds there, or `None` when it holds nothing.
        asked: What the code asked for, or `None` when it did not ask for what history holds.
    """

    location: str
    found: str | None
    asked: str | None


class MisuseError(FaultError):
    """The context was used in a way that cannot be replayed."""


class DuplicateNameError(MisuseError):
    """Two entries of one scope have the same name, or a queue read's derived names meet another entry's."""

    name: str


class OperationInProgressError(MisuseError):
    """An operation was started while another of the same context was in progress (a forgotten `await`?)."""

    name: str
    in_progress: str


class UserCancellationError(MisuseError):
    """A cancel scope of the workflow's own code fired inside a durable operation; use `timeout=` or `ctx.race`."""

    name: str


class MessageCompletedError(MisuseError):
    """A message was completed a second time in one run.

    Attributes:
        location: The message's place in history, as a readable path.
    """

    location: str


class RollbackCheckpointError(MisuseError):
    """A step has a `rollback=` where no `ctx.rollback_checkpoint` was passed before; the step did not run."""

    name: str


class HostRequiredError(MisuseError):
    """An operation that involves other workflows was met where no supervisor hosts the workflow; run it under one."""

    name: str


class InvalidArgumentError(MisuseError, ValueError):
    """An argument has the wrong type or value; the message says what to write instead."""


class StoredValueError(FaultError):
    """What history holds does not fit the annotation that the code has now; with the old one the workflow goes on.

    Attributes:
        path: Where the misfit is, such as `result.items[2].price`.
        expected: The type that should be there.
        found: The type of what is there.
    """

    path: str
    expected: str
    found: str


# Failures of steps and waits: outcomes that a workflow may catch.


class _RaisedByUsers(PerdureError):
    """What workflows raise takes any arguments, as every exception of Python does."""

    def __init__(self, *args: object, **facts: Any) -> None:
        super().__init__(", ".join(str(arg) for arg in args), **facts)
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return BaseException.__reduce__(self)  # type: ignore[return-value]


class CriticalError(_RaisedByUsers):
    """Raise it (or a subclass) in a step to fail at once, without retries."""


class RollbackError(_RaisedByUsers):
    """Raise it in a step to fail at once and undo what was done since the rollback checkpoint."""


class StepError(WorkflowError):
    """A step failed for good.

    Attributes:
        step_name: The step's name.
        attempts: How often its function was begun, as far as is known.
        error: The last attempt's error as it is stored; the original exception is `__cause__` on the first run only.
        kind: Why no further attempt is made.
        entry_id: The id of its history entry.
    """

    step_name: str
    attempts: int
    error: ErrorInfo
    kind: FailureKind
    entry_id: str


class StepExhaustedError(StepError):
    """Every retry failed; `error` is the last attempt's."""


class StepCriticalError(StepError):
    """The step raised an error that is not retried (`CriticalError`, `RollbackError`), or returned an unstorable value."""


class StepTimeoutError(StepError):
    """The step exceeded its `timeout` and was cancelled."""


class StepInterruptedError(StepError):
    """An `at_most_once` step was begun and its process died; whether it took effect is unknown. It is not run again."""


class JoinError(WorkflowError):
    """Branches of a join failed; raised once all of its branches are settled.

    Attributes:
        name: The join's name.
        errors: Each failed branch's error as it is stored, by branch name in the order given. The original exceptions are
            `__cause__` on the first run only.
        values: What the other branches returned, as it is stored, by branch name in the order given.
        causes: The ids of the history entries that failed: the join's, and those of the steps behind it.
    """

    name: str
    errors: Mapping[str, ErrorInfo]
    values: Mapping[str, Any]
    causes: Sequence[str]


class RaceError(WorkflowError):
    """Every branch of a race failed.

    Attributes:
        name: The race's name.
        errors: Each branch's error as it is stored, by branch name in the order given. The original exceptions are
            `__cause__` on the first run only.
        causes: The ids of the history entries that failed: the race's, and those of the steps behind it.
    """

    name: str
    errors: Mapping[str, ErrorInfo]
    causes: Sequence[str]


class ValueTypeError(WorkflowError):
    """A value does not fit its annotation: what a step or the workflow returned, a loop's state, or a message's body.

    Attributes:
        path: Where the misfit is, such as `result.items[2].price`.
        expected: The type that should be there.
        found: The type of what is there.
    """

    path: str
    expected: str
    found: str


class QueueTimeoutError(WorkflowError):
    """No message arrived within a queue read's `timeout`."""

    name: str
    names: tuple[str, ...] | None


# Endings.


class WorkflowFailedError(WorkflowError):
    """The workflow ended as failed.

    Attributes:
        workflow_id: Which workflow.
        name, message, stack, metadata: Of the stored error, whatever class it was. The original exception is
            `__cause__` when it was raised in this process.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.error: ErrorInfo = facts["error"]
        self.workflow_id: str = facts["workflow_id"]
        self.name: str = self.error.name
        self.stack: str | None = self.error.stack
        self.metadata: Mapping[str, str | int | float | bool | None] = self.error.metadata

    def __str__(self) -> str:
        return f"workflow {self.workflow_id!r} failed with {self.error}"


class WorkflowCancelledError(WorkflowError):
    """The workflow was cancelled."""

    workflow_id: str


class WorkflowDeadlineError(WorkflowError):
    """The workflow had not ended at the deadline that it was given; what it failed with.

    Attributes:
        deadline_ms: The deadline, in milliseconds since the epoch.
    """

    deadline_ms: int


class ChildFailedError(StepCriticalError, WorkflowFailedError):
    """A workflow that was called (`ctx.call`) ended as failed. Both a failure that may be caught, and the child's own.

    Left uncaught, it ends the caller under the child's error's name and message.

    Attributes:
        workflow_id: The child's id.
        step_name: The call's name in its caller.
        error: What the child failed with, as it is stored; its metadata also holds the child's id, as `child`.
    """


class ChildCancelledError(StepCriticalError, WorkflowCancelledError):
    """A workflow that was called (`ctx.call`) was cancelled.

    Attributes:
        workflow_id: The child's id.
        step_name: The call's name in its caller.
    """


class CallCycleError(StepCriticalError):
    """A call joined a workflow that waits, itself or through others, for the caller: none of them could ever go on.

    Attributes:
        chain: The ids of the workflows, each of which waits for the next; the caller's is the first and the last.
    """

    chain: tuple[str, ...]


class WorkflowSuspendedError(WorkflowError):
    """The workflow has not ended: it waits (yield mode) or was evicted, and has to be run again."""

    workflow_id: str
    state: str


class WorkflowEndedError(WorkflowError):
    """The workflow has ended and takes no more messages."""

    workflow_id: str
    state: str


class RequestUnansweredError(WorkflowEndedError):
    """The workflow has ended, and had taken the request, or had it in its mailbox, without completing it.

    Attributes:
        request_id: The request's id.
    """

    request_id: str


class RequestTimeoutError(WorkflowError):
    """No reply came in time. Asking again with the same id is safe: what was sent is not sent again, and its reply is kept.

    Attributes:
        workflow_id: Who was asked.
        name: The request's name.
        request_id: Its id, given or made: the `id` to ask again with.
        timeout: How long it was waited for, in seconds.
    """

    workflow_id: str
    name: str
    request_id: str
    timeout: float


class NotARequestError(WorkflowError):
    """A message with this id was sent before that was no request, so nobody will reply to it; ask with another id."""

    workflow_id: str
    request_id: str


class MailboxFullError(WorkflowError):
    """The mailbox holds as many messages as it may, or others wait already to send; nothing was sent.

    Attributes:
        workflow_id: Whose mailbox.
        limit: How many messages it may hold.
    """

    workflow_id: str
    limit: int


class RewindError(WorkflowError):
    """The workflow cannot be replayed from there; nothing was changed.

    Attributes:
        entry_id: The id that was given.
        found: What is in the way (`a sleep`, `a running step`, ...), or `None` where nothing was found.
    """

    entry_id: str | None
    found: str | None


class CrashLoopError(WorkflowError):
    """The workflow was activated too often without getting further; `recover()` resets it."""


class SuspendSignal(BaseException):
    """Raised by a context that was closed under the function: let it pass. Never caught by `except Exception`."""
