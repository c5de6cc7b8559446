"""Listing workflows: what the catalog says of them, put as users see it.

1. No workflow's file is opened, however many are listed.
2. What is durable is shown: the catalog is brought up to date first, so a live workflow shows its state now.
3. Pages follow the order of creation, and go on after a workflow that was deleted meanwhile: a page is continued from what
   the last entry says, not from what is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, cast

from perdure.storage import CatalogRow
from perdure.storage.attributes import Scalar, check_attributes
from perdure.workflow import InvalidArgumentError, WorkflowState, definition_of
from perdure.workflow.checks import check_when_ms

__all__ = ["LIST_LIMIT_MAX", "WorkflowInfo", "check_after", "info_of", "question_of"]

_BEFORE = "created_before=datetime(2030, 1, 1, tzinfo=timezone.utc)"

LIST_LIMIT_MAX: Final = 10_000
"""Most workflows of one page: a page is made in one go, and 10,000 take some 50 ms."""


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """What is known of a workflow without opening it.

    Attributes:
        id: Its id.
        workflow: The registered name of its function; empty when its file could never be read.
        state: Where it stands, as far as that is durable.
        created_at: When it was made, in seconds since the epoch, to the millisecond.
        updated_at: When this was last changed, likewise; of a workflow that has ended, when it ended.
        next_wake: When it is to be activated, likewise; 0 is at once, `None` never: it has ended, or waits for a message only.
        mail_waiting: Whether its mailbox may hold messages that it has not read.
        attributes: By what it can be found.
        parent_id: The workflow that called it, or `None`.
        is_live: Whether it is in memory and runs, or waits there.
        reason: Why it cannot run, or `None`.
    """

    id: str
    workflow: str
    state: WorkflowState
    created_at: float
    updated_at: float
    next_wake: float | None
    mail_waiting: bool
    attributes: Mapping[str, Scalar] = field(hash=False)
    parent_id: str | None
    is_live: bool
    reason: str | None

    @property
    def cursor(self) -> tuple[int, str]:
        """Where a list that ended with it goes on."""
        return round(self.created_at * 1000), self.id


def info_of(row: CatalogRow, *, is_live: bool, reason: str | None) -> WorkflowInfo:
    """A catalog row as users see it."""
    try:
        state = WorkflowState(row.state)
    except ValueError:
        state = WorkflowState.PENDING
        reason = reason or f"its state {row.state!r:.40} is not known to this version of Perdure"
    return WorkflowInfo(
        id=row.workflow_id,
        workflow=row.workflow_type,
        state=state,
        created_at=row.created_at_ms / 1000,
        updated_at=row.updated_at_ms / 1000,
        next_wake=None if row.next_wake_ms is None else row.next_wake_ms / 1000,
        mail_waiting=row.mail_waiting,
        attributes=row.attributes,
        parent_id=row.parent_id,
        is_live=is_live,
        reason=reason or row.problem,
    )


def question_of(
    state: object, workflow: object, created_before: float | datetime | None, attributes: object, parent_id: object
) -> dict[str, Any]:
    """The arguments of `Store.list_rows` and `count_rows`.

    Raises:
        InvalidArgumentError: One of them cannot be asked for.
        InvalidAttributeError: What is searched for can be no attribute.
    """
    return {
        "state": None if state is None else _states(state),
        "workflow_type": None if workflow is None else _workflow_name(workflow),
        "created_before_ms": None if created_before is None else check_when_ms(created_before, "list", _BEFORE),
        "attributes": None if attributes is None else check_attributes(attributes),
        "parent_id": None if parent_id is None else _text(parent_id),
    }


def check_after(after: object) -> tuple[int, str] | str | None:
    """Where a list goes on: the cursor of an entry, or an id whose row has to be looked up."""
    if after is None or isinstance(after, str):
        return after
    if isinstance(after, WorkflowInfo):
        return after.cursor
    raise InvalidArgumentError(
        f"after= takes the last entry of the page before, not {after!r:.80}; write after=page[-1]"
    )


def _states(state: object) -> frozenset[str]:
    if isinstance(state, str | WorkflowState) or not isinstance(state, Iterable):
        return frozenset({_state(state)})
    return frozenset(_state(each) for each in cast("Collection[object]", state))


def _state(state: object) -> str:
    try:
        return WorkflowState(state).value
    except ValueError:
        known = ", ".join(each.value for each in WorkflowState)
        raise InvalidArgumentError(
            f'{state!r:.80} is no state of a workflow; they are {known}: write state="failed", or several in a list'
        ) from None


def _workflow_name(workflow: object) -> str:
    if isinstance(workflow, str):
        return workflow
    return definition_of(workflow).name


def _text(parent_id: object) -> str:
    if not isinstance(parent_id, str):
        raise InvalidArgumentError(
            f'parent_id= takes a workflow id, not {parent_id!r:.80}; write parent_id="order-123"'
        )
    return parent_id
