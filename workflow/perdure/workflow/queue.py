"""`ctx.queue.next` and `next_batch`: reads of the mailbox.

1. Taking messages and recording them is one batch; what was read once is never read again.
2. A message beats the timeout; a read that timed out has taken nothing.
3. A read `q` is stored as the reference engine stores it: messages at `q:0`, `q:1`, ..., their number at `q:count`, and
   the time at which it gives up at `q:deadline`.
4. A message's body goes into history as the bytes that were sent; it is decoded when it is handed out.
"""

from __future__ import annotations

import struct
from typing import Any, Final, cast

from perdure.storage import decode_value, encode_value
from perdure.storage.errors import DecodeError
from perdure.storage.schema import MailboxMessage, MessageEntry, SleepEntry, SleepState
from perdure.workflow.errors import HistoryDivergedError
from perdure.workflow.history import History, Node
from perdure.workflow.scope import Operation
from perdure.workflow.types import Message
from perdure.workflow.waits import Wait

__all__ = ["read_message_ids", "run_queue_read"]


def _text(value: str) -> bytes:
    return encode_value(value)


# The stored form of a message in history, as the reference writes it; the body between is spliced in as it was sent.
_HEAD: Final = b"\xa6" + _text("__rivetWorkflowQueueMessage") + b"\x01" + _text("id")
_NAME: Final = _text("name")
_BODY: Final = _text("body")
_CREATED_AT: Final = _text("createdAt") + b"\xfb"
_TAIL: Final = _text("completed") + b"\xf4"


def _encode_read(message: MailboxMessage) -> bytes:
    created_at = struct.pack(">d", float(message.sent_at_ms))
    name, message_id = _text(message.name), _text(message.id)
    return b"".join((_HEAD, message_id, _NAME, name, _BODY, message.body, _CREATED_AT, created_at, _TAIL))


def _decode_read(entry: MessageEntry, path: str) -> Message:
    stored: Any = decode_value(entry.body)
    if not isinstance(stored, dict) or "id" not in stored:
        raise DecodeError(f"what history holds at {path} is not a queue message")
    fields = cast("dict[str, Any]", stored)
    created_at_ms = fields.get("createdAt", 0)
    return Message(
        str(fields["id"]), str(fields.get("name", entry.name)), fields.get("body"), float(created_at_ms) / 1000
    )


def read_message_ids(history: History) -> set[str]:
    """The ids of all messages that finished reads hold. A message without its read's count was not read yet."""
    ids: set[str] = set()
    for scope in history.root.walk():
        for number, node in scope.children.items():
            if not isinstance(number, int) or node.entry is None or not isinstance(node.entry.kind, MessageEntry):
                continue
            read, _, index = history.names[number].rpartition(":")
            if index.isdecimal() and history.known_number(f"{read}:count") in scope.children:
                stored: Any = decode_value(node.entry.kind.body)
                ids.add(str(stored["id"]))
    return ids


async def run_queue_read(
    operation: Operation, names: tuple[str, ...] | None, count: int, timeout_ms: int | None
) -> list[Message]:
    """Take 1 to `count` messages, or none once the timeout has passed."""
    scope = operation.scope
    activation = scope.activation
    read = operation.name
    recorded = operation.find(MessageEntry, f"{read}:count")
    deadline, deadline_ms = _find_deadline(operation)
    if recorded is not None:
        await activation.replayed()
        return _replay(operation, recorded[2])
    _pass_over_cut(operation)
    operation.check_is_next()
    if deadline is None and timeout_ms is not None:
        deadline_ms = activation.clock.now_ms() + timeout_ms
        deadline = operation.create(SleepEntry(deadline_ms, SleepState.PENDING), f"{read}:deadline")
    label = "*" if names is None else "|".join(names)
    wanted = None if names is None else frozenset(names)
    while True:
        letters = activation.mailbox.take(names, count)
        is_late = deadline_ms is not None and activation.clock.now_ms() >= deadline_ms
        if not letters and not is_late:
            await activation.park(Wait(deadline_ms, wanted), operation)
            continue
        operation.progress()
        if deadline is not None and deadline_ms is not None:
            state = SleepState.INTERRUPTED if letters else SleepState.COMPLETED
            activation.history.change(deadline, SleepEntry(deadline_ms, state))
        messages: list[Message] = []
        for index, letter in enumerate(letters):
            message = letter.message
            operation.create(MessageEntry(message.name, _encode_read(message)), f"{read}:{index}")
            body = decode_value(message.body)
            messages.append(Message(message.id, message.name, body, message.sent_at_ms / 1000))
        operation.create(MessageEntry(f"{label}:count", encode_value(len(letters))), f"{read}:count")
        await activation.commit()
        return messages


def _find_deadline(operation: Operation) -> tuple[Node | None, int | None]:
    """The recorded time at which the read gives up: the first run's, whatever the code says now."""
    name = f"{operation.name}:deadline"
    if operation.scope.activation.history.known_number(name) is None:
        return None, None
    found = operation.find(SleepEntry, name)
    return (None, None) if found is None else (found[0], found[2].deadline_ms)


def _pass_over_cut(operation: Operation) -> None:
    """Messages without a count come from a batch that was cut before it: the read takes them again."""
    scope = operation.scope
    if scope.activation.driver.atomic_batch:
        return
    for number in list(scope.unvisited):
        entry = scope.node.children[number].entry
        if isinstance(number, int) and entry is not None and isinstance(entry.kind, MessageEntry):
            read, _, index = scope.activation.history.names[number].rpartition(":")
            if read == operation.name and index.isdecimal():
                scope.unvisited.discard(number)


def _replay(operation: Operation, counted: MessageEntry) -> list[Message]:
    count: Any = decode_value(counted.body)
    messages: list[Message] = []
    for index in range(int(count)):
        name = f"{operation.name}:{index}"
        found = operation.find(MessageEntry, name)
        path = operation.scope.path_text(name)
        if found is None:
            raise HistoryDivergedError(
                f"history counts {count} messages of the queue read {operation.name!r}, but holds none at {path}; the "
                "namespace is damaged",
                location=path,
                found=None,
                asked="a message",
            )
        messages.append(_decode_read(found[2], path))
    return messages
