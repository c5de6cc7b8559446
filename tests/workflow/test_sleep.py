"""`ctx.sleep` and `ctx.sleep_until`: deadlines that outlive the process, and clocks that are set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Literal

import pytest
import trio
from harness import Namespace, SimulatedCrashError, host
from trio.testing import MockClock

from perdure.storage import Batch, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    RunMode,
    SleepOutcome,
    WorkflowState,
)

HOUR_S = 3600.0
YEAR_S = 365 * 86_400.0


async def alarm(namespace: Namespace) -> int | None:
    return await (await namespace.driver()).get_alarm("workflow-1")


def entry_values(batch: Batch) -> list[bytes]:
    return [value for key, value in batch.puts if key.startswith(layout.HISTORY_PREFIX)]


async def napper(ctx: Context, seconds: float) -> str:
    return (await ctx.sleep("nap", seconds)).value


# Deadlines.


async def test_a_deadline_in_the_past_returns_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: no wait, no alarm, one write for each, recorded as completed."""
    outcomes: list[SleepOutcome] = []

    async def workflow(ctx: Context, _: None) -> None:
        outcomes.append(await ctx.sleep("zero", 0))
        outcomes.append(await ctx.sleep_until("long ago", 1.0))
        outcomes.append(await ctx.sleep_until("yesterday", datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=9)))))

    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.COMPLETED
        assert trio.current_time() == begun_s
        assert outcomes == [SleepOutcome.COMPLETED] * 3
        batches = (await namespace.driver()).batches
        assert all(batch.alarm is None or batch.alarm.wake_at_ms is None for batch in batches)
        assert (await namespace.entries())[("long ago",)].data == {"deadline_ms": 1000, "state": "completed"}
        yesterday_ms = int(datetime(2019, 12, 31, 15, tzinfo=UTC).timestamp()) * 1000
        assert (await namespace.entries())[("yesterday",)].data == {"deadline_ms": yesterday_ms, "state": "completed"}
        assert sum(len(entry_values(batch)) for batch in batches) == 3


async def test_a_year_passes_in_virtual_time(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S24: to the millisecond, with the alarm armed for the deadline meanwhile and none afterwards."""
    async with host(namespace, mode) as process:
        begun_s, begun_ms = trio.current_time(), process.clock.now_ms()
        stopped = await process.stop(napper, YEAR_S)
        deadline_ms = begun_ms + round(YEAR_S * 1000)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until == deadline_ms / 1000
        assert stopped.waiting_for_messages is None
        assert await alarm(namespace) == deadline_ms
        assert (await namespace.entries())[("nap",)].data == {"deadline_ms": deadline_ms, "state": "pending"}
        with trio.fail_after(1.5 * YEAR_S):  # one that begins anew with each run never ends
            assert await process.finish(napper, YEAR_S) == "completed"
        assert trio.current_time() - begun_s == pytest.approx(YEAR_S, abs=0.002)
        assert await alarm(namespace) is None
        assert (await namespace.entries())[("nap",)].data == {"deadline_ms": deadline_ms, "state": "completed"}


async def test_a_duration_is_rounded_up_to_a_millisecond(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: nobody wakes too early; a moment given as a datetime counts to the microsecond."""
    begun_ms = 0

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.sleep("short", 0.0001)
        await ctx.sleep_until("moment", datetime(2030, 1, 1, 0, 0, 0, 1, tzinfo=UTC))

    async with host(namespace, mode) as process:
        begun_ms = process.clock.now_ms()
        await process.finish(workflow)
    assert (await namespace.entries())[("short",)].data["deadline_ms"] == begun_ms + 1
    new_year_ms = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp()) * 1000
    assert (await namespace.entries())[("moment",)].data["deadline_ms"] == new_year_ms + 1


async def test_a_restart_before_the_deadline_keeps_the_deadline(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the first run's, also when the code names another duration meanwhile."""
    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        stopped = await process.stop(napper, 1000)
        for _ in range(5):
            await process.restart()
            await process.advance(100)
            again = await process.stop(other_nap)
            assert again.sleep_until == stopped.sleep_until
        assert await process.finish(other_nap) == "completed"
        assert trio.current_time() - begun_s == pytest.approx(1000, abs=0.002)


async def other_nap(ctx: Context, _: object) -> str:
    return (await ctx.sleep("nap", 5 * YEAR_S)).value


async def test_a_restart_after_the_deadline_goes_on_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the sleep completed while no process was there."""
    async with host(namespace, mode) as process:
        await process.stop(napper, 100)
        await process.restart()
        if mode == "live":
            process.handle = None
        await trio.sleep(HOUR_S)
        back_s = trio.current_time()
        assert (await process.stop(napper, 100)).output == "completed"
        assert trio.current_time() == back_s


async def test_sleeps_of_one_workflow_follow_one_another(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: in loops too; each has its own deadline, counted from when it was reached."""
    at_s: list[float] = []

    async def body(ctx: Context, turn: int) -> Continue[int] | Break[int]:
        await ctx.sleep("nap", 10)
        await ctx.step("note", note)
        return Continue(turn + 1) if turn < 4 else Break(turn)

    async def note() -> None:
        at_s.append(trio.current_time())

    async def workflow(ctx: Context, _: None) -> int:
        await ctx.sleep("first", 5)
        return await ctx.loop("turns", body, 0)

    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        for _ in range(3):
            stopped = await process.stop(workflow)
            assert stopped.sleep_until is not None
            await process.advance(stopped.sleep_until - process.clock.now_ms() / 1000)
            await process.restart()
        assert await process.finish(workflow) == 4
    assert [round(at - begun_s) for at in at_s] == [15, 25, 35, 45, 55]


# Clocks that do not only tick.


async def test_a_clock_that_is_set_back_an_hour_makes_the_sleep_an_hour_longer(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the deadline is a moment of the wall clock, and it is not that moment yet."""
    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        stopped = await process.stop(napper, 600)
        await process.advance(300)
        process.clock.move(-HOUR_S)
        await process.advance(600)
        still = await process.stop(napper, 600)
        assert still.state is WorkflowState.SLEEPING
        assert still.sleep_until == stopped.sleep_until
        assert await process.finish(napper, 600) == "completed"
        assert trio.current_time() - begun_s == pytest.approx(600 + HOUR_S, abs=0.002)


@pytest.mark.parametrize("how", ["set forward", "suspended"])
async def test_a_clock_that_leaps_past_the_deadline_ends_the_sleep_at_once(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S24: set forward an hour, or the machine was suspended for a week; the time left does not matter any more."""
    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        await process.stop(napper, 600)
        await process.advance(300)
        process.clock.move(HOUR_S if how == "set forward" else 7 * 86_400)
        assert (await process.stop(napper, 600)).output == "completed"
        assert trio.current_time() - begun_s == pytest.approx(300, abs=0.002)


async def test_a_clock_that_is_set_forward_before_the_deadline_makes_the_sleep_shorter(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: an hour forward in a sleep of two leaves one."""
    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        await process.stop(napper, 2 * HOUR_S)
        process.clock.move(HOUR_S)
        await process.advance(HOUR_S - 10)
        assert (await process.stop(napper, 2 * HOUR_S)).state is WorkflowState.SLEEPING
        assert await process.finish(napper, 2 * HOUR_S) == "completed"
        assert trio.current_time() - begun_s == pytest.approx(HOUR_S, abs=0.002)


async def test_a_death_while_the_end_of_a_sleep_is_written_ends_it_again(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: before or after that write, the sleep completes once, and what follows runs."""
    calls: list[str] = []

    async def following() -> None:
        calls.append("following")

    async def workflow(ctx: Context, _: None) -> str:
        outcome = await ctx.sleep("nap", 10)
        await ctx.step("following", following)
        return outcome.value

    async def die_at_end_of_sleep(fresh: Namespace, when: Literal["before", "after"]) -> None:
        async with host(fresh, mode) as process:
            await process.stop(workflow)
            driver = await fresh.driver()
            driver.die_at = (driver.writes, when)
            await process.finish(workflow)

    whens: list[Literal["before", "after"]] = ["before", "after"]
    for when in whens:
        calls.clear()
        fresh = Namespace(namespace.kind, namespace.path.parent)
        with pytest.raises(SimulatedCrashError):
            await die_at_end_of_sleep(fresh, when)
        assert calls == []
        state = (await fresh.entries())[("nap",)].data["state"]
        assert state == ("pending" if when == "before" else "completed")
        async with host(fresh, mode) as process:
            assert await process.finish(workflow) == "completed"
        assert calls == ["following"]
        await fresh.close()
