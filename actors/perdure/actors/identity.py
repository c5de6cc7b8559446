"""Whether a workflow that exists is the one that is asked for: the same function, by its name, and an equal input.

Inputs are compared as they are stored (`sameness.py`).
"""

from __future__ import annotations

from typing import Any

from perdure.actors.actor import Actor
from perdure.actors.errors import WorkflowExistsError
from perdure.actors.sameness import is_same_value
from perdure.workflow import Workflow

__all__ = ["check_same"]


def check_same(actor: Actor, definition: Workflow[Any, Any], encoded: bytes) -> None:
    """See that the actor's workflow runs this function with this input.

    Raises:
        WorkflowExistsError: It does not.
    """
    history = actor.activation.history
    if history.workflow_type != definition.name:
        raise WorkflowExistsError(
            f"workflow {actor.workflow_id!r} exists and is a {history.workflow_type!r}, not a {definition.name!r}; choose "
            "another id",
            workflow_id=actor.workflow_id,
        )
    stored = history.input
    if stored is None or not is_same_value(stored, encoded):
        raise WorkflowExistsError(
            f"workflow {actor.workflow_id!r} exists and was started with another input; choose another id, or use "
            f"supervisor.get({actor.workflow_id!r})",
            workflow_id=actor.workflow_id,
        )
