"""S49: `supervisor.drain()`, the end of a block before it is left. In virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    WorkflowState,
    WorkflowSuspendedError,
    workflow,
)

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


@workflow(name="worker")
async def worker(ctx: Context, seconds: float) -> str:
    async def work() -> str:
        effects.append("begun")
        await trio.sleep(seconds)
        effects.append("done")
        return "worked"

    worked = await ctx.step("work", work, timeout=0)
    await ctx.step("next", note, "next")
    return worked


async def note(text: str) -> None:
    effects.append(text)


@workflow(name="waiter")
async def waiter(ctx: Context, _: None) -> Any:
    return (await ctx.queue.next("go")).body


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> None:
    await ctx.sleep("sleep", seconds)
    await ctx.step("woken", note, "woken")


WORKFLOWS = (worker, waiter, sleeper)


async def test_running_steps_finish_nothing_else_begins_and_nothing_is_live(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(*WORKFLOWS, grace=10) as supervisor:
        await supervisor.spawn(worker, "worker-1", 6)
        await supervisor.spawn(waiter, "waiter-1")
        await trio.sleep(1)
        began = trio.current_time()
        await supervisor.drain()
        assert trio.current_time() - began == pytest.approx(5, abs=0.1)
        assert effects == ["begun", "done"]
        row = await disk.store.inner.get_row("waiter-1")
        assert row is not None
        assert row.state == "sleeping", "the catalog says so, too"
        await trio.sleep(3)  # the block goes on
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 0.1, "there was nothing left to wait for"
    async with disk.process(*WORKFLOWS) as supervisor:
        assert await (await supervisor.get("worker-1")).result() == "worked"
        assert await (await supervisor.get("waiter-1")).get_state() is WorkflowState.SLEEPING
    assert effects == ["begun", "done", "next"]


@pytest.mark.parametrize(("grace", "took_s"), [(None, 4), (0, 0), (2, 2), (1000, 49)])
async def test_its_grace_is_the_supervisors_unless_given(
    disk: Disk, grace: float | None, took_s: float, autojump_clock: MockClock
) -> None:
    async with disk.process(*WORKFLOWS, grace=4) as supervisor:
        await supervisor.spawn(worker, "worker-1", 50)
        await trio.sleep(1)
        began = trio.current_time()
        await supervisor.drain(grace=grace)
        assert trio.current_time() - began == pytest.approx(took_s, abs=0.1)
    assert effects == (["begun", "done"] if grace == 1000 else ["begun"])
    async with disk.process(*WORKFLOWS) as supervisor:
        assert await (await supervisor.get("worker-1")).result() == "worked"


async def test_from_the_call_on_everything_is_refused_and_who_waits_is_told(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S51."""
    told: list[str] = []

    async def wait(handle: Any) -> None:
        with pytest.raises(WorkflowSuspendedError) as caught:
            await handle.result()
        told.append(caught.value.workflow_id)

    async with disk.process(*WORKFLOWS) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(worker, "worker-1", 6)
        for waiting in (handle, await supervisor.spawn(waiter, "waiter-1")):
            nursery.start_soon(wait, waiting)
        await trio.sleep(1)
        nursery.start_soon(supervisor.drain)
        await wait_all_tasks_blocked()
        for _ in range(2):  # while it drains, and afterwards
            for attempt in (
                supervisor.spawn(waiter, "late"),
                supervisor.get("waiter-1"),
                handle.message("go"),
                handle.wake(),
                handle.cancel(),
                handle.get_state(),
            ):
                with pytest.raises(SupervisorClosedError):
                    await attempt
            await trio.sleep(20)
        assert sorted(told) == ["waiter-1", "worker-1"]


async def test_what_becomes_due_after_it_waits_for_the_next_start(disk: Disk, autojump_clock: MockClock) -> None:
    """S24: alarms and schedules; and nothing turns round and round meanwhile."""
    steps = 0

    class Counting(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal steps
            steps += 1

    async with disk.process(*WORKFLOWS) as supervisor:
        await supervisor.spawn(sleeper, "sleeper-1", 60)
        await supervisor.schedule("often", sleeper, 0.0, every=1)
        await trio.sleep(2.5)
        await supervisor.drain()
        woken = effects.count("woken")
        trio.lowlevel.add_instrument(counting := Counting())
        await trio.sleep(3600)
        trio.lowlevel.remove_instrument(counting)
        assert effects.count("woken") == woken
        assert steps < 500
    async with disk.process(*WORKFLOWS) as supervisor:
        await (await supervisor.get("sleeper-1")).result()
    assert effects.count("woken") > woken


async def test_cancelled_it_waits_no_more_and_the_supervisor_rests_all_the_same(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(*WORKFLOWS) as supervisor:
        await supervisor.spawn(worker, "worker-1", 6)
        await trio.sleep(1)
        with trio.move_on_after(2) as scope:
            await supervisor.drain()
        assert (scope.cancelled_caught, effects) == (True, ["begun"])
        with pytest.raises(SupervisorClosedError):
            await supervisor.spawn(waiter, "late")
        await trio.sleep(10)
        assert effects == ["begun", "done"]
        await supervisor.drain()  # again, for whoever wants to know
    async with disk.process(*WORKFLOWS) as supervisor:
        assert await (await supervisor.get("worker-1")).result() == "worked"


async def test_pressed_meanwhile_it_waits_for_no_grace(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(*WORKFLOWS, grace=1000) as supervisor, trio.open_nursery() as nursery:
        await supervisor.spawn(worker, "worker-1", 500)
        await trio.sleep(1)
        began = trio.current_time()
        for grace in (None, 2000.0):
            nursery.start_soon(lambda grace=grace: supervisor.drain(grace=grace))
        await trio.sleep(3)
        supervisor.hurry()
        await wait_all_tasks_blocked()
        await supervisor.drain()
        assert trio.current_time() - began == pytest.approx(3, abs=0.1)
    assert effects == ["begun"]


async def test_spawns_that_race_with_it_are_done_or_refused(disk: Disk, autojump_clock: MockClock) -> None:
    """S45."""
    done: list[int] = []

    async def spawn(supervisor: Any, number: int) -> None:
        await trio.sleep(number / 1000)
        try:
            await supervisor.spawn(waiter, f"waiter-{number}")
        except SupervisorClosedError:
            return
        done.append(number)

    async with disk.process(*WORKFLOWS) as supervisor, trio.open_nursery() as nursery:
        disk.store.delay_s = 0.005
        for number in range(60):
            nursery.start_soon(spawn, supervisor, number)
        await trio.sleep(0.03)
        await supervisor.drain()
    assert 5 < len(done) < 60
    async with disk.process(*WORKFLOWS) as supervisor:
        for number in done:
            handle = await supervisor.get(f"waiter-{number}")
            await handle.message("go", number)
            assert await handle.result() == number


@pytest.mark.parametrize("grace", [-1, float("inf"), "10", True])
async def test_a_grace_that_is_none_is_refused_and_nothing_stops(
    disk: Disk, grace: Any, autojump_clock: MockClock
) -> None:
    async with disk.process(*WORKFLOWS) as supervisor:
        with pytest.raises(InvalidArgumentError, match=r"grace=10\.0"):
            await supervisor.drain(grace=grace)
        handle = await supervisor.spawn(worker, "worker-1", 0)
        assert await handle.result() == "worked"
