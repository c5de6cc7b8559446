"""Deadlines of workflows that were evicted from their work: the catalog has no time for them.

1. A workflow that is at work is due at once by its row, which brings it back at the next start; nobody looks for it before, as
   its evictor did not want it to run. But at its deadline it is to fail all the same.
2. What waits has its deadline as its alarm, and what runs keeps the time itself; neither is here.
3. One task waits for the earliest. An activation that is not needed any more changes nothing.
4. Each workflow counts once, however often it is evicted: items of the heap that say another time than `_noted` are stale, and
   passed over; when they are the most, all are thrown away.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import trio

from perdure.workflow import Clock

__all__ = ["STALE_MAX", "Deadlines"]

STALE_MAX: Final = 100
"""How many stale items are kept at most, beside as many as there are deadlines."""


class Deadlines:
    """Has workflows activated that are not in memory at their deadline.

    Args:
        clock: The wall clock.
        want: Queues the activation of a workflow.
    """

    def __init__(self, clock: Clock, want: Callable[[str], None]) -> None:
        self._clock = clock
        self._want = want
        self._noted: dict[str, int] = {}
        self._due: list[tuple[int, str]] = []
        self._has_due = trio.Event()
        self._waiting = trio.CancelScope()

    def __len__(self) -> int:
        """How many items are kept."""
        return len(self._due)

    def note(self, workflow_id: str, deadline_ms: int) -> None:
        """A workflow has left memory that is to fail then (milliseconds since the epoch)."""
        if self._noted.get(workflow_id) == deadline_ms:
            return
        self._noted[workflow_id] = deadline_ms
        heapq.heappush(self._due, (deadline_ms, workflow_id))
        self._drop_stale()
        self._has_due.set()
        self._waiting.cancel()

    def forget(self, workflow_id: str) -> None:
        """A workflow has ended, or is gone; harmless for one that is not here."""
        if self._noted.pop(workflow_id, None) is not None:
            self._drop_stale()

    def _drop_stale(self) -> None:
        if len(self._due) > 2 * len(self._noted) + STALE_MAX:
            self._due = [(deadline_ms, workflow_id) for workflow_id, deadline_ms in self._noted.items()]
            heapq.heapify(self._due)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Wait for one deadline after the other, for ever."""
        while True:
            if not self._due:
                self._has_due = trio.Event()
                await self._has_due.wait()
                continue
            with trio.CancelScope() as self._waiting:  # an earlier one begins anew
                await self._clock.wait_until_ms(self._due[0][0])
                self._take_due()

    def _take_due(self) -> None:
        now_ms = self._clock.now_ms()
        while self._due and self._due[0][0] <= now_ms:
            deadline_ms, workflow_id = heapq.heappop(self._due)
            if self._noted.get(workflow_id) == deadline_ms:
                del self._noted[workflow_id]
                self._want(workflow_id)
