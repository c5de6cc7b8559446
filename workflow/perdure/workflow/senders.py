"""Those who wait to send because a mailbox is full.

1. First come, first served: whoever comes while others wait goes behind them, though there be room by then.
2. Whoever waits holds nothing: no activation is kept in memory for it. It has a place in a line, by the workflow's id.
3. Room is handed over. Whoever learns that there is some (a read that is durable, a workflow that was just loaded) gives the
   messages of as many senders as fit their places in the mailbox, in the order of the line; each sender then makes its own
   durable and returns. The rejected alternative, to wake senders who try again, lets them overtake each other, and late
   comers overtake them.
4. A sender that is cancelled before that has sent nothing. From then on its message is sent, whatever becomes of it.
5. What costs a wait (reading the ids that are remembered) is not done by whoever makes room, but by the first in the line, who
   is asked to look (`Place.must_look`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from perdure.storage import encode_value
from perdure.storage.schema import MailboxMessage
from perdure.workflow.checks import check_message_id, check_message_name
from perdure.workflow.errors import MailboxFullError, WorkflowEndedError
from perdure.workflow.mailbox import Letter
from perdure.workflow.plain import to_plain

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.history import History

__all__ = ["Envelope", "Place", "Senders", "ended_error", "full_error", "put"]


class Envelope:
    """A message that is to be sent, checked and encoded.

    Attributes:
        name: What it is about.
        data: Its body, encoded.
        message_id: The sender's id for it, if there is one; a request has one.
        is_request: Whether its sender waits for a reply.
    """

    __slots__ = ("data", "is_request", "message_id", "name")

    def __init__(
        self, name: str, body: object, message_id: str | None, *, bytes_max: int, is_request: bool = False
    ) -> None:
        """Check and encode.

        Raises:
            InvalidArgumentError: The name or the id is none.
            EncodeError: The body cannot be stored, or takes more than `bytes_max` bytes.
        """
        self.name: str = check_message_name(name)
        self.message_id: str | None = None if message_id is None else check_message_id(message_id)
        self.is_request: bool = is_request
        what = f"the body of message {name!r}"
        self.data: bytes = encode_value(body, bytes_max=bytes_max, what=what, to_plain=to_plain)


def put(activation: Activation, envelope: Envelope) -> Letter:
    """Give a message its place in the mailbox; durable with the next commit, and then to be offered."""
    message_id = envelope.message_id
    message = MailboxMessage(
        message_id or activation.ids.next_id(), envelope.name, envelope.data, activation.clock.now_ms()
    )
    mailbox = activation.mailbox
    letter = mailbox.write(message, remember=message_id is not None and not envelope.is_request)
    if envelope.is_request:
        activation.requests.open(message.id, letter.sequence, waiting=mailbox.size)
    activation.arm_if_dormant()
    return letter


def ended_error(history: History) -> WorkflowEndedError:
    """The error for a message to a workflow that has ended."""
    return WorkflowEndedError(
        f"workflow {history.workflow_id!r} is {history.state.value} and takes no more messages",
        workflow_id=history.workflow_id,
        state=history.state.value,
    )


def full_error(workflow_id: str, limit: int) -> MailboxFullError:
    """The error for a message that does not fit."""
    return MailboxFullError(
        f"the mailbox of workflow {workflow_id!r} is full: it holds {limit} messages, or others wait to send; send again "
        "once it has read some, or wait with `await handle.message(...)`",
        workflow_id=workflow_id,
        limit=limit,
    )


class Place:
    """A sender's place in a line.

    Attributes:
        workflow_id: Whom the message is for.
        envelope: The message.
        letter: The message in the mailbox, once it was let in; it is the sender's to make it durable, and to offer it.
        activation: Where it is let in.
        held: What `Senders` holds so that the activation stays in memory until then.
        must_look: Whether it is asked to see, by loading the workflow, whether there is room.
        is_decided: Whether its time in the line is over.
    """

    __slots__ = (
        "_error",
        "_news",
        "activation",
        "envelope",
        "held",
        "is_decided",
        "letter",
        "must_look",
        "workflow_id",
    )

    def __init__(self, workflow_id: str, envelope: Envelope) -> None:
        self.workflow_id: str = workflow_id
        self.envelope: Envelope = envelope
        self.letter: Letter | None = None
        self.activation: Activation | None = None
        self.held: Any = None
        self.must_look: bool = False
        self.is_decided: bool = False
        self._error: Callable[[], Exception] | None = None
        self._news = trio.Event()

    async def wait(self) -> None:
        """Return once it is decided, or asked to look."""
        await self._news.wait()

    def check(self) -> None:
        """Raise the error with which the wait ended, if it did."""
        if self._error is not None:
            raise self._error()

    def look(self) -> None:
        """Ask it to look."""
        self.must_look = True
        self._news.set()

    def looked(self) -> None:
        """It has."""
        self.must_look = False
        if not self.is_decided:
            self._news = trio.Event()

    def decide(self, error: Callable[[], Exception] | None = None) -> None:
        """Its time in the line is over."""
        self._error = error
        self.is_decided = True
        self._news.set()


class Senders:
    """The lines before the mailboxes of some workflows.

    Args:
        hold: Called with a workflow's id when a sender was let in, to keep its activation in memory; what it returns is for
            whoever finishes the sending (`Place.held`).
    """

    def __init__(self, hold: Callable[[str], object] | None = None) -> None:
        self._hold = hold
        self._closed: Callable[[], Exception] | None = None
        self._lines: dict[str, OrderedDict[Place, None]] = {}

    def are_waiting(self, workflow_id: str) -> bool:
        """Whether somebody waits to send to this workflow."""
        return workflow_id in self._lines

    def join(self, workflow_id: str, envelope: Envelope) -> Place:
        """Go to the end of a line; the wait is over at once while the lines are closed."""
        place = Place(workflow_id, envelope)
        if self._closed is not None:
            place.decide(self._closed)
        else:
            self._lines.setdefault(workflow_id, OrderedDict())[place] = None
        return place

    def withdraw(self, place: Place) -> None:
        """Leave the line without having sent."""
        line = self._lines.get(place.workflow_id)
        if line is None or line.pop(place, place) is place:
            return
        if not line:
            del self._lines[place.workflow_id]
        elif place.must_look:
            next(iter(line)).look()

    def let_in(self, activation: Activation) -> None:
        """Give as many messages as there is room for their places in the mailbox."""
        workflow_id = activation.history.workflow_id
        line = self._lines.get(workflow_id)
        if line is None or activation.history.state.is_terminal or not activation.takes_mail:
            return
        mailbox = activation.mailbox
        while line:
            place = next(iter(line))
            message_id = place.envelope.message_id
            is_full = mailbox.size >= activation.mailbox_limit
            if message_id is not None and not mailbox.has_known_ids and not is_full:
                place.look()
                return
            # What is known needs no room. Its first sending may still be on its way to the disk, and is waited for.
            is_known = message_id is not None and mailbox.has_known_ids and activation.knows(message_id)
            if is_full and not is_known:
                return
            del line[place]
            if not is_known:
                place.letter = put(activation, place.envelope)
            place.activation = activation
            if self._hold is not None:
                place.held = self._hold(workflow_id)
            place.decide()
        del self._lines[workflow_id]

    def ask_to_look(self, workflow_id: str) -> None:
        """An activation is gone that may have made room without telling: let the first in the line see."""
        line = self._lines.get(workflow_id)
        if line is not None:
            next(iter(line)).look()

    def refuse(self, workflow_id: str, error: Callable[[], Exception]) -> None:
        """Send everybody in a line away."""
        for place in self._lines.pop(workflow_id, ()):
            place.decide(error)

    def close(self, error: Callable[[], Exception]) -> None:
        """Send everybody away, and whoever comes."""
        self._closed = error
        for workflow_id in list(self._lines):
            self.refuse(workflow_id, error)

    def open(self) -> None:
        """Let senders wait."""
        self._closed = None
