"""The plain values that the engine takes and gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from perdure.storage.schema import EntryMetadata
from perdure.workflow.errors import ErrorInfo, FailureKind, MisuseError
from perdure.workflow.states import WorkflowState

if TYPE_CHECKING:
    import typing_extensions

__all__ = [
    "ANY_MESSAGE",
    "BlockFailure",
    "BlockOk",
    "Break",
    "ChildInfo",
    "Continue",
    "FailureSource",
    "HistoryEntry",
    "Message",
    "RaceResult",
    "Reply",
    "RunMode",
    "SleepOutcome",
    "StepFailure",
    "StepOk",
    "WorkflowResult",
    "WorkflowSnapshot",
]

T_co = TypeVar("T_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)
if TYPE_CHECKING:
    # With a default, so that a bare `Message` is one of anything. Type checkers bring this module along.
    Any_co = typing_extensions.TypeVar("Any_co", covariant=True, default=Any)
else:
    Any_co = TypeVar("Any_co", covariant=True)

RunMode: TypeAlias = Literal["yield", "live"]
"""`yield`: return when the workflow has to wait. `live`: stay, and go on when the wait ends."""

FailureSource: TypeAlias = Literal["step", "join", "race", "block"]
"""What failed in a try block."""

ANY_MESSAGE: Final = ("*",)
"""What `waiting_for_messages` holds when a message of any name ends the wait."""


@dataclass(frozen=True, slots=True)
class Continue(Generic[S_co]):
    """A loop body's answer: run another iteration, with this state."""

    state: S_co


@dataclass(frozen=True, slots=True)
class Break(Generic[T_co]):
    """A loop body's answer: the loop is done, with this value."""

    value: T_co


class SleepOutcome(enum.StrEnum):
    """How a sleep ended."""

    COMPLETED = "completed"
    """Its time came."""
    INTERRUPTED = "interrupted"
    """`wake()` ended it early."""


class _Completable(Protocol):
    async def complete(self, reply: object = None) -> None: ...


class _Read:
    """What a message keeps beside its fields; no part of its value, so no field of the dataclass."""

    __slots__ = ("_completion",)

    _completion: _Completable


@dataclass(frozen=True, slots=True)
class Message(_Read, Generic[Any_co]):
    """A message that was taken from the mailbox; its parameter is the type of its body.

    Attributes:
        id: The sender's id for it, or one that was made for it.
        name: What it is about.
        body: The value that was sent, as the `type=` that the read asked for.
        created_at: When it was sent, in seconds since the epoch.
    """

    id: str
    name: str
    body: Any_co
    created_at: float

    @classmethod
    def read(cls, id: str, name: str, body: Any, created_at: float, *, completion: _Completable) -> Message[Any]:
        """A message as a queue read hands it out."""
        message: Message[Any] = cls(id, name, body, created_at)
        object.__setattr__(message, "_completion", completion)
        return message

    async def complete(self, reply: object = None) -> None:
        """Record that the message was dealt with, if it was read with `completable=True`; durable on return.

        To whoever asked with `handle.request` it also replies: with this value, or `None`. The reply is durable with the
        completion, and only the first one counts. To a message that is no request there is nobody to reply to, and a reply
        is passed over.

        Until then it counts as not dealt with: each run hands it to the code again, since it is in history, and when its
        read is forgotten (its branch lost a race, or the workflow is replayed from an earlier step) it goes back into the
        mailbox. A completed message never does. On a later run, or in a later attempt of the same step, the call does
        nothing, so it may stand after the work or at the end of the step that does the work.

        Call it in the workflow's own code or inside the function of a step (in a plain function's worker thread:
        `trio.from_thread.run(message.complete)`). A checkpoint; cancellation before it begins leaves the message as it
        was, afterwards it is not interrupted.

        Args:
            reply: What a step could return; also an instance of a dataclass, an enum, an attrs or a pydantic class, which is
                sent as plain data.

        Raises:
            MessageCompletedError: It was completed before in this run. A fault, like the next.
            MisuseError: It was read without `completable=True`, its read is over and forgotten, or no read returned it.
            EncodeError: The reply cannot be stored; the message is not completed.
        """
        try:
            completion = self._completion
        except AttributeError:
            raise MisuseError(
                f"message {self.id!r} is not one that ctx.queue returned, but made or copied by other code; complete the one "
                "that was read"
            ) from None
        await completion.complete(reply)


@dataclass(frozen=True, slots=True)
class Reply(Generic[Any_co]):
    """The reply to a request, as `read_reply` gives it; its parameter is the type of the value.

    Attributes:
        value: What the workflow replied, as the `reply_type=` that was asked for.
    """

    value: Any_co


@dataclass(frozen=True, slots=True)
class RaceResult(Generic[T_co]):
    """What `ctx.race` returns.

    Attributes:
        winner: The name of the branch that won.
        value: What it returned, as it is stored.
    """

    winner: str
    value: T_co


@dataclass(frozen=True, slots=True)
class StepOk(Generic[T_co]):
    """`ctx.try_step`: the step succeeded.

    Attributes:
        value: What it returned, as it is stored.
    """

    value: T_co


@dataclass(frozen=True, slots=True)
class StepFailure:
    """`ctx.try_step`: the step failed for good; the same on every run.

    Attributes:
        kind: Why no further attempt is made: `exhausted`, `critical`, `timeout`, `interrupted` or `rollback`.
        step_name: The step's name.
        attempts: How often its function was begun, as far as is known.
        error: The last attempt's error as it is stored.
    """

    kind: FailureKind
    step_name: str
    attempts: int
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class BlockOk(Generic[T_co]):
    """`ctx.try_block`: the block's function returned.

    Attributes:
        value: What it returned.
    """

    value: T_co


@dataclass(frozen=True, slots=True)
class BlockFailure:
    """`ctx.try_block`: something in the block failed; the same on every run.

    Attributes:
        source: What failed: a `step`, a `join`, a `race`, or the `block` itself (it raised `RollbackError`).
        name: The name of what failed.
        error: Its error as it is stored.
        step: The step's failure in full, if `source` is `step`.
    """

    source: FailureSource
    name: str
    error: ErrorInfo
    step: StepFailure | None = None


@dataclass(frozen=True, slots=True)
class WorkflowResult(Generic[Any_co]):
    """How one run of a workflow ended; its parameter is the type of what its function returns.

    Attributes:
        state: The workflow's state now.
        output: What the function returned, once `state` is `COMPLETED`.
        sleep_until: The earliest time at which it has to be run again, in seconds since the epoch, or `None`.
        waiting_for_messages: Names of the messages that it waits for, sorted; `ANY_MESSAGE` for any; `None` for none.
    """

    state: WorkflowState
    output: Any_co | None = None
    sleep_until: float | None = None
    waiting_for_messages: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of a workflow's history, decoded for reading.

    Attributes:
        path: Where it is: names, and numbers for loop iterations.
        kind: `step`, `loop`, `sleep`, `message`, `rollback_checkpoint`, `join`, `race`, `removed` or `version_check`.
        data: The entry's fields by name; user values are decoded.
        metadata: Status, attempts and times, where the entry has them.
        id: The entry's id.
    """

    path: tuple[str | int, ...]
    kind: str
    data: dict[str, Any]
    metadata: EntryMetadata | None
    id: str


@dataclass(frozen=True, slots=True)
class ChildInfo:
    """A workflow that another one called (`ctx.call`), as that one knows it.

    Attributes:
        workflow_id: The child's id.
        workflow: The name of its function.
        path: The place of the call: names, and numbers for loop iterations.
        outcome: `completed`, `failed` or `cancelled`; `None` while that is not known.
    """

    workflow_id: str
    workflow: str
    path: tuple[str | int, ...]
    outcome: Literal["completed", "failed", "cancelled"] | None


@dataclass(frozen=True, slots=True)
class WorkflowSnapshot:
    """A workflow as it is stored, read without running it.

    Attributes:
        state: `PENDING` for an empty namespace.
        input: What it was started with.
        output: What it returned, or `None`.
        error: What it failed with, or `None`.
        entries: Its history, parents before children.
    """

    state: WorkflowState
    input: Any
    output: Any
    error: ErrorInfo | None
    entries: tuple[HistoryEntry, ...]
