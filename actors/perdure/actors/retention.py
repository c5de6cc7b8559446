"""Deleting what ended long ago, in the background.

1. What is deleted has ended, has no duties, can be read, and was not changed for as long as its state is kept. That is
   decided from the catalog, and once more inside the workflow's gate.
2. It is done in pages with a pause after each, by one task, so that months of it do not crowd out what runs.
3. Nothing of it has to be kept: the age of a workflow is in the catalog, so a restart goes on where it stands.
4. Nothing that ends from now on is due before its time has passed; so when nothing is left the task sleeps until the first
   that is there becomes due, or for the whole time.
5. What cannot be deleted is logged, passed over, and tried again in the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, cast

import trio

from perdure.actors.errors import SupervisorClosedError
from perdure.actors.removal import Removal, is_removable
from perdure.storage import CatalogRow, StorageError, Store
from perdure.workflow import Clock, InvalidArgumentError, WorkflowState
from perdure.workflow.checks import check_duration, ms_ceil
from perdure.workflow.states import TERMINAL_STATES

__all__ = ["PAGE", "PAUSE_S", "Retention", "check_retention"]

PAGE: Final = 20
"""How many workflows are deleted at a stretch."""

PAUSE_S: Final = 0.05
"""The pause after that, in seconds."""

_ROUND_S: Final = 3600.0
"""The longest time between two rounds, in seconds: the wall clock may be set."""

_LEAST_MS: Final = 1000
"""The shortest pause between two rounds, so that `retention={"completed": 0}` does not look without rest."""

_TROUBLE_S: Final = 60.0
_EXAMPLE: Final = 'retention={"completed": timedelta(days=30)}'

_log = logging.getLogger("perdure.actors")


def check_retention(retention: object) -> dict[str, int]:
    """How long each state is kept, in milliseconds.

    Raises:
        InvalidArgumentError: It is no mapping of terminal states to times.
    """
    if retention is None:
        return {}
    if not isinstance(retention, Mapping):
        raise InvalidArgumentError(
            f"retention= takes a mapping of states to times, not {retention!r:.80}; write {_EXAMPLE}"
        )
    kept: dict[str, int] = {}
    for state, age in cast("Mapping[object, object]", retention).items():
        name = state.value if isinstance(state, WorkflowState) else state
        if name not in {each.value for each in TERMINAL_STATES}:
            known = ", ".join(sorted(each.value for each in TERMINAL_STATES))
            raise InvalidArgumentError(
                f"retention= keeps workflows that have ended ({known}), not {state!r:.80}; write {_EXAMPLE}"
            )
        seconds = age.total_seconds() if isinstance(age, timedelta) else age
        kept[str(name)] = ms_ceil(check_duration(seconds, f"retention of {name!r}", _EXAMPLE))
    return kept


class Retention:
    """Deletes what is kept no longer.

    Args:
        kept_ms: How long each terminal state is kept.
        store: Its catalog is asked.
        removal: Deletes.
        clock: The time.

    Attributes:
        count: How many were deleted.
    """

    def __init__(self, kept_ms: Mapping[str, int], store: Store, removal: Removal, clock: Clock) -> None:
        self.count: int = 0
        self._kept_ms = kept_ms
        self._store = store
        self._removal = removal
        self._clock = clock

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Delete what is due, for ever."""
        while True:
            try:
                wait_ms = min([await self._round(state, kept_ms) for state, kept_ms in self._kept_ms.items()])
            except SupervisorClosedError:
                return
            except StorageError as error:
                _log.warning("old workflows are not deleted for now: %s", error)
                wait_ms = round(_TROUBLE_S * 1000)
            await self._clock.wait_until_ms(self._clock.now_ms() + min(max(wait_ms, _LEAST_MS), round(_ROUND_S * 1000)))

    async def _round(self, state: str, kept_ms: int) -> int:
        """Delete what is due of one state; returns in how many milliseconds the next can be."""
        after: tuple[int, str] | None = None
        while True:
            before_ms = self._clock.now_ms() - kept_ms
            page = await self._store.find_ended(state, before_ms, limit=PAGE, after=after)
            for row in page:
                await self._delete(row, before_ms)
            if len(page) < PAGE:
                break
            after = (page[-1].updated_at_ms, page[-1].workflow_id)
            await trio.sleep(PAUSE_S)
        following = await self._store.find_ended(state, 2**62, limit=1, after=(before_ms - 1, ""))
        due_ms = following[0].updated_at_ms + kept_ms + 1 if following else self._clock.now_ms() + kept_ms + 1
        return due_ms - self._clock.now_ms()

    async def _delete(self, found: CatalogRow, before_ms: int) -> None:
        def is_due(row: CatalogRow) -> bool:
            return is_removable(row) and row.state == found.state and row.updated_at_ms < before_ms

        fields = {"workflow_id": found.workflow_id, "workflow": found.workflow_type}
        try:
            if await self._removal.delete_if(found.workflow_id, is_due):
                self.count += 1
                text = "workflow %r was deleted: it is %s and was kept long enough"
                _log.info(text, found.workflow_id, found.state, extra=fields)
        except StorageError as error:
            _log.warning(
                "workflow %r cannot be deleted, which is tried again: %s", found.workflow_id, error, extra=fields
            )
