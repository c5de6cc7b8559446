"""`ctx.sleep` and `ctx.sleep_until`: waits whose deadline is recorded.

1. The deadline is durable before the wait begins and is that of the first run, whatever the code says later.
2. How it ended is durable when it returns, so every later run sees the same.
"""

from __future__ import annotations

from perdure.storage.schema import SleepEntry, SleepState
from perdure.workflow.history import Node
from perdure.workflow.scope import Operation
from perdure.workflow.types import SleepOutcome
from perdure.workflow.waits import Wait

__all__ = ["run_sleep"]


async def run_sleep(operation: Operation, deadline_ms: int) -> SleepOutcome:
    """Wait until the deadline (milliseconds since the epoch), or until `wake()`."""
    activation = operation.scope.activation
    found = operation.find(SleepEntry)
    if found is not None:
        node, _, kind = found
        if kind.state is not SleepState.PENDING:
            if kind.state is SleepState.INTERRUPTED:
                await activation.commit()  # wake() may still be writing it
            await activation.replayed()
            return _OUTCOMES[kind.state]
        operation.check_is_next()
        deadline_ms = kind.deadline_ms
    else:
        operation.check_is_next()
        node = operation.create(SleepEntry(deadline_ms, SleepState.PENDING))
        if operation.name.endswith(":deadline"):
            # Its name looks like that of a queue read's deadline, which wake() leaves alone.
            activation.history.put_detail(_entry_id(node), {"sleep": True})
    while activation.clock.now_ms() < deadline_ms:
        await activation.park(Wait(deadline_ms, wakeable=True), operation)
        if (state := _state(node)) is not SleepState.PENDING:
            await activation.commit()  # wake() recorded it; if the deadline came meanwhile, it may still be writing
            return _OUTCOMES[state]
    operation.progress()
    activation.history.change(node, SleepEntry(deadline_ms, SleepState.COMPLETED))
    await activation.commit()
    return SleepOutcome.COMPLETED


_OUTCOMES = {SleepState.COMPLETED: SleepOutcome.COMPLETED, SleepState.INTERRUPTED: SleepOutcome.INTERRUPTED}


def _entry_id(node: Node) -> str:
    assert node.entry is not None, "the sleep is recorded"
    return node.entry.id


def _state(node: Node) -> SleepState:
    entry = node.entry
    assert entry is not None, "the sleep is recorded"
    assert isinstance(entry.kind, SleepEntry), "a sleep stays one"
    return entry.kind.state
