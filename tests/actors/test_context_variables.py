"""A workflow runs in the context of its supervisor, on the first run as on every later one, whoever brings it in."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.workflow import Context, MisuseError, WorkflowState, current_step, workflow

region: ContextVar[str] = ContextVar("region", default="none")
request: ContextVar[str] = ContextVar("request", default="none")


@workflow(name="looker")
async def looker(ctx: Context, _: None) -> list[str]:
    seen = [await ctx.step("first", look)]
    await ctx.queue.next("go")
    return [*seen, await ctx.step("second", look)]


async def look() -> str:
    return f"{region.get()}, {request.get()}"


async def test_what_was_set_before_the_supervisor_is_seen_and_what_callers_set_is_not(
    disk: Disk, autojump_clock: MockClock
) -> None:
    for before, after in (("north", "south"), ("north", "north")):
        region.set(before)
        async with disk.process(looker) as supervisor:
            request.set("of the one who spawns")
            handle = await supervisor.spawn(looker, f"looker-{after}")
            await trio.sleep(1)
            assert await handle.get_state() is WorkflowState.SLEEPING
        region.set(after)
        request.set("none")
        async with disk.process(looker) as supervisor:
            request.set("of the one who sends")
            handle = await supervisor.get(f"looker-{after}")
            await handle.message("go")
            assert await handle.result() == [f"{before}, none", f"{after}, none"]
        request.set("none")


async def test_who_is_spawned_in_a_step_is_not_in_that_step(disk: Disk, autojump_clock: MockClock) -> None:
    opened: list[Supervisor] = []

    @workflow(name="child")
    async def child(ctx: Context, _: None) -> str:
        with pytest.raises(MisuseError, match="outside of a step"):
            current_step()
        return await ctx.step("name", name)

    async def name() -> str:
        return current_step().name

    @workflow(name="parent")
    async def parent(ctx: Context, _: None) -> Any:
        async def delegate() -> str:
            result: str = await (await opened[0].spawn(child, "child-1")).result()
            return f"{result} in {current_step().name}"

        return await ctx.step("delegate", delegate)

    async with disk.process(parent, child) as supervisor:
        opened.append(supervisor)
        assert await (await supervisor.spawn(parent, "parent-1")).result() == "name in delegate"
