"""`to_asyncio`: how a step uses a library that runs under asyncio only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import trio

from perdure.workflow.asyncio_thread import AsyncioThread, asyncio_home
from perdure.workflow.checks import check_function
from perdure.workflow.errors import MisuseError
from perdure.workflow.threads import holding_clock

__all__ = ["to_asyncio"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def to_asyncio(fn: Callable[[Unpack[Ts]], Awaitable[T]], *args: Unpack[Ts]) -> T:
    """Await `fn(*args)` in an asyncio loop, which runs in a thread of its own. For the function of a step.

        async def fetch(url: str) -> str:
            return await to_asyncio(client.fetch, url)

        page = await ctx.step("fetch", fetch, url)

    The workflows of a supervisor share one loop, which is started when it is first needed and closed with the supervisor, so
    that a client made in it can be kept for all steps. Without a supervisor the loop is made for the call.

    Cancelled (by the step's timeout, an eviction, the loss of a race), the function is cancelled in its loop and waited for
    until it has unwound. `current_step()` works inside, as do other context variables.

    Args:
        fn: A coroutine function of asyncio.
        args: Its arguments; use `functools.partial` for keywords.

    Returns:
        What it returned. It is an object of the other loop still: connections and the like are to be used there only.

    Raises:
        concurrent.futures.CancelledError: The function was cancelled by code in its own loop.
        MisuseError: No Trio task calls this.
    """
    check_function(fn, "the function of to_asyncio", "await to_asyncio(fn, argument)")
    if not trio.lowlevel.in_trio_task():
        raise MisuseError(
            "to_asyncio is for Trio tasks, such as the function of a step; where asyncio runs, await fn(...)"
        )
    home = asyncio_home.get(None)
    with holding_clock():
        if home is not None:
            answer: T = await home.run(fn, args)
            return answer
        thread = AsyncioThread()
        try:
            answer = await thread.run(fn, args)
            return answer
        finally:
            await thread.aclose()
