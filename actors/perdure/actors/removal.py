"""Deleting workflows.

1. Only what has ended is deleted, and owes nothing to others; what cannot be read can neither run nor end, and is deleted
   too when somebody asks for just it.
2. It happens inside the workflow's gate, with no actor there: nobody can bring the workflow in, or make another under its
   id, before it is gone for good, and its row with it.
3. What would be made again is not deleted: a schedule's run, until it is noted as made.
4. Killed at any point, the workflow is there whole or gone for good (`Store.delete`); deleting it again finishes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from perdure.actors.catalog import CatalogKeeper
from perdure.actors.errors import WorkflowNotEndedError
from perdure.actors.residents import Residents
from perdure.storage import CatalogRow
from perdure.storage.wake import TERMINAL_STATES

__all__ = ["DUTIES_S", "Removal", "is_removable"]

DUTIES_S: Final = 5.0
"""How long a deletion waits for a workflow that has ended to do its duties, in seconds."""

_LOOK_S: Final = 0.05


def _has_duties(row: CatalogRow) -> bool:
    return row.problem is None and row.state in TERMINAL_STATES and row.next_wake_ms is not None


def is_removable(row: CatalogRow) -> bool:
    """Whether nothing of a workflow is to come any more: it has ended and has no duties."""
    return row.state in TERMINAL_STATES and row.next_wake_ms is None and row.problem is None


_PAST: Final = trio.Event()
_PAST.set()


class Removal:
    """Deletes workflows of one supervisor."""

    def __init__(self, residents: Residents, keeper: CatalogKeeper) -> None:
        self._residents = residents
        self._keeper = keeper

    async def delete(self, workflow_id: str) -> None:
        """Delete a workflow for good; durable on return.

        Raises:
            WorkflowNotFoundError: There is none.
            WorkflowNotEndedError: It has not ended, or has ended and still owes something to others.
            StorageError: Its file cannot be removed.
        """
        while True:
            row = await self._row(workflow_id)
            if _has_duties(row):
                # Perhaps it only seems to: opened, its row is put right.
                async with self._residents.using(workflow_id):
                    pass
                row = await self._dutiful(workflow_id)
            if row.problem is None and not is_removable(row):
                raise _not_ended(row)
            if self._residents.must_stay(workflow_id):
                raise WorkflowNotEndedError(
                    f"workflow {workflow_id!r} is being made by its schedule; delete it in a moment",
                    workflow_id=workflow_id,
                    state=row.state,
                )
            gone = await self._try(workflow_id, lambda now: now.problem is not None or is_removable(now))
            if gone is None:
                return
            await gone.wait()

    async def delete_if(self, workflow_id: str, condition: Callable[[CatalogRow], bool]) -> bool:
        """Delete a workflow that meets a condition, unless somebody is at it; returns whether it was deleted.

        Raises:
            StorageError: Its file cannot be removed.
        """
        was_deleted = False

        def check(row: CatalogRow) -> bool:
            nonlocal was_deleted
            was_deleted = condition(row)
            return was_deleted

        return await self._try(workflow_id, check) is None and was_deleted

    async def _try(self, workflow_id: str, condition: Callable[[CatalogRow], bool]) -> trio.Event | None:
        """Delete it if it is dormant and meets the condition; else what to wait for before looking again."""
        residents = self._residents
        async with residents.gate(workflow_id):
            residents.check_open()
            actor = residents.live.get(workflow_id)
            if actor is not None:
                return actor.stopped
            row = await self._keeper.get(workflow_id)
            if row is None or not condition(row) or residents.must_stay(workflow_id):
                return _PAST
            await self._keeper.delete(workflow_id)
            residents.forget(workflow_id)
            self._keeper.events.tell(workflow_id, row.workflow_type, row.state, None)
            return None

    async def _dutiful(self, workflow_id: str) -> CatalogRow:
        """The row of a workflow that was given some time to do its duties, which usually are done in a moment."""
        for _ in range(round(DUTIES_S / _LOOK_S)):
            if not _has_duties(await self._row(workflow_id)):
                break
            await trio.sleep(_LOOK_S)
        return await self._row(workflow_id)

    async def _row(self, workflow_id: str) -> CatalogRow:
        self._residents.check_open()
        row = await self._keeper.get(workflow_id)
        if row is None:
            raise self._residents.not_found(workflow_id)
        return row


def _not_ended(row: CatalogRow) -> WorkflowNotEndedError:
    workflow_id = row.workflow_id
    if row.state in TERMINAL_STATES:
        text = (
            f"workflow {workflow_id!r} is {row.state} and still has to tell others so; delete it once the workflows that it "
            "called, or that called it, can run here"
        )
    else:
        text = (
            f"workflow {workflow_id!r} is {row.state}, and only what has ended is deleted; cancel it first: "
            f"await (await supervisor.get({workflow_id!r})).cancel()"
        )
    return WorkflowNotEndedError(text, workflow_id=workflow_id, state=row.state)
