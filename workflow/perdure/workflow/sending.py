"""`ctx.send`: a message into another workflow's mailbox, exactly once.

1. Everything recorded before is durable before the message leaves: nothing is told to others that may not have happened.
2. The message is durable in the target's namespace, together with its id (`arrivals.py`), before it is recorded here that it
   was sent. Killed in between, the sender sends it again, and the target knows it.
3. It is stored as a step without output. That the target does not exist or has ended is the step's failure, the same on
   every run. That its mailbox is full, or its storage fails, is not: the sender parks, durably, and tries again.
4. One branch sends one message at a time, and each waits until it is durable: what one branch sends keeps its order.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import trio

from perdure.storage import StorageError, encode_value
from perdure.storage.errors import EncodeError
from perdure.storage.schema import EntryMetadata, EntryStatus, MailboxMessage, StepEntry
from perdure.workflow.checks import check_message_name, check_workflow_id, ms_ceil
from perdure.workflow.children import PAUSE_MAX_S, PAUSE_S, asked
from perdure.workflow.control import deliver
from perdure.workflow.derived import derive_message_id
from perdure.workflow.errors import ErrorInfo, MailboxFullError
from perdure.workflow.failures import cut_text, describe, info_from_map, info_from_text, info_to_map, step_error
from perdure.workflow.host import Parcel, host_of
from perdure.workflow.logs import fields_of
from perdure.workflow.plain import to_plain
from perdure.workflow.senders import ended_error, full_error
from perdure.workflow.waits import Signal, Wait

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.history import History, Node
    from perdure.workflow.scope import Operation

__all__ = ["accept", "run_send"]

_log = logging.getLogger("perdure.workflow")


async def run_send(operation: Operation, workflow_id: str, message_name: str, body: object) -> None:
    """Send a message, unless it is recorded that it was sent; how that went is durable on return.

    Raises:
        StepCriticalError: It was refused; the same on every run.
    """
    target, name = check_workflow_id(workflow_id), check_message_name(message_name)
    activation = operation.scope.activation
    history = activation.history
    found = operation.find(StepEntry)
    node: Node | None = None
    if found is not None:
        node, entry, kind = found
        metadata = history.metadata(entry.id) or EntryMetadata()
        if kind.output is not None or "call" in history.detail(entry.id):
            raise operation.diverged(operation.name, node, "which sent nothing, where the code asks for")
        if metadata.status is EntryStatus.COMPLETED:
            await activation.replayed()
            return
        if metadata.status is EntryStatus.EXHAUSTED:
            await activation.replayed()
            _raise_recorded(history, operation.name, entry.id, metadata)
    operation.check_is_next()
    host = host_of(operation)
    try:
        data = encode_value(
            body, bytes_max=activation.user_bytes_max, what=f"the body of message {name!r}", to_plain=to_plain
        )
    except EncodeError as error:
        node, info = _record(operation, node, describe(error))
        await activation.commit()
        raise _failure(operation, node, info) from error
    await (activation.begin_step() if activation.must_commit_before_step else activation.commit())
    await trio.lowlevel.checkpoint_if_cancelled()
    path = (*history.path_of(operation.scope.location), operation.name)
    message_id = derive_message_id(history.seed or b"", path, history.generation)
    parcel = Parcel(history.workflow_id, target, message_id, name, data)
    pause_s = PAUSE_S
    while True:
        signal: Signal | None = None
        try:
            refusal = await asked(operation, partial(host.deliver, parcel))
            break
        except MailboxFullError:
            signal = ("room", target)
        except StorageError as error:
            _log.info(
                "workflow %r: the message that %r sends waits %g seconds, as the storage of %r fails: %s",
                history.workflow_id,
                operation.name,
                pause_s,
                target,
                error,
                extra=fields_of(history, path),
            )
        await activation.park(Wait(activation.clock.now_ms() + ms_ceil(pause_s), signal=signal), operation)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
    node, info = _record(operation, node, refusal)
    await activation.commit()
    if info is not None:
        raise _failure(operation, node, info)


def _record(operation: Operation, node: Node | None, info: ErrorInfo | None) -> tuple[Node, ErrorInfo | None]:
    operation.progress()
    history, now_ms = operation.scope.activation.history, operation.scope.activation.clock.now_ms()
    text = None if info is None else cut_text(str(info))
    kind = StepEntry(None, text)
    if node is None:
        node = operation.create(kind)
    else:
        history.change(node, kind)
    assert node.entry is not None, "it was just recorded"
    if info is None:
        metadata = EntryMetadata(EntryStatus.COMPLETED, None, 1, now_ms, now_ms, now_ms)
    else:
        metadata = EntryMetadata(EntryStatus.EXHAUSTED, text, 1, now_ms, now_ms)
        history.put_detail(node.entry.id, {"kind": "critical", "error": info_to_map(info)})
    history.put_metadata(node, metadata)
    return node, info


def _failure(operation: Operation, node: Node, info: ErrorInfo | None) -> Exception:
    assert node.entry is not None, "it is recorded"
    assert info is not None, "it was refused"
    return step_error("critical", operation.name, 1, info, node.entry.id)


def _raise_recorded(history: History, name: str, entry_id: str, metadata: EntryMetadata) -> NoReturn:
    detail = history.detail(entry_id)
    info = info_from_map(detail["error"]) if "error" in detail else info_from_text(metadata.error or "Error")
    raise step_error("critical", name, metadata.attempts, info, entry_id)


async def accept(activation: Activation, parcel: Parcel) -> bool:
    """Put another workflow's message into the mailbox of this one, unless it came before; durable on return.

    Returns:
        Whether it is the first of its sender that is remembered.

    Raises:
        WorkflowEndedError: The workflow has ended, durably.
        MailboxFullError: There is no room.
        StorageError: Whether it is stored is unknown.
    """
    history, arrivals, mailbox = activation.history, activation.arrivals, activation.mailbox
    await arrivals.load(activation.driver, parcel.sender)
    if arrivals.is_known(parcel.sender, parcel.message_id):
        await activation.commit_from_outside()  # its first sending may still be on its way to the disk
        return False
    if history.state.is_terminal:
        await activation.commit_from_outside()  # that it has ended is not told before it is durable
        raise ended_error(history)
    if mailbox.size >= activation.mailbox_limit:
        raise full_error(history.workflow_id, activation.mailbox_limit)
    letter = mailbox.write(
        MailboxMessage(parcel.message_id, parcel.name, parcel.body, activation.clock.now_ms()), remember=False
    )
    is_first = arrivals.note(parcel.sender, parcel.message_id, letter.sequence)
    activation.arm_if_dormant()
    await deliver(activation, letter)
    activation.let_in()
    return is_first
