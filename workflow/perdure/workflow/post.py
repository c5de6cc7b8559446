"""Messages to a workflow that nothing is running, through its driver: `send_message`, `send_request`, `read_reply`.

1. Nobody reads meanwhile, so nobody waits: a full mailbox is an error, and a reply is there or not.
2. Those who send through one driver take turns, or two would find the same place in the mailbox free.
3. Only what sending takes is read, whatever the length of the history.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import uuid4

import trio

from perdure.storage import Driver, decode_value
from perdure.workflow.activation import Activation
from perdure.workflow.checks import check_driver, check_mailbox_limit, check_message_id, check_methods
from perdure.workflow.clock import Clock
from perdure.workflow.control import send
from perdure.workflow.desk import find_reply
from perdure.workflow.mailbox import MAILBOX_LIMIT
from perdure.workflow.senders import Envelope
from perdure.workflow.typed import wanted
from perdure.workflow.types import Reply

__all__ = ["check_clock", "read_reply", "send_message", "send_request", "turn_of"]


def check_clock(clock: object) -> None:
    """A clock, or none."""
    if clock is not None:
        check_methods(clock, ("now_ms", "wait_until_ms"), "clock", "SystemClock()")


async def send_message(
    driver: Driver,
    name: str,
    body: object,
    *,
    id: str | None = None,
    mailbox_limit: int = MAILBOX_LIMIT,
    clock: Clock | None = None,
) -> None:
    """Append a message to the mailbox of a workflow that nothing is running; durable on return.

    Several tasks may send at once through one driver. Also arms the workflow's alarm for now, so that a host that looks at
    alarms runs it.

    Args:
        driver: The workflow's namespace.
        name: The message's name, non-empty text of at most 512 bytes.
        body: What a step could return, or an instance of a dataclass, an enum, an attrs or a pydantic class.
        id: Sending the same id again delivers nothing (the last 1,000 ids are remembered).
        mailbox_limit: How many messages the mailbox may hold.
        clock: Where the time comes from; the system's clock unless given.

    Raises:
        WorkflowEndedError: The workflow is terminal.
        MailboxFullError: The mailbox is full; nothing was sent. Run the workflow, and send again.
        EncodeError: The body cannot be stored.
        StorageError: It is not known to be stored.
    """
    await _send(driver, name, body, id, mailbox_limit, clock, is_request=False)


async def send_request(
    driver: Driver,
    name: str,
    body: object = None,
    *,
    id: str | None = None,
    mailbox_limit: int = MAILBOX_LIMIT,
    clock: Clock | None = None,
) -> str:
    """The same for a request: once the workflow has run and completed it, `read_reply` has its reply.

    Args:
        driver: The workflow's namespace.
        name: The request's name, non-empty text of at most 512 bytes.
        body: As of a message.
        id: What the reply is found by; one is made unless given. Sending the same id again delivers nothing.
        mailbox_limit: How many messages the mailbox may hold.
        clock: Where the time comes from; the system's clock unless given.

    Returns:
        The request's id.

    Raises:
        NotARequestError: A message with this id was sent that was no request.
        WorkflowEndedError, MailboxFullError, EncodeError, StorageError: As `send_message`.
    """
    request_id = str(uuid4()) if id is None else check_message_id(id)
    await _send(driver, name, body, request_id, mailbox_limit, clock, is_request=True)
    return request_id


async def _send(
    driver: Driver,
    name: str,
    body: object,
    message_id: str | None,
    mailbox_limit: int,
    clock: Clock | None,
    *,
    is_request: bool,
) -> None:
    check_driver(driver)
    check_clock(clock)
    check_mailbox_limit(mailbox_limit)
    async with turn_of(driver):
        activation = await Activation.load_for_mail(driver, clock=clock, mailbox_limit=mailbox_limit)
        envelope = Envelope(name, body, message_id, bytes_max=activation.user_bytes_max, is_request=is_request)
        if is_request and message_id is not None and await find_reply(activation, message_id) is not None:
            return
        await send(activation, envelope)


async def read_reply(driver: Driver, request_id: str, *, reply_type: Any = None) -> Reply[Any] | None:
    """The reply to a request, read from the namespace of a workflow that nothing is running. Writes nothing.

    The last 1,000 replies of a workflow are kept, also after its end.

    Args:
        driver: The workflow's namespace.
        request_id: What `send_request` returned.
        reply_type: What the reply is to be, as for an annotation; plain data when left out.

    Returns:
        The reply, or `None` while the request is not completed, or where it is not known (any more).

    Raises:
        RequestUnansweredError: The workflow has ended, and has not completed the request.
        NotARequestError: A message with this id was sent that was no request.
        ValueTypeError: The reply does not fit `reply_type`.
    """
    check_driver(driver)
    check_message_id(request_id)
    converter = wanted(reply_type)
    data = await find_reply(await Activation.load_for_mail(driver), request_id)
    if data is None:
        return None
    value = decode_value(data)
    if converter is not None:
        value = converter.convert(value, what=f"the reply to request {request_id!r}", root="reply")
    return Reply(value)


class _Turn:
    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.users = 0


_turns: Final[dict[int, _Turn]] = {}


@asynccontextmanager
async def turn_of(driver: Driver) -> AsyncGenerator[None]:
    """One at a time of those who write to what nothing runs: two senders would find the same place in the mailbox free."""
    key = id(driver)  # not used again while a sender holds the driver
    turn = _turns.setdefault(key, _Turn())
    turn.users += 1
    try:
        async with turn.lock:
            yield
    finally:
        turn.users -= 1
        if turn.users == 0:
            del _turns[key]
