"""The queue of workflows that are to become live.

1. Whoever wants a workflow to run puts its id here; what it wants is durable already, so this queue may be lost with the
   process, and holds ids only.
2. A workflow is activated when a place is free (`slots.py`). If none is, the longest idle live workflow is asked to leave.
3. First come, first served, by turns between new work (spawns, messages, wakes) and what is recovered (the catalog's due
   rows), so that neither starves the other.
4. Recovered work is taken from the catalog as there is room for it (`recover` waits), so the queue does not grow with the
   number of workflows that are due.
5. `AT_ONCE` workflows are opened and replayed at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from perdure.actors.slots import Place, Slots

__all__ = ["AT_ONCE", "Dispatcher"]

AT_ONCE: Final = 8
"""How many activations are begun at a time."""

_RECOVERED_MAX: Final = 32


class Dispatcher:
    """Activates what is wanted, as places become free.

    Args:
        slots: The places.
        make_room: Asks idle workflows to leave until this many are leaving, or none is idle.
        activate: Makes a workflow live in a place that was taken for it; it gives that back, if it does not use it.
    """

    def __init__(
        self, slots: Slots, make_room: Callable[[int], None], activate: Callable[[str, Place], Awaitable[None]]
    ) -> None:
        self._slots = slots
        self._make_room = make_room
        self._activate = activate
        self._new: deque[str] = deque()
        self._recovered: deque[str] = deque()
        self._queued: set[str] = set()
        self._is_wanted = trio.Event()
        self._has_room = trio.Event()
        self._limiter = trio.CapacityLimiter(AT_ONCE)
        self._takes_recovered = False

    def __len__(self) -> int:
        """How many workflows wait for their activation."""
        return len(self._queued)

    def want(self, workflow_id: str) -> None:
        """Queue a workflow, unless it is queued."""
        if workflow_id not in self._queued:
            self._queued.add(workflow_id)
            self._new.append(workflow_id)
            self._is_wanted.set()

    async def recover(self, workflow_id: str) -> None:
        """Queue a workflow that the catalog says is due; waits while many of those are queued."""
        while len(self._recovered) >= _RECOVERED_MAX:
            self._has_room = trio.Event()
            await self._has_room.wait()
        if workflow_id not in self._queued:
            self._queued.add(workflow_id)
            self._recovered.append(workflow_id)
            self._is_wanted.set()

    @trio.lowlevel.enable_ki_protection
    async def run(self, nursery: trio.Nursery) -> None:
        """Activate, for ever, in the nursery."""
        while True:
            if not self._queued:
                self._is_wanted = trio.Event()
                await self._is_wanted.wait()
            token = object()
            await self._limiter.acquire_on_behalf_of(token)
            while (place := self._slots.take_nowait()) is None:
                self._make_room(min(len(self._queued), AT_ONCE))
                await self._slots.until_changed()
            nursery.start_soon(self._activate_next, self._next(), place, token)

    def _next(self) -> str:
        is_recovered = bool(self._recovered) and (self._takes_recovered or not self._new)
        self._takes_recovered = not is_recovered
        queue = self._recovered if is_recovered else self._new
        workflow_id = queue.popleft()
        self._queued.discard(workflow_id)
        if is_recovered:
            self._has_room.set()
        return workflow_id

    async def _activate_next(self, workflow_id: str, place: Place, token: object) -> None:
        try:
            await self._activate(workflow_id, place)
        finally:
            self._limiter.release_on_behalf_of(token)
