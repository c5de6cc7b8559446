"""What follows a race: the losers are over, whatever they were doing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import Context, RunMode, WorkflowState

Branch = Callable[[Context], Awaitable[object]]


async def waiting(ctx: Context) -> None:
    await ctx.sleep("wait", 3600)


async def reading(ctx: Context) -> None:
    await ctx.queue.next("never", names=["never"])


async def working(ctx: Context) -> None:
    await ctx.step("work", trio.sleep_forever, timeout=0)


async def joining(ctx: Context) -> None:
    await ctx.join("both", {"waiting": waiting, "working": working})


@pytest.mark.parametrize("loser", [waiting, reading, working, joining])
async def test_a_wait_after_a_race_is_seen_whatever_its_losers_did(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, loser: Branch
) -> None:
    """S29: the workflow sleeps, with its alarm armed, and in yield mode the run returns."""

    async def quick(ctx: Context) -> str:
        return (await ctx.queue.next("go", names=["go"])).name

    async def workflow(ctx: Context, _: object) -> str:
        result = await ctx.race("first", {"loser": loser, "quick": quick})
        await ctx.sleep("pause", 10)
        return result.winner

    async with host(namespace, mode) as process:
        await process.send("go")
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until is not None
        driver = await namespace.driver()
        assert await driver.get_alarm(process.workflow_id) == round(stopped.sleep_until * 1000)
        assert (await namespace.entries())["pause",].data["state"] == "pending"
        assert await process.finish(workflow) == "quick"
