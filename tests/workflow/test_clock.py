"""Clocks: the wall clock is looked at again and again, since it can be set and machines can be suspended."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import trio
from harness import Namespace
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from perdure.workflow import Clock, Context, RunMode, SystemClock, TrioClock, run_workflow, start_workflow
from perdure.workflow.clock import POLL_S

EPOCH_S = 1_700_000_000.0
HOUR_S = 3600.0


class Wall:
    """A wall clock beside Trio's monotonic one: it can be set, and it goes on while the machine is suspended."""

    def __init__(self) -> None:
        self.offset_s = EPOCH_S

    def __call__(self) -> float:
        return self.offset_s + trio.current_time()


async def elapsed(fn: Callable[[], Awaitable[object]]) -> float:
    """How long something takes, in seconds of Trio's clock."""
    begun_s = trio.current_time()
    await fn()
    return trio.current_time() - begun_s


# SystemClock.


async def test_the_system_clock_tells_the_machines_time() -> None:
    """S24: in whole milliseconds, never ahead of it."""
    before_ms = time.time() * 1000
    now_ms = SystemClock().now_ms()
    assert before_ms - 1 <= now_ms <= time.time() * 1000


async def test_the_system_clock_waits_exactly_when_nothing_disturbs_it(autojump_clock: MockClock) -> None:
    """S24: also over many looks at the clock, and not a millisecond early."""
    clock = SystemClock(Wall())
    for seconds in (0.001, 0.5, POLL_S, 3 * POLL_S + 0.25, 1000.0):
        deadline_ms = clock.now_ms() + round(seconds * 1000)
        took_s = await elapsed(lambda deadline_ms=deadline_ms: clock.wait_until_ms(deadline_ms))  # type: ignore[misc]
        assert clock.now_ms() >= deadline_ms
        assert took_s == pytest.approx(seconds, abs=0.002)


async def test_a_deadline_that_has_passed_is_no_wait_but_a_checkpoint(autojump_clock: MockClock) -> None:
    """S24: so that a loop of them neither starves others nor escapes cancellation."""
    clocks: list[Clock] = [SystemClock(Wall()), TrioClock()]
    for clock in clocks:
        for deadline_ms in (0, clock.now_ms() - 1, clock.now_ms()):
            with assert_checkpoints():
                assert await elapsed(lambda d=deadline_ms, c=clock: c.wait_until_ms(d)) == 0  # type: ignore[misc]
        with trio.CancelScope() as scope:
            scope.cancel()
            await clock.wait_until_ms(0)
        assert scope.cancelled_caught


async def test_a_wall_clock_that_leaps_forward_is_noticed_within_the_poll(autojump_clock: MockClock) -> None:
    """S24: set forward, or the machine slept (then Trio's clock stood still): the wait ends POLL_S later at the latest."""
    wall = Wall()
    clock = SystemClock(wall)
    deadline_ms = clock.now_ms() + round(HOUR_S * 1000)
    async with trio.open_nursery() as nursery:
        woken_s: list[float] = []

        async def wait() -> None:
            await clock.wait_until_ms(deadline_ms)
            woken_s.append(trio.current_time())

        nursery.start_soon(wait)
        await trio.sleep(POLL_S / 2)
        leapt_s = trio.current_time()
        wall.offset_s += 2 * HOUR_S
    assert 0 < woken_s[0] - leapt_s <= POLL_S


async def test_a_wall_clock_that_is_set_back_makes_the_wait_longer(autojump_clock: MockClock) -> None:
    """S24: the deadline is a moment of the wall clock."""
    wall = Wall()
    clock = SystemClock(wall)
    begun_s = trio.current_time()
    deadline_ms = clock.now_ms() + 60_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clock.wait_until_ms, deadline_ms)
        await trio.sleep(30)
        wall.offset_s -= HOUR_S
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
    assert trio.current_time() - begun_s == pytest.approx(60 + HOUR_S, abs=0.002)


async def test_a_wait_for_centuries_can_be_cancelled(autojump_clock: MockClock) -> None:
    """S24: the largest deadline that can be stored is no special case."""
    clocks: list[Clock] = [SystemClock(Wall()), TrioClock()]
    for clock in clocks:
        with trio.move_on_after(5 * POLL_S) as scope:
            await clock.wait_until_ms(2**64 - 1)
        assert scope.cancelled_caught


@pytest.mark.parametrize("how", ["set back", "set forward", "suspended"])
async def test_a_workflow_on_the_system_clock_follows_the_wall_clock(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S24: the whole engine in both modes, on the clock that production uses, with only its source of time replaced."""
    wall = Wall()
    clock = SystemClock(wall)

    async def workflow(ctx: Context, _: None) -> str:
        return (await ctx.sleep("nap", HOUR_S)).value

    async def run() -> object:
        if mode == "live":
            async with trio.open_nursery() as nursery:
                handle = await start_workflow(nursery, "workflow-1", workflow, None, driver, clock=clock)
                return await handle.result()
        result = await run_workflow("workflow-1", workflow, None, driver, clock=clock)
        while result.sleep_until is not None:
            await clock.wait_until_ms(round(result.sleep_until * 1000))
            result = await run_workflow("workflow-1", workflow, None, driver, clock=clock)
        return result.output

    outputs: list[object] = []

    async def note_output() -> None:
        outputs.append(await run())

    driver = await namespace.driver()
    begun_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note_output)
        await trio.sleep(60)
        wall.offset_s += {"set back": -HOUR_S, "set forward": HOUR_S, "suspended": 7 * 86_400}[how]
    took_s = trio.current_time() - begun_s
    assert outputs == ["completed"]
    if how == "set back":
        assert took_s == pytest.approx(2 * HOUR_S, abs=0.002)
    else:
        assert 60 <= took_s <= 60 + POLL_S


# TrioClock.


async def test_the_trio_clock_runs_on_trios_time(autojump_clock: MockClock) -> None:
    """S24: so that years pass at once under a MockClock."""
    clock = TrioClock(epoch_ms=5000)
    assert clock.now_ms() == 5000 + round(trio.current_time() * 1000)
    await trio.sleep(86_400 * 365)
    assert clock.now_ms() == 5000 + round(trio.current_time() * 1000)


async def test_the_trio_clock_reaches_its_deadlines_from_any_fraction_of_a_millisecond(
    autojump_clock: MockClock,
) -> None:
    """S24: whatever the rounding, a wait ends, at its deadline, and not a whole millisecond late."""
    clock = TrioClock()
    for fraction in range(40):
        await trio.sleep(fraction / 40_000)
        deadline_ms = clock.now_ms() + 3
        took_s = await elapsed(lambda deadline_ms=deadline_ms: clock.wait_until_ms(deadline_ms))  # type: ignore[misc]
        assert clock.now_ms() >= deadline_ms
        assert 0.0024 <= took_s <= 0.0046
