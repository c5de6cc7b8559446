"""Numbered moments of a run, to do something at every one of them: count them in a first run, then act at each in turn.

1. A moment is before or after each batch of the driver, or wherever a test says so (`Moments.reached`).
2. What is done at a moment is done by another task, and the run goes on once nothing else can: so an action that waits
   for the batch in progress is as far as it can get when that batch goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio
from trio.testing import wait_all_tasks_blocked

from perdure.storage import Batch, Driver
from perdure.storage.driver import SingleWrites


class Moments:
    """Counts moments, and does something at one of them.

    Args:
        nursery: Where the action runs.
        at: The number of the moment, from 0; `None` for none.
        action: What to do there.

    Attributes:
        are_counted: Moments pass uncounted while this is `False`.
        names: What each moment was, in order.
        acted: Set once the action has returned.
    """

    def __init__(
        self, nursery: trio.Nursery, at: int | None = None, action: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._nursery = nursery
        self._at = at
        self._action = action
        self.are_counted = True
        self.names: list[str] = []
        self.acted = trio.Event()

    @property
    def was_reached(self) -> bool:
        """Whether the moment of the action came."""
        return self._at is not None and len(self.names) > self._at

    async def reached(self, name: str) -> None:
        """A moment has come; returns once the action, if this is its moment, is as far as it can get."""
        if not self.are_counted:
            return
        self.names.append(name)
        if len(self.names) - 1 == self._at:
            self._nursery.start_soon(self._act)
            await wait_all_tasks_blocked()

    async def _act(self) -> None:
        assert self._action is not None, "a moment without an action is not waited for"
        await self._action()
        self.acted.set()


class MomentDriver(SingleWrites):
    """A driver with a moment before and after each batch."""

    def __init__(self, inner: Driver, moments: Moments) -> None:
        self._inner = inner
        self._moments = moments

    @property
    def atomic_batch(self) -> bool:
        return self._inner.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        return await self._inner.get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        return await self._inner.list(prefix)

    async def batch(self, batch: Batch) -> None:
        await self._moments.reached("before a batch")
        await self._inner.batch(batch)
        await self._moments.reached("after a batch")

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        await self._inner.set_alarm(workflow_id, wake_at_ms)

    async def get_alarm(self, workflow_id: str) -> int | None:
        return await self._inner.get_alarm(workflow_id)

    async def clear_alarm(self, workflow_id: str) -> None:
        await self._inner.clear_alarm(workflow_id)

    async def aclose(self) -> None:
        await self._inner.aclose()


__all__ = ["MomentDriver", "Moments"]
