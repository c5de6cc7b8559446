"""One gate per workflow id: whoever opens, starts or closes a workflow does so alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

__all__ = ["Gates"]


@dataclass(slots=True)
class _Gate:
    lock: trio.Lock = field(default_factory=trio.Lock)
    users: int = 0


class Gates:
    """Locks by id that exist only while somebody is at them."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}
        self._is_free = trio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether somebody is inside a gate, or waits at one."""
        return bool(self._gates)

    async def until_free(self) -> None:
        """Return once nobody is at any gate."""
        while self._gates:
            self._is_free = trio.Event()
            await self._is_free.wait()

    @asynccontextmanager
    async def entered(self, workflow_id: str) -> AsyncGenerator[None]:
        """Be the only one inside this workflow's gate; first come, first served."""
        gate = self._gates.setdefault(workflow_id, _Gate())
        gate.users += 1
        try:
            async with gate.lock:
                yield
        finally:
            gate.users -= 1
            if gate.users == 0:
                del self._gates[workflow_id]
                if not self._gates:
                    self._is_free.set()
