"""What the records of our loggers carry beside their text, so that they can be searched.

1. Whatever concerns one workflow has its id as `workflow_id`; its type as `workflow`, the place in its history as `entry` and
   the number of the attempt as `attempt` where there are such. What is not known is not there.
2. Nothing is logged twice: what ends a workflow is logged once that is durable, and not again on replay.
3. Levels are for months of running. DEBUG: what goes on inside (activations, what leaves memory). INFO: what happens in the
   life of a workflow (it ended, an attempt failed and is retried). WARNING: what a person may want to look at (it failed, it
   cannot run, storage is tried again). ERROR: what does not get well by itself.
4. Without configuration nothing is output: `perdure.storage` gives the logger `perdure` a handler that does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.workflow.history import History, Path

__all__ = ["fields_of"]


def fields_of(history: History, entry: Path | None = None, attempt: int | None = None) -> dict[str, object]:
    """For `extra=`: the fields of a record about this workflow, or about an entry of it.

    Args:
        history: The workflow's.
        entry: The entry's place: names, and numbers for loop iterations.
        attempt: 1 for the first one.
    """
    fields: dict[str, object] = {"workflow_id": history.workflow_id, "workflow": history.workflow_type}
    if entry is not None:
        fields["entry"] = entry
    if attempt is not None:
        fields["attempt"] = attempt
    return fields
