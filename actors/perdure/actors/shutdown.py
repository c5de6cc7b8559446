"""The end of a supervisor's block: in order, in time, and sooner for whoever is pressed.

1. Intake stops first. Steps that run may finish within their grace, and nothing else begins; then the rest is evicted. What
   waits is let go of at once.
2. Pressed again (a second signal, a second Ctrl-C), only the grace ends. Nothing that was acknowledged can be lost by that: it
   was durable before.
3. Ctrl-C lands wherever the main task is, so also in here. It never leaves the end half done, nor comes out in a group.
4. Draining is the same while the block goes on.

Rejected: to let cancellation cut the end short. A cancelled block is how most programs end; the grace is for those, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from perdure.actors.residents import Residents
from perdure.workflow.hooks import Hooks

__all__ = ["Shutdown", "outlast"]


class Shutdown:
    """Why and how the block of a supervisor ends.

    Args:
        residents: What is to come to rest.
        hooks: They are told of that, and may go on for what is left of the grace.
        grace: Seconds for running steps.

    Attributes:
        block: Around the block; cancelled to end it.
        interruption: What is to come out of the block, if something ended it from outside.
    """

    def __init__(self, residents: Residents, hooks: Hooks | None, grace: float) -> None:
        self.block: trio.CancelScope = trio.CancelScope()
        self.interruption: BaseException | None = None
        self._residents = residents
        self._hooks = hooks
        self._grace = grace
        self._is_hurried = False
        self._patience: set[trio.CancelScope] = set()

    def interrupt(self, error: BaseException) -> None:
        """End the block, with this coming out of it; the first one counts."""
        self.interruption = self.interruption or error
        self._residents.stop_intake()  # else the workflow whose code ends the program would be begun once more before it does
        self.block.cancel()

    def hurry(self) -> None:
        """Give running steps no more grace, from now on or from when the block is left."""
        self._is_hurried = True
        for scope in self._patience:
            scope.deadline = trio.current_time()

    async def drain(self, grace: float | None = None) -> None:
        """Take nothing more, let running steps finish, evict what runs after `grace` seconds; return once nothing is live."""
        await trio.lowlevel.checkpoint()
        await self._rest(self._deadline(grace))

    async def leave(self) -> KeyboardInterrupt | None:
        """Come to rest, whatever is cancelled; returns the Ctrl-C that hurried it, if one did."""
        return await outlast(self._leave, self.hurry)

    async def _leave(self) -> None:
        deadline = self._deadline(None)
        await self._rest(deadline)
        if self._hooks is not None:
            await self._until(deadline, self._hooks.until_idle)

    def _deadline(self, grace: float | None) -> float:
        return trio.current_time() + (self._grace if grace is None else grace)

    async def _rest(self, deadline: float) -> None:
        self._residents.stop_intake()
        for actor in list(self._residents.live.values()):
            actor.drain()
        await self._until(deadline, self._residents.until_empty)
        for actor in list(self._residents.live.values()):
            actor.evict()
        await self._residents.until_empty()

    async def _until(self, deadline: float, wait: Callable[[], Awaitable[None]]) -> None:
        with trio.CancelScope(deadline=trio.current_time() if self._is_hurried else deadline) as scope:
            self._patience.add(scope)
            try:
                await wait()
            finally:
                self._patience.discard(scope)


async def outlast(
    wait: Callable[[], Awaitable[None]], on_pressed: Callable[[], None] | None = None
) -> KeyboardInterrupt | None:
    """Wait for something that is not to be left half done: cancellation does not end it, and after Ctrl-C it is begun again.

    Args:
        wait: It; another call of it goes on where one that was interrupted was.
        on_pressed: Called for each Ctrl-C.

    Returns:
        The first Ctrl-C, if there was one.
    """
    pressed: KeyboardInterrupt | None = None
    while True:
        try:
            with trio.CancelScope(shield=True):
                await wait()
        except KeyboardInterrupt as error:
            pressed = pressed or error
            if on_pressed is not None:
                on_pressed()
        else:
            return pressed
