"""`ctx.set_attributes` and `ctx.attributes`: by what a workflow can be found, changed and read by its own code.

1. Attributes are state, not history: one map in the workflow's namespace, in which the last change counts. That a change was
   made is history: recorded as a step that has completed, in one batch with the change, and passed over on replay. So a replay
   never sets back what came later.
2. What code is told is on record, too: the attributes as they were after the change, or when they were asked for. So it is
   the same on every run, whatever branches beside it do, and also where finished branches and old iterations are not run again.
3. Both are durable before the next step function runs and before the next park, like `ctx.now`, and cost no commit of their own.
4. What is forgotten of history (a race's loser, a pruned iteration, `replay_from_step`) takes nothing back.

Rejected: a property that gives the attributes as they are. Code that branches on it would diverge on replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import trio

from perdure.storage import decode_value, encode_value
from perdure.storage.attributes import InvalidAttributeError, Scalar, check_attributes, encode_attributes
from perdure.storage.schema import EntryMetadata, EntryStatus, StepEntry
from perdure.workflow.errors import InvalidArgumentError
from perdure.workflow.scope import Operation

__all__ = ["check_changed", "check_removed", "run_attributes"]

_RECORDED = "attributes"


def check_changed(attributes: object) -> dict[str, Scalar]:
    """The attributes to set.

    Raises:
        InvalidArgumentError: They cannot be kept.
    """
    try:
        return check_attributes(attributes)
    except InvalidAttributeError as error:
        raise InvalidArgumentError(str(error)) from None


def check_removed(names: object) -> tuple[str, ...]:
    """The names of the attributes to remove.

    Raises:
        InvalidArgumentError: It is no list of names.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidArgumentError(
            f"remove= takes a list of names of attributes, not {names!r}; write remove=[{names!r}]"
        )
    checked = tuple(cast("Iterable[object]", names))
    for name in checked:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"remove= takes names of attributes, which are text, not {name!r}")
    return cast("tuple[str, ...]", checked)


async def run_attributes(
    operation: Operation, changed: Mapping[str, Scalar] | None = None, removed: tuple[str, ...] = ()
) -> dict[str, Scalar]:
    """The attributes that are recorded here; or those that there are now, after the change, recorded."""
    activation = operation.scope.activation
    found = operation.find(StepEntry)
    if found is not None:
        node, _, kind = found
        value: object = None if kind.output is None else decode_value(kind.output)
        recorded: object = cast("dict[object, object]", value).get(_RECORDED) if isinstance(value, dict) else None
        if not isinstance(recorded, dict):
            raise operation.diverged(operation.name, node, "which recorded no attributes, where the code asks for")
        await activation.replayed()
        return cast("dict[str, Scalar]", recorded)
    operation.check_is_next()
    history = activation.history
    attributes = history.attributes()
    if changed is not None:
        for name in removed:
            attributes.pop(name, None)
        attributes.update(changed)
        try:
            encoded = encode_attributes(attributes)
        except InvalidAttributeError as error:  # together they are too many
            raise InvalidArgumentError(str(error)) from None
        history.set_attributes(encoded)
    now_ms = activation.clock.now_ms()
    node = operation.create(StepEntry(encode_value({_RECORDED: attributes})))
    history.put_metadata(node, EntryMetadata(EntryStatus.COMPLETED, None, 1, now_ms, now_ms, now_ms))
    activation.hold_steps()
    await trio.lowlevel.checkpoint()
    return attributes
