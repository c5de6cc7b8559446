"""How a queue read is kept in history, and who holds which message.

1. A read `q` is stored as the reference engine stores it: messages at `q:0`, `q:1`, ..., their number at `q:count`, and
   the time at which it gives up at `q:deadline`. It is finished once its count is there.
2. A message's body goes into history as the bytes that were sent, and comes out as them.
3. Whether a message was completed is the field `completed` of its record, which the reference has as well. A message that
   was not completed goes back into the mailbox when a race or `replay_from_step` forgets the read that took it; a completed
   one never does. What a loop forgets with an old iteration is gone: the loop went on, so its body had dealt with it.
4. What a branch read that lost its race is not held by history: the race has given it back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, NamedTuple, cast

from perdure.storage import decode_value, encode_value
from perdure.storage.errors import DecodeError
from perdure.storage.layout import U64_MAX
from perdure.storage.schema import U32_MAX, Entry, MailboxMessage, MessageEntry, RaceEntry
from perdure.workflow.history import History, Node, order_of_creation

__all__ = [
    "HeldMessage",
    "ReadMessage",
    "decode_count",
    "decode_read",
    "encode_read",
    "finished_reads",
    "held_messages",
    "messages_below",
    "read_message_ids",
    "with_completed",
]

_MARKER: Final = "__rivetWorkflowQueueMessage"


def _text(value: str) -> bytes:
    return encode_value(value)


# The stored form of a message in history, as the reference writes it; the body between is spliced in as it was sent.
_HEAD: Final = b"\xa6" + _text(_MARKER) + b"\x01" + _text("id")
_NAME: Final = _text("name")
_BODY: Final = _text("body")
_CREATED_AT: Final = _text("createdAt") + b"\xfb"
_COMPLETED: Final = _text("completed")
_TAIL: Final = _COMPLETED + b"\xf4"
_AFTER_BODY_BYTES: Final = len(_CREATED_AT) + 8 + len(_TAIL)


class ReadMessage(NamedTuple):
    """A message as history holds it: the fields that its reader sees, and whether it was completed."""

    id: str
    name: str
    body: Any
    sent_at_ms: float
    is_completed: bool


def _before_body(message_id: str, name: str) -> bytes:
    return b"".join((_HEAD, _text(message_id), _NAME, _text(name), _BODY))


def encode_read(message: MailboxMessage) -> bytes:
    """The record of a message that was read and is not completed."""
    created_at = struct.pack(">d", float(message.sent_at_ms))
    return b"".join((_before_body(message.id, message.name), message.body, _CREATED_AT, created_at, _TAIL))


def _decode_fields(data: bytes, path: str) -> dict[str, Any]:
    stored: Any = decode_value(data)
    if not isinstance(stored, dict) or "id" not in stored:
        raise DecodeError(f"what history holds at {path} is not a queue message")
    return cast("dict[str, Any]", stored)


def decode_read(entry: MessageEntry, path: str) -> ReadMessage:
    """What a record holds; `path` is where it is, for the error.

    Raises:
        DecodeError: It is no record of a message.
    """
    fields = _decode_fields(entry.body, path)
    created_at: object = fields.get("createdAt", 0)
    if isinstance(created_at, bool) or not isinstance(created_at, int | float) or not abs(created_at) <= U64_MAX:
        raise DecodeError(f"the queue message that history holds at {path} has no time")
    return ReadMessage(
        str(fields["id"]),
        str(fields.get("name", entry.name)),
        fields.get("body"),
        float(created_at),
        fields.get("completed") is True,
    )


def decode_count(entry: MessageEntry, path: str) -> int:
    """How many messages a finished read holds; `path` is where that is, for the error.

    Raises:
        DecodeError: It is no number of messages.
    """
    count: object = decode_value(entry.body)
    if isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count <= U32_MAX and count == int(count):
        return int(count)
    raise DecodeError(f"history does not hold a number of messages at {path}")


def with_completed(entry: MessageEntry, path: str) -> MessageEntry:
    """The record with the message completed; everything else in it stays as it is, byte for byte if we wrote it.

    Raises:
        DecodeError: It is no record of a message.
    """
    if entry.body.endswith(_TAIL):  # as ours are, and the reference's
        data = entry.body[:-1] + b"\xf5"
        if _decode_fields(data, path).get("completed") is True:
            return MessageEntry(entry.name, data)
    return MessageEntry(entry.name, encode_value({**_decode_fields(entry.body, path), "completed": True}))


def _message_of(entry: MessageEntry, path: str) -> tuple[MailboxMessage, bool]:
    read = decode_read(entry, path)
    before = _before_body(read.id, read.name)
    if entry.body.startswith(before) and entry.body[-_AFTER_BODY_BYTES:].startswith(_CREATED_AT):
        body = entry.body[len(before) : -_AFTER_BODY_BYTES]
    else:  # the reference wrote it
        body = encode_value(read.body)
    return MailboxMessage(read.id, read.name, body, max(0, int(read.sent_at_ms))), read.is_completed


def _scopes_below(history: History, top: Node) -> Iterator[Node]:
    """Every node but those under a branch that lost its race."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        entry = node.entry
        if entry is None or not isinstance(entry.kind, RaceEntry) or entry.kind.winner is None:
            stack.extend(node.children.values())
            continue
        winner = history.known_number(entry.kind.winner)
        stack.extend(child for number, child in node.children.items() if number == winner)


def finished_reads(history: History, scope: Node) -> Iterator[tuple[Node, list[Node]]]:
    """The finished reads directly in a scope: the node of each one's count, and those of its messages, in order."""
    for number, node in scope.children.items():
        if not isinstance(number, int) or node.entry is None or not isinstance(node.entry.kind, MessageEntry):
            continue
        read, _, last = history.names[number].rpartition(":")
        if last != "count":
            continue
        count = decode_count(node.entry.kind, f"entry {node.entry.id}")
        # Each of them has a name of its own, so a number that is damaged takes no more time than there are names.
        indices = range(min(count, len(history.names)))
        numbers = (history.known_number(f"{read}:{index}") for index in indices)
        found = (scope.children.get(number) for number in numbers if number is not None)
        yield node, [child for child in found if child is not None and _is_message(child.entry)]


def _is_message(entry: Entry | None) -> bool:
    return entry is not None and isinstance(entry.kind, MessageEntry)


class HeldMessage(NamedTuple):
    """A message that a finished read holds and that was not completed.

    Attributes:
        read_id: The id of the entry that counts the read's messages.
        entry: The message's own entry.
        message: As it was in the mailbox.
    """

    read_id: str
    entry: Entry
    message: MailboxMessage


def held_messages(history: History, *tops: Node) -> list[HeldMessage]:
    """The messages that finished reads in and below these places hold and that were not completed, in the order of reading.

    Raises:
        DecodeError: A record is damaged.
    """
    held: list[HeldMessage] = []
    for scope in chain.from_iterable(_scopes_below(history, top) for top in tops):
        for count, nodes in finished_reads(history, scope):
            for node in nodes:
                assert node.entry is not None, "messages are recorded"
                assert count.entry is not None, "and so is their count"
                message, is_completed = _message_of(cast("MessageEntry", node.entry.kind), f"entry {node.entry.id}")
                if not is_completed:
                    held.append(HeldMessage(count.entry.id, node.entry, message))
    order = order_of_creation(message.entry for message in held)
    held.sort(key=lambda message: order(message.entry))
    return held


def messages_below(history: History, *tops: Node) -> list[tuple[MailboxMessage, int | None]]:
    """The messages that finished reads in and below these places hold and that were not completed, in the order of reading.

    Each comes with the number that it had in the mailbox, where that was recorded: hand both to `Mailbox.put_back`, the
    last one first.

    Raises:
        DecodeError: A record is damaged.
    """
    return [(held.message, history.detail(held.entry.id).get("sequence")) for held in held_messages(history, *tops)]


def read_message_ids(history: History) -> set[str]:
    """The ids of all messages that finished reads hold. A message without its read's count was not read yet."""
    ids: set[str] = set()
    for scope in _scopes_below(history, history.root):
        for _, nodes in finished_reads(history, scope):
            for node in nodes:
                assert node.entry is not None, "messages are recorded"
                kind = cast("MessageEntry", node.entry.kind)
                ids.add(decode_read(kind, f"entry {node.entry.id}").id)
    return ids
