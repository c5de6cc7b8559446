"""What those wait for who want to know how a dormant workflow ends: that something happens to it.

1. Something happens when it becomes live, ends, is found in trouble or is deleted, or when the supervisor leaves its block; then
   they look again.
2. Nobody misses it: an event is handed out in the same step of the scheduler in which it is known that nothing has happened
   since the caller began to look.
3. Events exist for workflows somebody has waited for, until something happens to them; looking at one that has ended leaves none.
"""

from __future__ import annotations

import trio

__all__ = ["Arrivals"]


class Arrivals:
    """The events of one supervisor.

    Attributes:
        count: How often something has happened, to any workflow.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._events: dict[str, trio.Event] = {}
        self._is_closed = False

    def expect(self, workflow_id: str, since: int) -> trio.Event:
        """An event for the next thing that happens to a workflow; set already, if something happened since that `count`."""
        if self._is_closed or since != self.count:
            past = trio.Event()
            past.set()
            return past
        return self._events.setdefault(workflow_id, trio.Event())

    def announce(self, workflow_id: str) -> None:
        """Something has happened to a workflow."""
        self.count += 1
        event = self._events.pop(workflow_id, None)
        if event is not None:
            event.set()

    def close(self) -> None:
        """The supervisor leaves its block: whoever waits looks again, and nobody waits from now on."""
        self._is_closed = True
        events, self._events = self._events, {}
        for event in events.values():
            event.set()
