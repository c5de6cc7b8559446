"""Scenarios of part A, on replay and history, with the process dying at every recorded transition; see support/restarts.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Namespace
from restarts import Stage, play
from trio.testing import MockClock
from worlds import World

from perdure.workflow import Break, Context, Continue, RunMode

MakeNamespace = Callable[[], Namespace]


async def finish(stage: Stage) -> None:
    """The script of a play in which nobody does anything: run to the end, with a restart at the first wait."""
    await stage.run()
    await stage.restart()
    await stage.finish()


class TestS1:
    """S1: finished, then a sleep and a restart: resumes, no divergence."""

    @pytest.mark.parametrize("around", ["loop", "try block", "branch"])
    async def test_what_is_finished_is_passed_over_as_a_unit_wherever_it_is(
        self, around: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S1: a finished join, race, loop and try block, inside a loop, a block or a branch, followed by a sleep."""

        async def finished(world: World, ctx: Context) -> list[Any]:
            async def step(ctx: Context) -> Any:
                return await world.step(ctx, "s", "done", ephemeral=True)

            async def body(ctx: Context, _: None) -> Break[Any]:
                return Break(await step(ctx))

            joined = await ctx.join("join", {"a": step, "b": step})
            raced = await ctx.race("race", {"a": step})
            looped = await ctx.loop("loop", body)
            tried = await ctx.try_block("block", step)
            slept = await ctx.sleep("sleep", 10)
            return [dict(joined), raced.winner, raced.value, looped, tried.value, slept.value]

        async def workflow(world: World, ctx: Context) -> Any:
            async def branch(ctx: Context) -> Any:
                return await finished(world, ctx)

            async def body(ctx: Context, rounds: int) -> Continue[int] | Break[Any]:
                value = await branch(ctx)
                return Continue(1) if rounds == 0 else Break(value)

            if around == "loop":
                return await ctx.loop("around", body, 0)
            if around == "try block":
                return (await ctx.try_block("around", branch)).value
            return (await ctx.join("around", {"branch": branch}))["branch"]

        explored = await play(make_quick_namespace, mode, workflow, finish)
        assert explored.counted >= 5
