"""Deadlines of workflows that were evicted from their work: the catalog has no time for them.

1. A workflow that is at work is due at once by its row, which brings it back at the next start; nobody looks for it before, as
   its evictor did not want it to run. But at its deadline it is to fail all the same.
2. What waits has its deadline as its alarm, and what runs keeps the time itself; neither is here.
3. One task waits for the earliest. An activation that is not needed any more changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import trio

from perdure.workflow import Clock

__all__ = ["Deadlines"]


class Deadlines:
    """Has workflows activated that are not in memory at their deadline.

    Args:
        clock: The wall clock.
        want: Queues the activation of a workflow.
    """

    def __init__(self, clock: Clock, want: Callable[[str], None]) -> None:
        self._clock = clock
        self._want = want
        self._due: list[tuple[int, str]] = []
        self._has_due = trio.Event()
        self._waiting = trio.CancelScope()

    def note(self, workflow_id: str, deadline_ms: int) -> None:
        """A workflow has left memory that is to fail then (milliseconds since the epoch)."""
        heapq.heappush(self._due, (deadline_ms, workflow_id))
        self._has_due.set()
        self._waiting.cancel()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Wait for one deadline after the other, for ever."""
        while True:
            await self._has_due.wait()
            with trio.CancelScope() as self._waiting:  # an earlier one begins anew
                await self._clock.wait_until_ms(self._due[0][0])
                _, workflow_id = heapq.heappop(self._due)
                self._want(workflow_id)
            if not self._due:
                self._has_due = trio.Event()
