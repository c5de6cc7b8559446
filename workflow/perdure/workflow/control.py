"""What the outside asks of a loaded workflow: messages, wakes, cancellation, recovery.

1. Each returns once it is durable, whether the workflow's function is running or not.
2. What was asked of a workflow whose run closed meanwhile, not having seen it, brings the workflow back by its alarm.
3. None of them waits for the function: control is not behind messages, nor messages behind steps.
"""

from __future__ import annotations

import logging

from perdure.storage import encode_value
from perdure.storage.schema import MailboxMessage, SleepEntry, SleepState
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.checks import check_message_id, check_message_name
from perdure.workflow.deadline import lift_if_passed
from perdure.workflow.errors import WorkflowEndedError
from perdure.workflow.history import History, Node
from perdure.workflow.logs import fields_of
from perdure.workflow.plain import to_plain
from perdure.workflow.recover import reopen
from perdure.workflow.rollback import wake_rollback
from perdure.workflow.states import WorkflowEvent, WorkflowState

__all__ = ["arm_if_missed", "cancel", "recover", "send", "wake"]

_log = logging.getLogger("perdure.workflow")


async def send(activation: Activation, name: str, body: object, *, message_id: str | None = None) -> None:
    """Put a message into the mailbox and wake whoever waits for it.

    Raises:
        WorkflowEndedError: The workflow is terminal.
        EncodeError: The body cannot be stored.
    """
    check_message_name(name)
    what = f"the body of message {name!r}"
    data = encode_value(body, bytes_max=activation.user_bytes_max, what=what, to_plain=to_plain)
    history, mailbox = activation.history, activation.mailbox
    if message_id is not None:
        check_message_id(message_id)
        await mailbox.load_known_ids(activation.driver)
        if mailbox.is_known(message_id):
            await activation.commit_from_outside()  # the first sending may still be on its way to the disk
            return
    if history.state.is_terminal:
        await activation.commit_from_outside()  # that it has ended is not told before it is durable
        raise WorkflowEndedError(
            f"workflow {history.workflow_id!r} is {history.state.value} and takes no more messages",
            workflow_id=history.workflow_id,
            state=history.state.value,
        )
    message = MailboxMessage(message_id or activation.ids.next_id(), name, data, activation.clock.now_ms())
    letter = mailbox.write(message, remember=message_id is not None)
    activation.arm_if_dormant()
    await activation.commit_from_outside()
    activation.offer([letter])
    await arm_if_missed(activation)


async def wake(activation: Activation) -> None:
    """End pending sleeps, retry backoffs and the wait for the start, in one batch. Without effect where nothing sleeps."""
    history = activation.history
    if history.state.is_terminal:
        return
    version = history.pending.version
    if history.state is WorkflowState.ROLLING_BACK:
        wake_rollback(history)
    else:
        _end_sleeps(history)
    if not activation.is_due:
        history.set_alarm(activation.clock.now_ms())
    has_changed = history.pending.version != version
    if has_changed:
        if activation.is_running:
            activation.unpark()
        activation.arm_if_dormant()
    await activation.commit_from_outside()
    activation.wake_parked()
    if has_changed:
        await arm_if_missed(activation)


async def cancel(activation: Activation) -> None:
    """End the workflow as cancelled, for good. Without effect once it has ended."""
    history = activation.history
    if not history.state.is_terminal:
        history.apply(WorkflowEvent.CANCEL)
        history.set_alarm(None)
        history.set_idle_activations(0)
        activation.close(Closing.CANCELLED)
        await activation.commit_from_outside()
        _log.info("workflow %r was cancelled", history.workflow_id, extra=fields_of(history))
        return
    await activation.commit_from_outside()


async def recover(activation: Activation) -> bool:
    """Make a failed workflow runnable again, without its deadline if that has passed.

    Returns:
        Whether it was failed; otherwise nothing changes.
    """
    history = activation.history
    if not reopen(history):
        return False
    lift_if_passed(history, activation.clock.now_ms())
    activation.arm_if_dormant()
    await activation.commit_from_outside()
    _log.info("workflow %r was recovered, and runs again", history.workflow_id, extra=fields_of(history))
    return True


async def arm_if_missed(activation: Activation) -> None:
    """Have the workflow brought back by its alarm, should its run have closed without a look at what was just written."""
    if activation.closing in (Closing.PARKED, Closing.EVICTED) and not activation.history.state.is_terminal:
        activation.arm_if_dormant()
        await activation.commit_from_outside()


def _end_sleeps(history: History) -> None:
    for node in list(history.open_sleeps.values()):
        entry = node.entry
        if entry is not None and isinstance(entry.kind, SleepEntry) and not _is_queue_deadline(history, node):
            history.change(node, SleepEntry(entry.kind.deadline_ms, SleepState.INTERRUPTED))
    for entry_id, node in list(history.open_retries.items()):
        metadata = history.metadata(entry_id)
        if metadata is not None:
            metadata.last_attempt_at_ms = 0
            history.put_metadata(node, metadata)


def _is_queue_deadline(history: History, node: Node) -> bool:
    entry = node.entry
    assert entry is not None, "open sleeps are recorded"
    number = entry.location[-1]
    name = history.names[number] if isinstance(number, int) else ""
    # A user's own sleep by such a name says so in its detail.
    return name.endswith(":deadline") and not history.detail(entry.id).get("sleep")
