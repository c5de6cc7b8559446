"""Telling the workflow that ends the process from its neighbours.

1. The engine counts activations that began a step and recorded nothing, durably; at `CRASH_LOOP_LIMIT` the workflow fails.
   When the process dies, the count has gone up for everybody who was in a first step, not only for who killed it.
2. So a workflow that has counted `SUSPECT_FROM` of them is a suspect. Suspects run one at a time, each until it has
   durably recorded something, waits or ends; a further death counts against one of them only.
3. Whoever is not a suspect never waits here. A suspect whose step waits for another workflow leaves its place, as that may be
   one, too; what it goes on to do then is not told from what others do.

Rejected: running suspects in processes of their own, which would need a second owner of the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import trio

from perdure.actors.actor import Actor
from perdure.workflow.activation import CRASH_LOOP_LIMIT

__all__ = ["SUSPECT_FROM", "Suspects"]

SUSPECT_FROM: Final = 3
"""How many activations without a record make a suspect; well below the limit, so that the culprit is found by then."""


class Suspects:
    """The one place at which suspects may run."""

    def __init__(self) -> None:
        self._place = trio.Semaphore(1, max_value=1)

    @asynccontextmanager
    async def turn(self, actor: Actor) -> AsyncGenerator[None]:
        """Wait for the actor's turn, if it is a suspect; whoever is evicted, drained or cancelled waits no longer."""
        is_held = False

        def leave() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._place.release()

        if SUSPECT_FROM <= actor.activation.history.idle_activations < CRASH_LOOP_LIMIT:
            with actor.waiting_scope:
                await self._place.acquire()
                is_held = True
            actor.driver.when_sound = leave
        try:
            yield
        finally:
            leave()
