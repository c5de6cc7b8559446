"""`WorkflowHandle`: what can be asked of a workflow from outside, the same for a supervisor's and for a local one."""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from perdure.workflow.errors import ErrorInfo
from perdure.workflow.states import WorkflowState
from perdure.workflow.types import ChildInfo, HistoryEntry, Message

if TYPE_CHECKING:
    import typing_extensions

__all__ = ["WorkflowHandle"]


T = TypeVar("T")

if TYPE_CHECKING:
    Output_co = typing_extensions.TypeVar("Output_co", covariant=True, default=Any)
else:
    Output_co = TypeVar("Output_co", covariant=True)


class WorkflowHandle(Protocol[Output_co]):
    """A workflow, from outside. Every method may be called at any time, by any number of tasks.

    Its parameter is the type of what the workflow's function returns.
    """

    @property
    def workflow_id(self) -> str:
        """The workflow's id."""
        ...

    async def result(self) -> Output_co:
        """Wait until the workflow ends, and return what its function returned, typed by the function's annotation.

        Cancelling this wait leaves the workflow alone.

        Raises:
            WorkflowFailedError: It failed; carries name, message, stack and metadata of the stored error.
            WorkflowCancelledError: It was cancelled.
            WorkflowSuspendedError: It is not running and has not ended: it waits in yield mode, or was evicted from a run of
                `start_workflow`, or its supervisor left the block. (A supervisor's evicted workflow is waited for.)
            FaultError: Its code cannot run it, or says another type than that of what is stored.
        """
        ...

    async def message(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Put a message into the workflow's mailbox. Durable on return.

        While the mailbox is full it waits, behind those who wait already. Cancelled while it waits for room, it has sent
        nothing; cancelled after that, the message may or may not have been sent: give an `id` and send it again.

        Args:
            name: Non-empty text of at most 512 bytes.
            body: What a step could return; also an instance of a dataclass, an enum, an attrs or a pydantic class, which is sent
                as plain data.
            id: Sending the same id again delivers nothing (the last 1,000 ids of a workflow are remembered), and returns at
                once though the mailbox be full.

        Raises:
            WorkflowEndedError: The workflow has ended, also while the message waited for room.
            MailboxFullError: The mailbox is full and the workflow does not run (a run of `start_workflow` that is over); under
                a supervisor it is waited for instead.
            EncodeError: The body cannot be stored.
        """
        ...

    async def message_nowait(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """As `message`, without waiting for room. Durable on return.

        Raises:
            MailboxFullError: The mailbox is full, or others wait already; nothing was sent.
            WorkflowEndedError: The workflow has ended.
            EncodeError: The body cannot be stored.
        """
        ...

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: None = None
    ) -> Any: ...

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: type[T]
    ) -> T: ...

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: UnionType
    ) -> Any: ...

    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: Any = None
    ) -> Any:
        """Send a message and return what the workflow replies to it with `await message.complete(reply)`.

        Durable on both sides: asking again with the same id, after a timeout, a cancellation or a restart of either side,
        delivers nothing more, and returns the same reply, now or once it is there. The last 1,000 replies of a workflow are
        kept, also after its end. Cancelled while it waits, the request stays sent.

        Args:
            name: Non-empty text of at most 512 bytes.
            body: As of `message`.
            timeout: Seconds, 0 or more, until it gives up, room in the mailbox included; `None` waits for ever.
            id: The request's id; one is made unless given, and is in the `RequestTimeoutError`.
            reply_type: What the reply is to be, as for an annotation: `reply_type=Answer`; plain data when left out.

        Raises:
            RequestTimeoutError: No reply came in time; ask again with its `request_id`.
            RequestUnansweredError: The workflow ended without completing it.
            WorkflowEndedError: The workflow had ended before it was sent.
            NotARequestError: A message with this id was sent that was no request.
            WorkflowSuspendedError: The run of `start_workflow` is over (in yield mode, when it waits); ask again once it has run.
            ValueTypeError: The reply does not fit `reply_type`; it is kept.
            EncodeError: The body cannot be stored.
        """
        ...

    async def undelivered(self) -> tuple[Message[Any], ...]:
        """The messages in the mailbox, oldest first: what waits to be read, or was left over when the workflow ended.

        Activates nothing, and takes nothing out. What was read is in `history()`, completed or not.
        """
        ...

    async def wake(self) -> None:
        """End every pending sleep and retry backoff now. Durable on return; without effect where nothing sleeps."""
        ...

    async def recover(self) -> None:
        """Run a failed workflow again, over what is recorded. Durable on return; without effect on one that did not fail.

        What failed it (steps, and the branches of joins and races) has fresh attempts, and so have steps that were undone,
        which get other idempotency keys. What was recorded after the failure need not be asked for by the code any more.
        """
        ...

    async def evict(self) -> None:
        """Take the workflow out of memory; it stays resumable. Returns once its function has unwound."""
        ...

    async def cancel(self) -> None:
        """End the workflow as cancelled, for good. Durable on return; without effect once it has ended."""
        ...

    async def get_state(self) -> WorkflowState:
        """Where it stands."""
        ...

    async def get_output(self) -> Output_co | None:
        """What it returned, or `None` (also while it has not ended)."""
        ...

    async def get_error(self) -> ErrorInfo | None:
        """What it failed with, or `None`."""
        ...

    async def children(self) -> tuple[ChildInfo, ...]:
        """The workflows that it has called (`ctx.call`), in the order of the calls, as far as its history holds them."""
        ...

    async def history(self) -> tuple[HistoryEntry, ...]:
        """Its history, decoded, in order of location."""
        ...
