"""What the outside asks of a loaded workflow: messages, wakes, cancellation, recovery.

1. Each returns once it is durable, whether the workflow's function is running or not.
2. What was asked of a workflow whose run closed meanwhile, not having seen it, brings the workflow back by its alarm.
3. None of them waits for the function: control is not behind messages, nor messages behind steps.
"""

from __future__ import annotations

import logging

from perdure.storage.schema import SleepEntry, SleepState
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.deadline import lift_if_passed
from perdure.workflow.history import History, Node
from perdure.workflow.logs import fields_of
from perdure.workflow.mailbox import Letter
from perdure.workflow.recover import reopen
from perdure.workflow.rollback import wake_rollback
from perdure.workflow.senders import Envelope, Place, Senders, ended_error, full_error, put
from perdure.workflow.states import WorkflowEvent, WorkflowState

__all__ = ["arm_if_missed", "cancel", "deliver", "recover", "send", "wake"]

_log = logging.getLogger("perdure.workflow")


async def send(activation: Activation, envelope: Envelope, *, senders: Senders | None = None) -> Place | None:
    """Put a message into the mailbox and wake whoever waits for it.

    Args:
        activation: Whose.
        envelope: The message.
        senders: Where it waits for its turn if the mailbox is full.

    Returns:
        `None` if it was sent, now or before. Otherwise its place among those who wait: the caller is to leave the activation
        alone, wait, and then to `deliver` what was let in or to withdraw.

    Raises:
        WorkflowEndedError: The workflow is terminal.
        MailboxFullError: The mailbox is full, or others wait already, and `senders` was not given.
    """
    history = activation.history
    message_id = envelope.message_id
    if message_id is not None:
        await activation.mailbox.load_known_ids(activation.driver)
        if activation.knows(message_id):
            await activation.commit_from_outside()  # the first sending may still be on its way to the disk
            return None
    if history.state.is_terminal:
        await activation.commit_from_outside()  # that it has ended is not told before it is durable
        raise ended_error(history)
    if activation.is_full:
        if senders is None:
            raise full_error(history.workflow_id, activation.mailbox_limit)
        return senders.join(history.workflow_id, envelope)
    await deliver(activation, put(activation, envelope))
    return None


async def deliver(activation: Activation, letter: Letter | None) -> None:
    """Make a message durable that has its place in the mailbox, and offer it; `None` stands for one that was sent before."""
    await activation.commit_from_outside()
    if letter is not None:
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
