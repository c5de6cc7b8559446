"""Telling readers of changes of state, once they are durable.

1. An event is told after the batch that made it true, in the order in which those were acknowledged. What a crash cuts off
   is not told again: a reader that must know everything lists the workflows when it begins.
2. Telling never waits and never fails: a reader that does not keep up loses its oldest events, and is told how many.
3. A reader holds at most as many events as it asked for. Without readers an event costs one look at an empty list.

Rejected: a Trio memory channel for each reader. When it is full it refuses the newest event, and the newest is what counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import trio

from perdure.workflow.clock import Clock
from perdure.workflow.states import WorkflowState

__all__ = ["EventHub", "EventStream", "WorkflowStateChanged"]

_STATES: Final = {state.value: state for state in WorkflowState}


@dataclass(frozen=True, slots=True)
class WorkflowStateChanged:
    """A workflow's state changed, durably.

    Attributes:
        workflow_id: The workflow's id.
        workflow: The registered name of its function.
        old: Its state before; `None`: it was made.
        new: Its state from then on; `None`: it was deleted.
        at: When, in seconds since the epoch.
        missed: How many events the reader lost just before this one, because it had not read them in time.
    """

    workflow_id: str
    workflow: str
    old: WorkflowState | None
    new: WorkflowState | None
    at: float
    missed: int = 0


class EventStream:
    """The events of one reader: an async context manager, in whose block they are told, and their iterator.

    The iteration ends when the supervisor leaves its block. One task reads it at a time.
    """

    def __init__(self, hub: EventHub, buffer: int) -> None:
        self._hub = hub
        self._waiting: deque[WorkflowStateChanged] = deque()
        self._buffer = buffer
        self._missed = 0
        self._is_over = False
        self._has_news = trio.Event()

    def tell(self, event: WorkflowStateChanged) -> None:
        """Add an event, in place of the oldest if there are too many."""
        if len(self._waiting) == self._buffer:
            self._waiting.popleft()
            self._missed += 1
        self._waiting.append(event)
        self._has_news.set()

    def end(self) -> None:
        """Nothing more comes; what was told can still be read."""
        self._is_over = True
        self._has_news.set()

    async def __aenter__(self) -> EventStream:
        await trio.lowlevel.checkpoint()
        self._hub.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Tell it nothing more. Closing twice is fine."""
        self._hub.remove(self)
        self.end()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> WorkflowStateChanged:
        """The next event; waits until there is one."""
        await trio.lowlevel.checkpoint()
        while (event := self.next_nowait()) is None:
            if self._is_over:
                raise StopAsyncIteration
            self._has_news = trio.Event()
            await self._has_news.wait()
        return event

    def next_nowait(self) -> WorkflowStateChanged | None:
        """The next event, if one was told that is not read yet."""
        if not self._waiting:
            return None
        event = self._waiting.popleft()
        missed, self._missed = self._missed, 0
        return replace(event, missed=missed) if missed else event


class EventHub:
    """Tells the readers of one supervisor.

    Args:
        clock: When an event happened.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: list[EventStream] = []
        self._is_over = False

    def tell(self, workflow_id: str, workflow: str, old: str | None, new: str | None) -> None:
        """A state changed, durably; `None` stands for a workflow that is not there."""
        if self._streams:
            event = WorkflowStateChanged(
                workflow_id,
                workflow,
                _state(old),
                _state(new),
                self._clock.now_ms() / 1000,
            )
            for stream in self._streams:
                stream.tell(event)

    def add(self, stream: EventStream) -> None:
        """A reader is told what comes from now on."""
        if self._is_over:
            stream.end()
        else:
            self._streams.append(stream)

    def remove(self, stream: EventStream) -> None:
        """A reader goes, if it is here."""
        if stream in self._streams:
            self._streams.remove(stream)

    def end(self) -> None:
        """Nothing more comes for anybody."""
        self._is_over = True
        for stream in self._streams:
            stream.end()
        self._streams.clear()


def _state(text: str | None) -> WorkflowState | None:
    # A state of a later version can be in the row of a workflow that is deleted.
    return _STATES.get(text) if text is not None else None
