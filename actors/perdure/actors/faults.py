"""Workflows that cannot run, and why.

1. Three things are asked, and none opens a workflow's file: what this process met (`Residents.troubles`), what the catalog
   says of files that cannot be read, and whose function is not registered here.
2. A workflow is told once, with the first reason in that order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from perdure.actors.catalog import CatalogKeeper
from perdure.actors.residents import Residents
from perdure.storage import CatalogRow, Store
from perdure.workflow import WorkflowState
from perdure.workflow.states import TERMINAL_STATES

__all__ = ["FaultedWorkflow", "find_faulted"]

_ACTIVE: Final = tuple(state.value for state in WorkflowState if state not in TERMINAL_STATES)


@dataclass(frozen=True, slots=True)
class FaultedWorkflow:
    """A workflow that cannot run.

    Attributes:
        id: Its id.
        workflow: The registered name of its function; empty when its file could never be read.
        reason: Why it cannot run, and what helps.
        since: Since when that is known, in seconds since the epoch: since it was tried last, if this process tried it.
        error: What was raised, if this process met it.
    """

    id: str
    workflow: str
    reason: str
    since: float
    error: BaseException | None = field(default=None, compare=False)


async def find_faulted(
    store: Store, keeper: CatalogKeeper, residents: Residents, registered: Collection[str], limit: int
) -> list[FaultedWorkflow]:
    """The workflows that cannot run, longest first, at most `limit`."""
    found: dict[str, FaultedWorkflow] = {}
    for workflow_id, error in list(residents.troubles.items())[:limit]:
        row = await keeper.get(workflow_id)
        since = residents.troubles.since_ms(workflow_id) / 1000
        found[workflow_id] = FaultedWorkflow(
            workflow_id, "" if row is None else row.workflow_type, str(error) or type(error).__name__, since, error
        )
    for row in await store.list_rows(has_problem=True, limit=limit):
        found.setdefault(row.workflow_id, _of_row(row, row.problem or ""))
    for name in await store.list_types():
        if name not in registered:
            reason = str(residents.unregistered(name))
            for row in await store.list_rows(state=_ACTIVE, workflow_type=name, has_problem=False, limit=limit):
                found.setdefault(row.workflow_id, _of_row(row, reason))
    return sorted(found.values(), key=lambda each: (each.since, each.id))[:limit]


def _of_row(row: CatalogRow, reason: str) -> FaultedWorkflow:
    return FaultedWorkflow(row.workflow_id, row.workflow_type, reason, row.updated_at_ms / 1000)
