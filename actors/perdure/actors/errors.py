"""The errors of the supervisor."""

from __future__ import annotations

from perdure.storage import PerdureError

__all__ = [
    "MissingExtraError",
    "ScheduleNotFoundError",
    "SupervisorClosedError",
    "SupervisorError",
    "UnregisteredWorkflowError",
    "WorkflowExistsError",
    "WorkflowNotEndedError",
    "WorkflowNotFoundError",
]


class SupervisorError(PerdureError):
    """The root of the supervisor's errors."""


class SupervisorClosedError(SupervisorError):
    """The supervisor has left its block, or is leaving it, and takes nothing more."""


class MissingExtraError(SupervisorError, ImportError):
    """What was asked for needs a package that is not installed; `extra` names the extra that brings it.

    An `ImportError` too, as of any other module that cannot be had.
    """

    extra: str


class ScheduleNotFoundError(SupervisorError):
    """No schedule has this name; make it with `supervisor.schedule(...)`."""

    name: str


class UnregisteredWorkflowError(SupervisorError):
    """No function is registered under a workflow's name; name it in `open_supervisor(..., workflows=[...])`."""

    workflow_type: str


class WorkflowExistsError(SupervisorError):
    """The id is taken by another workflow, or by the same one with another input."""

    workflow_id: str


class WorkflowNotFoundError(SupervisorError):
    """No workflow has this id."""

    workflow_id: str


class WorkflowNotEndedError(SupervisorError):
    """A workflow that goes on, or still owes something to others, cannot be deleted; cancel it first."""

    workflow_id: str
    state: str
