"""`ctx.uuid`, `ctx.random` and `ctx.now`: what code would otherwise take from its surroundings, and get differently on each run.

1. UUIDs and random numbers derive from the workflow's stored seed, the place and the name. So every run gets the same, nothing
   is written, no name is claimed, and no order is kept: the same name gives the same.
2. What is derived for one purpose is never what is derived for another, nor a step's idempotency key: the packed path ends in
   the purpose's number, where a step's ends in its name.
3. The time cannot be derived; it is recorded as a step that has completed, durable before the next step function runs and
   before the next park. So nothing that it led to outlives it, and it costs no commit of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Final
from uuid import UUID

import trio

from perdure.storage import decode_value, encode_value
from perdure.storage.keys import pack
from perdure.storage.schema import EntryMetadata, EntryStatus, StepEntry
from perdure.workflow.checks import check_name
from perdure.workflow.errors import FaultError, SuspendSignal
from perdure.workflow.ids import derived_uuid

if TYPE_CHECKING:
    from perdure.workflow.history import Path
    from perdure.workflow.scope import Operation, Scope

__all__ = [
    "derive_child_id",
    "derive_message_id",
    "derive_random",
    "derive_rollback_key",
    "derive_step_key",
    "derive_uuid",
    "run_now",
]

# What is derived for; part of what the values come from; never change or reuse.
_UUID: Final = 1
_RANDOM: Final = 2
_ROLLBACK: Final = 3
_REDONE: Final = 4
_SEND: Final = 5
_CALL: Final = 6

_PLACE_CHARACTERS_MAX: Final = 200
"""How much of a call's place its child's id shows."""


def derive_uuid(scope: Scope, name: str) -> UUID:
    """The UUID of this name in this scope."""
    return _derive(scope, name, "uuid", _UUID)


def derive_random(scope: Scope, name: str) -> Random:
    """A generator at the beginning of the stream of this name in this scope."""
    return Random(_derive(scope, name, "random", _RANDOM).int)


def _derive(scope: Scope, name: str, method: str, purpose: int) -> UUID:
    activation = scope.activation
    if activation.closing is not None:
        raise SuspendSignal
    try:
        check_name(name, method)
        scope.check_open(name, method)
    except FaultError as error:
        activation.fault(error)
        raise
    history = activation.history
    return derived_uuid(history.seed or b"", pack((*_parts(history.path_of(scope.location)), name, purpose)))


def derive_step_key(seed: bytes, path: Path, undone: int) -> str:
    """The idempotency key of the step at this place, which was undone so often: what follows is to have effect again."""
    return str(derived_uuid(seed, pack((*_parts(path), _REDONE, undone) if undone else tuple(_parts(path)))))


def derive_rollback_key(seed: bytes, path: Path, undone: int) -> str:
    """The idempotency key for undoing the step at this place, which was undone so often before."""
    return str(derived_uuid(seed, pack((*_parts(path), _ROLLBACK, *([undone] if undone else [])))))


def derive_message_id(seed: bytes, path: Path, generation: int) -> str:
    """The id of the message that `ctx.send` at this place sends; another one for each time that history was rewound."""
    return str(derived_uuid(seed, pack((*_parts(path), _SEND, generation))))


def derive_child_id(workflow_id: str, seed: bytes, path: Path, generation: int, fresh: int) -> str:
    """The id of the workflow that `ctx.call` at this place calls, unless one is given.

    It begins with the caller's own and tells the place. The digits at its end make it another one for each workflow that
    had the caller's id, each time that history was rewound, and each child (`fresh`) of the call.
    """
    key = pack((*_parts(path), _CALL, generation, fresh))
    place = "/".join(str(part) for part in path)
    if len(place) > _PLACE_CHARACTERS_MAX:
        place = "…" + place[-_PLACE_CHARACTERS_MAX:]
    return f"{workflow_id}/{place}-{derived_uuid(seed, key).hex[-12:]}"


def _parts(path: Path) -> Iterator[str | tuple[int]]:
    return (part if isinstance(part, str) else (part,) for part in path)


async def run_now(operation: Operation) -> float:
    """The time that is recorded here, in seconds since the epoch, or that of the clock, recorded."""
    activation = operation.scope.activation
    found = operation.find(StepEntry)
    if found is not None:
        node, _, kind = found
        recorded: object = None if kind.output is None else decode_value(kind.output)
        if not isinstance(recorded, float):
            raise operation.diverged(operation.name, node, "which recorded no time, where the code asks for")
        await activation.replayed()
        return recorded
    operation.check_is_next()
    now_ms = activation.clock.now_ms()
    time = now_ms / 1000
    node = operation.create(StepEntry(encode_value(time)))
    metadata = EntryMetadata(EntryStatus.COMPLETED, None, 1, now_ms, now_ms, now_ms)
    activation.history.put_metadata(node, metadata)
    activation.hold_steps()
    await trio.lowlevel.checkpoint()
    return time
