"""`ctx.get_version` and `ctx.removed`: changing code under workflows that are under way.

1. A version is decided once per place and recorded: 1 where recorded entries are still ahead, since code that did not know
   the place passed it, else the latest. Each loop iteration and each branch is a place of its own.
2. What was removed is visited as a unit, whatever is recorded below it; where nothing is recorded, the removal is.
3. Both may come before recorded entries (`check_is_next` does not apply): that is what they are for. The rejected
   alternative, to take the version of the process that started the workflow, makes every long-lived one run old code for ever.
4. Neither commits. A version is durable before the next step function runs and before the next park, so nothing that it led
   to outlives it.
5. While a workflow is rolled back, its function is run for its handlers only, and neither records anything.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import trio

from perdure.storage.schema import KIND_NAMES, RemovedEntry, VersionCheckEntry
from perdure.workflow.errors import InvalidArgumentError
from perdure.workflow.scope import Operation, is_of_queue_read, queue_read_of

__all__ = ["RemovableKind", "check_kind", "run_get_version", "run_removed"]

RemovableKind: TypeAlias = Literal[
    "step", "loop", "sleep", "message", "rollback_checkpoint", "join", "race", "version_check", "try_block"
]
"""What `removed` may stand for: every kind of entry, and a try block, which has no entry of its own. A queue read is a
`message`."""


def check_kind(kind: object) -> str:
    """The kind of what was removed.

    Raises:
        InvalidArgumentError: There is no such kind.
    """
    known = get_args(RemovableKind)
    if not isinstance(kind, str) or kind not in known:
        raise InvalidArgumentError(
            f"{kind!r} is no kind of entry that can be removed; write one of {', '.join(map(repr, known))} (a queue read is a "
            "'message')"
        )
    return kind


async def run_get_version(operation: Operation, latest: int) -> int:
    """The version that is recorded here, or decide it."""
    activation = operation.scope.activation
    found = operation.find(VersionCheckEntry)
    if found is not None:
        await activation.replayed()
        return found[2].resolved
    if activation.is_collecting:
        return 1  # no code that knew this place has passed it
    resolved = 1 if operation.scope.has_recorded_ahead else latest
    operation.create(VersionCheckEntry(resolved, latest))
    activation.hold_steps()
    await trio.lowlevel.checkpoint()
    return resolved


async def run_removed(operation: Operation, kind: str) -> None:
    """Pass over what is recorded here under the operation's name, or record that it was removed."""
    activation = operation.scope.activation
    if kind == "message":
        operation.scope.reserve_queue_names(operation.name)
    node = operation.find_node()
    if node is not None:
        entry = node.entry
        recorded = "try_block" if entry is None else KIND_NAMES[type(entry.kind)]
        if recorded not in (kind, "removed"):
            raise operation.diverged(operation.name, node, f"where the code removed a {kind} with")
    elif kind != "message" or not _pass_over_read(operation):
        if activation.is_collecting:
            return
        operation.create(RemovedEntry(kind, operation.name))
        await trio.lowlevel.checkpoint()
        return
    await activation.replayed()


def _pass_over_read(operation: Operation) -> bool:
    """Count everything as visited that a queue read stored, waiting or finished; returns whether there was anything."""
    scope = operation.scope
    history = scope.activation.history
    passed = [
        number
        for number in scope.unvisited
        if isinstance(number, int)
        and queue_read_of(history.names[number]) == operation.name
        and is_of_queue_read(history, scope.node.children[number])
    ]
    scope.unvisited.difference_update(passed)
    return bool(passed)
