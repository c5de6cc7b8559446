"""What an operation needs of whoever hosts the workflow; the supervisor implements it (`perdure.actors.hosting`).

1. The engine knows no supervisor. A workflow that is run without one has no host, and operations that need it say so.
2. A host's methods may wait, and end with the activation: they are cancelled when it is closed.
3. What is an outcome is returned, as the error that is to be recorded. What is raised is not: the storage of another workflow
   fails (`StorageError`: it is tried again), its mailbox is full (`MailboxFullError`: it is waited for), or the host is
   leaving (`HostLeavingError`: it goes on at the next start).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perdure.workflow.errors import ErrorInfo, HostRequiredError, WorkflowError

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.calls import ChildOutcome, OpenCall
    from perdure.workflow.definition import Workflow
    from perdure.workflow.scope import Operation

__all__ = ["CallRefusal", "CallRequest", "Host", "HostLeavingError", "Parcel", "host_of"]


class HostLeavingError(WorkflowError):
    """The host takes nothing more; what was asked for is to be asked again at the next start. Never seen by workflows."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message from one workflow to another.

    Attributes:
        sender: The id of the workflow that sends it.
        target: The id of the one that is to get it.
        message_id: What the target knows a repetition by.
        name: What it is about.
        body: Its body, encoded.
    """

    sender: str
    target: str
    message_id: str
    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call of a workflow, whose open call is durable.

    Attributes:
        caller: Who calls.
        call: The open call.
        workflow: What is called.
        input: What it gets.
    """

    caller: Activation
    call: OpenCall
    workflow: Workflow[Any, Any]
    input: object


@dataclass(frozen=True, slots=True)
class CallRefusal:
    """Why a call fails without a child.

    Attributes:
        error: What is recorded.
        chain: The workflows that wait for each other, if that is why.
    """

    error: ErrorInfo
    chain: tuple[str, ...] = ()


class Host(Protocol):
    """The surroundings of a hosted workflow."""

    def find_workflow(self, given: object) -> Workflow[Any, Any]:
        """The registered workflow that was given, as an object, a function or a name.

        Raises:
            InvalidArgumentError: It is none, or not registered here.
        """
        ...

    async def deliver(self, parcel: Parcel) -> ErrorInfo | None:
        """Put a message into another workflow's mailbox, once only, durable on return, and have that run.

        Returns:
            `None`, or why the message was refused for good.

        Raises:
            MailboxFullError: There is no room; the sender is told by the signal `room` once there may be.
            StorageError: Whether it was put there is unknown.
            HostLeavingError: The host takes nothing more.
        """
        ...

    async def start_child(self, request: CallRequest) -> ChildOutcome | CallRefusal | None:
        """See that the child exists, and that it will tell its end to the caller (`notices.receive`); durable on return.

        A child of the caller's own that has failed is recovered, where the call is made again.

        Returns:
            `None`; or how it has ended already; or why the call fails for good.

        Raises:
            StorageError: The child's storage failed.
            HostLeavingError: The host takes nothing more.
        """
        ...

    async def look_after(self, caller_id: str, child_id: str) -> ChildOutcome | CallRefusal | None:
        """See that nothing has become of a child that was started by an earlier activation, without opening it.

        Returns:
            `None` if it is there and will tell; or how it has ended; or, if it is gone, why the call fails.

        Raises:
            StorageError, HostLeavingError: As `start_child`.
        """
        ...

    def has_room(self, workflow_id: str, count: int) -> bool:
        """There is room for so many messages in a hosted workflow's mailbox.

        Returns:
            Whether workflows are told that wait to send there, and whose turn it is.
        """
        ...


def host_of(operation: Operation) -> Host:
    """The host of the operation's workflow.

    Raises:
        HostRequiredError: It has none.
    """
    host = operation.scope.activation.host
    if host is None:
        raise HostRequiredError(
            f"ctx.{operation.operation}({operation.name!r}, ...) involves another workflow, and nothing hosts this one; run it "
            'under a supervisor: `async with open_supervisor("data/", workflows=[...]) as supervisor`',
            name=operation.name,
        )
    return host
