"""`ctx.call` under a supervisor: results, failures, policies, cycles, and many at once.

Deaths at every write are in `test_family_crashes.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.workflow import (
    ChildCancelledError,
    ChildFailedError,
    Context,
    StepCriticalError,
    WorkflowFailedError,
    WorkflowState,
    workflow,
)

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


async def work(name: str, seconds: float = 0.0) -> str:
    effects.append(name)
    await trio.sleep(seconds)
    return name


@workflow(name="child")
async def child(ctx: Context, input: str) -> str:
    await ctx.step("work", work, input)
    await ctx.sleep("nap", 10)
    return input.upper()


@workflow(name="parent")
async def parent(ctx: Context, input: str) -> str:
    result = await ctx.call("child", child, input)
    return await ctx.step("after", work, f"after {result}")


@workflow(name="failing")
async def failing(ctx: Context, input: int) -> None:
    await ctx.sleep("nap", input)
    raise ValueError("no good")


class TestResult:
    async def test_the_result_comes_back_and_the_child_runs_once(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            assert await handle.result() == "after A"
            assert effects == ["a", "after A"]
            (info,) = await handle.children()
            assert (info.workflow, info.path, info.outcome) == ("child", ("child",), "completed")
            assert await (await supervisor.get(info.workflow_id)).result() == "A"

    async def test_while_the_child_runs_the_parent_may_leave_memory(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            await trio.sleep(1)
            assert await handle.get_state() is WorkflowState.SLEEPING
            await handle.evict()
            assert await handle.result() == "after A"
        assert effects == ["a", "after A"]
        assert all(row.next_wake_ms is None for row in disk.rows.values())

    async def test_both_go_on_after_a_restart(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            await supervisor.spawn(parent, "p", "a")
            await trio.sleep(1)
        async with disk.process(parent, child) as supervisor:
            assert await (await supervisor.get("p")).result() == "after A"
        assert effects == ["a", "after A"]


class TestFailure:
    async def test_a_child_that_fails_fails_its_parent_under_its_own_error(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            return await ctx.call("it", failing, 5, workflow_id="f")

        async with disk.process(calls, failing) as supervisor:
            with pytest.raises(WorkflowFailedError) as caught:
                await (await supervisor.spawn(calls, "p", None)).result()
            assert (caught.value.name, caught.value.error.message) == ("ValueError", "no good")
            assert caught.value.metadata["child"] == "f"

    async def test_a_failure_may_be_caught_and_is_the_same_on_replay(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        seen: list[Any] = []

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            try:
                await ctx.call("it", failing, 5)
            except ChildFailedError as error:
                seen.append((error.workflow_id, error.step_name, error.error, str(error), error.entry_id))
            await ctx.sleep("nap", 100)
            return len(seen)

        async with disk.process(calls, failing) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(10)
            await handle.evict()
            assert await handle.result() == 2
        assert seen[0] == seen[1]
        assert issubclass(ChildFailedError, WorkflowFailedError)
        assert issubclass(ChildFailedError, StepCriticalError)

    async def test_a_cancelled_child(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            try:
                await ctx.call("it", child, "x", workflow_id="c")
            except ChildCancelledError as error:
                return error.workflow_id

        async with disk.process(calls, child) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(1)
            await (await supervisor.get("c")).cancel()
            assert await handle.result() == "c"
