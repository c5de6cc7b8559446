"""`ctx.queue.next` and `next_batch`: reads of the mailbox.

1. Taking messages and recording them is one batch; what was read once is never read again.
2. A message beats the timeout; a read that timed out has taken nothing.
3. How a read is stored is in `reads`. A message's body goes into history as the bytes that were sent; it is decoded when
   it is handed out. One that is not of the type asked for is an error then, on every run: the message was read.
"""

from __future__ import annotations

from typing import Any

from perdure.storage import decode_value, encode_value
from perdure.storage.schema import MailboxMessage, MessageEntry, SleepEntry, SleepState
from perdure.workflow.completion import Completion
from perdure.workflow.errors import HistoryDivergedError
from perdure.workflow.history import Node
from perdure.workflow.reads import ReadMessage, decode_count, decode_read, encode_read
from perdure.workflow.scope import Operation
from perdure.workflow.typed import Converter
from perdure.workflow.types import Message
from perdure.workflow.waits import Wait

__all__ = ["run_queue_read"]


async def run_queue_read(
    operation: Operation,
    names: tuple[str, ...] | None,
    count: int,
    timeout_ms: int | None,
    is_completable: bool,
    converter: Converter | None = None,
) -> list[Message]:
    """Take 1 to `count` messages, or none once the timeout has passed.

    Raises:
        ValueTypeError: A body is not what the converter makes; the messages are read all the same, durably.
    """
    scope = operation.scope
    activation = scope.activation
    read = operation.name
    recorded = operation.find(MessageEntry, f"{read}:count")
    deadline, deadline_ms = _find_deadline(operation)
    if recorded is not None:
        await activation.replayed()
        return _replay(operation, recorded[2], is_completable, converter)
    _pass_over_cut(operation)
    operation.check_is_next()
    if deadline is None and timeout_ms is not None:
        deadline_ms = activation.clock.now_ms() + timeout_ms
        deadline = operation.create(SleepEntry(deadline_ms, SleepState.PENDING), f"{read}:deadline")
    label = "*" if names is None else "|".join(names)
    wanted = None if names is None else frozenset(names)
    while True:
        activation.check_may_record()  # before anything is taken
        letters = activation.mailbox.take(names, count)
        activation.pass_on(names)
        is_late = deadline_ms is not None and activation.clock.now_ms() >= deadline_ms
        if not letters and not is_late:
            await activation.park(Wait(deadline_ms, wanted), operation)
            continue
        operation.progress()
        if deadline is not None and deadline_ms is not None:
            state = SleepState.INTERRUPTED if letters else SleepState.COMPLETED
            activation.history.change(deadline, SleepEntry(deadline_ms, state))
        read_letters: list[tuple[MailboxMessage, Completion]] = []
        for index, letter in enumerate(letters):
            message = letter.message
            node = operation.create(MessageEntry(message.name, encode_read(message)), f"{read}:{index}")
            if scope.lane.is_raced and node.entry is not None:  # it may have to go back
                activation.history.put_detail(node.entry.id, {"sequence": letter.sequence})
            completion = Completion(
                operation, index, message.id, node, is_completable=is_completable, is_completed=False
            )
            read_letters.append((message, completion))
        operation.create(MessageEntry(f"{label}:count", encode_value(len(letters))), f"{read}:count")
        await activation.commit()
        if letters:
            activation.make_room(len(letters))
        return [
            _message(converter, message.id, message.name, decode_value(message.body), message.sent_at_ms, completion)
            for message, completion in read_letters
        ]


def _message(
    converter: Converter | None, id: str, name: str, body: Any, sent_at_ms: float, completion: Completion
) -> Message:
    if converter is not None:
        body = converter.convert(body, what=f"the body of message {name!r} ({id})", root="body")
    return Message.read(id, name, body, sent_at_ms / 1000, completion=completion)


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


def _replay(
    operation: Operation, counted: MessageEntry, is_completable: bool, converter: Converter | None
) -> list[Message]:
    count = decode_count(counted, operation.scope.path_text(f"{operation.name}:count"))
    reads: list[tuple[ReadMessage, Completion]] = []
    for index in range(count):
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
        read = decode_read(found[2], path)
        completion = Completion(
            operation, index, read.id, found[0], is_completable=is_completable, is_completed=read.is_completed
        )
        reads.append((read, completion))
    return [
        _message(converter, read.id, read.name, read.body, read.sent_at_ms, completion) for read, completion in reads
    ]
