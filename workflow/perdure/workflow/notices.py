"""What workflows are told of each other: how a child has ended, and that there is room in a mailbox.

1. How a child has ended is written into its caller's namespace, in one batch with what brings the caller back: a caller that
   waits for it becomes `running`, one that is not run has its alarm armed. Only then is it told (`Activation.signal`).
2. It is told by whoever hosts both (`perdure.actors.duties`), as often as need be; the second time changes nothing.
"""

from __future__ import annotations

from perdure.workflow.activation import Activation
from perdure.workflow.calls import ChildOutcome
from perdure.workflow.control import arm_if_missed
from perdure.workflow.history import History
from perdure.workflow.waits import Signal

__all__ = ["outcome_of", "receive"]


def outcome_of(history: History) -> ChildOutcome | None:
    """How a workflow has ended, for those who called it; `None` while it has not."""
    if not history.state.is_terminal:
        return None
    return ChildOutcome(history.state.value, history.output, history.error)


async def receive(activation: Activation, child_id: str, outcome: ChildOutcome) -> None:
    """Tell a workflow how one that it calls has ended; durable on return, with what makes it go on. Twice is harmless.

    A fault of the code may have undone it: see whether `activation.closing` says so.

    Raises:
        StorageError: Whether it is durable is unknown.
    """
    history = activation.history
    told = [call for call in history.calls.of_child(child_id) if call.outcome is None]
    for call in told:
        history.calls.end(call, outcome)
    signal: Signal = ("child", child_id)
    if told:
        # A run that has not come to the call yet goes on as well; `sleeping` beside an outcome, it would not after a kill.
        if activation.is_running and (activation.awaits(signal) or activation.busy):
            activation.unpark()
        activation.arm_if_dormant()
    await activation.commit_from_outside()
    activation.signal(signal)
    if told:
        await arm_if_missed(activation)
