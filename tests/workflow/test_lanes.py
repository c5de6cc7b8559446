"""Lanes: each branch has its own context, and what is over keeps nobody waiting and is counted for what it is."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import (
    Context,
    MisuseError,
    RunMode,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    run_workflow,
)


async def work() -> str:
    return "done"


async def test_a_branch_cannot_use_the_context_of_another(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: between the other's operations too, when nothing of it is in progress; nothing is recorded there."""
    contexts: dict[str, Context] = {}

    async def lends(ctx: Context) -> None:
        contexts["lent"] = ctx
        await trio.sleep(10)

    async def borrows(ctx: Context, *, own: bool) -> str:
        await trio.sleep(1)
        return await (ctx if own else contexts["lent"]).step("borrowed", work)

    async def wrong(ctx: Context, _: object) -> Any:
        return (await ctx.join("join", {"lends": lends, "borrows": partial(borrows, own=False)}))["borrows"]

    async def right(ctx: Context, _: object) -> Any:
        return (await ctx.join("join", {"lends": lends, "borrows": partial(borrows, own=True)}))["borrows"]

    async with host(namespace, mode) as process:
        with pytest.raises(MisuseError, match="the context that the branch was given"):
            await process.finish(wrong)
    assert ("join", "lends", "borrowed") not in await namespace.entries()
    async with host(namespace, mode) as process:
        assert await process.finish(right) == "done"


async def test_tasks_of_a_branch_are_of_its_lane(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: a nursery of the user's inside a branch, a try block and a loop go on using the branch's contexts."""

    async def branch(ctx: Context) -> list[str]:
        done: list[str] = []

        async def task() -> None:
            done.append(await ctx.step("in a task", work))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)

        async def block(ctx: Context) -> str:
            return await ctx.step("in a block", work)

        await ctx.try_block("block", block)
        return done

    async def workflow(ctx: Context, _: object) -> Any:
        return dict(await ctx.join("join", {"a": branch, "b": branch}))

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == {"a": ["done"], "b": ["done"]}


async def test_a_loser_that_eats_the_signal_does_not_keep_others_from_running(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: it asks again and again in a sealed context; other tasks have their turns, and the winner is durable."""
    turns = 0
    has_begun = trio.Event()
    states: list[WorkflowState] = []

    async def stubborn(ctx: Context) -> None:
        nonlocal turns
        while turns < 50:
            try:
                await ctx.sleep(f"nap {turns}", 1000)
            except BaseException:
                turns += 1
                has_begun.set()

    async def fast(ctx: Context) -> str:
        return await ctx.step("work", work)

    async def workflow(ctx: Context, _: object) -> Any:
        return (await ctx.race("race", {"stubborn": stubborn, "fast": fast})).winner

    async def bystander() -> None:
        await has_begun.wait()
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        states.append((await load_snapshot(await namespace.driver())).state)

    async with host(namespace, mode) as process, trio.open_nursery() as nursery:
        nursery.start_soon(bystander)
        assert await process.finish(workflow) == "fast"
    assert turns == 50
    assert states == [WorkflowState.RUNNING]  # it had its turns while the loser was still at it


@pytest.mark.parametrize("place", ["step", "branch", "workflow"])
async def test_code_that_ends_the_process_each_time_ends_as_a_crash_loop(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, place: str
) -> None:
    """S18: by `SystemExit` in a step, a branch or the workflow itself, as by a kill."""
    exits = 0

    async def leave() -> NoReturn:
        nonlocal exits
        exits += 1
        raise SystemExit(3)

    async def branch(ctx: Context) -> None:
        await leave()

    async def workflow(ctx: Context, _: object) -> None:
        match place:
            case "step":
                await ctx.step("exit", leave)
            case "branch":
                await ctx.join("join", {"exit": branch})
            case _:
                await leave()

    for _ in range(10):
        with pytest.raises(SystemExit):
            await run_workflow("w", workflow, None, await namespace.driver(), mode=mode)
        await namespace.restart()
    with pytest.raises(WorkflowFailedError) as failed:
        await run_workflow("w", workflow, None, await namespace.driver(), mode=mode)
    assert failed.value.name == "CrashLoopError"
    assert exits == 10


async def test_a_users_interrupt_is_no_crash(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S18, S49: Ctrl-C in a step, as often as it comes."""
    interrupts = 0

    async def interrupted() -> int:
        nonlocal interrupts
        interrupts += 1
        if interrupts <= 12:
            raise KeyboardInterrupt
        return interrupts

    async def workflow(ctx: Context, _: object) -> int:
        return await ctx.step("step", interrupted)

    for _ in range(12):
        with pytest.raises(KeyboardInterrupt):
            await run_workflow("w", workflow, None, await namespace.driver(), mode=mode)
        await namespace.restart()
    assert (await run_workflow("w", workflow, None, await namespace.driver(), mode=mode)).output == 13
