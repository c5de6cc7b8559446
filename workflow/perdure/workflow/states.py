"""The seven states of a workflow and the transitions between them.

1. The state's text is stored at `(3, 1)`; an empty namespace is `pending`.
2. Terminal states have no transitions but `recover` and `rewind`: a terminal workflow is never run again by itself.
3. Every change of state goes through `next_state`; anything not in the table is our bug and raises `InvalidTransitionError`.
"""

from __future__ import annotations

import enum
from typing import Final

from perdure.workflow.errors import WorkflowError

__all__ = ["TERMINAL_STATES", "InvalidTransitionError", "WorkflowEvent", "WorkflowState", "next_state"]


class WorkflowState(enum.Enum):
    """Where a workflow stands. The values are stored on disk; never change or reuse one."""

    PENDING = "pending"
    RUNNING = "running"
    SLEEPING = "sleeping"
    ROLLING_BACK = "rolling_back"
    FAILED = "failed"
    COMPLETED = "completed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the workflow has ended."""
        return self in TERMINAL_STATES


class WorkflowEvent(enum.Enum):
    """What changes a workflow's state."""

    RUN = "run"
    PARK = "park"
    COMPLETE = "complete"
    FAIL = "fail"
    ROLL_BACK = "roll_back"
    CANCEL = "cancel"
    RECOVER = "recover"
    REWIND = "rewind"


TERMINAL_STATES: Final = frozenset({WorkflowState.FAILED, WorkflowState.COMPLETED, WorkflowState.CANCELLED})
"""The states in which a workflow has ended."""

_S, _E = WorkflowState, WorkflowEvent

_TRANSITIONS: Final[dict[tuple[WorkflowState, WorkflowEvent], WorkflowState]] = {
    (_S.PENDING, _E.RUN): _S.RUNNING,
    (_S.PENDING, _E.PARK): _S.SLEEPING,
    (_S.PENDING, _E.COMPLETE): _S.COMPLETED,
    (_S.PENDING, _E.FAIL): _S.FAILED,
    (_S.PENDING, _E.ROLL_BACK): _S.ROLLING_BACK,
    (_S.PENDING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.RUN): _S.RUNNING,
    (_S.RUNNING, _E.PARK): _S.SLEEPING,
    (_S.RUNNING, _E.COMPLETE): _S.COMPLETED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.RUNNING, _E.ROLL_BACK): _S.ROLLING_BACK,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.SLEEPING, _E.RUN): _S.RUNNING,
    (_S.SLEEPING, _E.PARK): _S.SLEEPING,
    (_S.SLEEPING, _E.COMPLETE): _S.COMPLETED,
    (_S.SLEEPING, _E.FAIL): _S.FAILED,
    (_S.SLEEPING, _E.ROLL_BACK): _S.ROLLING_BACK,
    (_S.SLEEPING, _E.CANCEL): _S.CANCELLED,
    # While it is rolled back, running a handler and waiting for its retry change nothing: only an end does.
    (_S.ROLLING_BACK, _E.RUN): _S.ROLLING_BACK,
    (_S.ROLLING_BACK, _E.PARK): _S.ROLLING_BACK,
    (_S.ROLLING_BACK, _E.ROLL_BACK): _S.ROLLING_BACK,
    (_S.ROLLING_BACK, _E.FAIL): _S.FAILED,
    (_S.ROLLING_BACK, _E.CANCEL): _S.CANCELLED,
    (_S.FAILED, _E.RECOVER): _S.PENDING,
    # Replaying from a step is an operator's explicit act: it makes any workflow runnable, a cancelled one too.
    **{(state, _E.REWIND): _S.PENDING for state in _S},
}


class InvalidTransitionError(WorkflowError):
    """A state and an event that do not go together; a bug in Perdure."""

    state: WorkflowState
    event: WorkflowEvent


def next_state(state: WorkflowState, event: WorkflowEvent) -> WorkflowState:
    """The state that follows.

    Raises:
        InvalidTransitionError: The table has no such transition.
    """
    following = _TRANSITIONS.get((state, event))
    if following is None:
        raise InvalidTransitionError(
            f"a workflow that is {state.value} cannot {event.value}; please report this as a bug",
            state=state,
            event=event,
        )
    return following
