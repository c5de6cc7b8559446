"""The deadlines of workflows that were evicted from their work."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing
from disks import Disk
from harness import MovableClock
from trio.testing import MockClock

from perdure.actors.deadlines import STALE_MAX, Deadlines
from perdure.workflow import Context, WorkflowState, workflow


async def forever() -> None:
    await trio.sleep_forever()


@workflow(name="busy")
async def busy(ctx: Context, input: Any) -> None:
    await ctx.step("work", forever, timeout=0)


class TestMemory:
    def test_a_workflow_counts_once_however_often_it_is_evicted(self) -> None:
        deadlines = Deadlines(MovableClock(), lambda _: None)
        for _ in range(10_000):
            deadlines.note("a", 5)
        assert len(deadlines) == 1

    def test_what_is_forgotten_or_has_moved_takes_no_memory_for_ever(self) -> None:
        deadlines = Deadlines(MovableClock(), lambda _: None)
        for number in range(10_000):
            deadlines.note("moves", number)
            deadlines.note(f"ends-{number}", 5)
            deadlines.forget(f"ends-{number}")
        assert len(deadlines) <= STALE_MAX + 4

    async def test_one_that_is_evicted_again_and_again_is_noted_once_and_not_after_its_end(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(busy) as supervisor:
            residents = supervisor._residents  # pyright: ignore[reportPrivateUsage]
            handle = await supervisor.spawn(busy, "a", deadline=1e8)
            for _ in range(20):
                await trio.sleep(0.5)
                await handle.evict()
                await residents.ensure_running("a")
            assert len(residents.deadlines) == 1
            await handle.cancel()
            await trio.sleep(1)
            assert residents.deadlines._noted == {}  # pyright: ignore[reportPrivateUsage]


class TestTime:
    async def test_each_is_wanted_once_at_its_time_as_it_was_noted_last(self, autojump_clock: MockClock) -> None:
        clock = MovableClock()
        began_ms = clock.now_ms()
        wanted: list[tuple[str, int]] = []
        deadlines = Deadlines(clock, lambda name: wanted.append((name, clock.now_ms() - began_ms)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deadlines.run)
            for name, moments in {"a": [5000], "earlier": [9000, 2000], "later": [3000, 8000], "gone": [4000]}.items():
                for moment in moments:
                    deadlines.note(name, began_ms + moment)
                    await trio.testing.wait_all_tasks_blocked()
            deadlines.forget("gone")
            await trio.sleep(20)
            assert wanted == [("earlier", 2000), ("a", 5000), ("later", 8000)]
            wanted.clear()
            deadlines.note("a", clock.now_ms() + 1000)
            await trio.sleep(20)
            assert wanted == [("a", 21_000)]
            nursery.cancel_scope.cancel()

    async def test_all_are_forgotten_while_it_waits(self, autojump_clock: MockClock) -> None:
        clock = MovableClock()
        wanted: list[str] = []
        deadlines = Deadlines(clock, wanted.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deadlines.run)
            names = [f"gone-{number}" for number in range(2 * STALE_MAX)]
            for name in names:
                deadlines.note(name, clock.now_ms() + 1000)
            for name in names:  # before it was looked at
                deadlines.forget(name)
            await trio.sleep(5)
            deadlines.note("a", clock.now_ms() + 1000)
            await trio.sleep(5)
            assert wanted == ["a"]
            nursery.cancel_scope.cancel()

    async def test_one_that_was_evicted_from_its_work_fails_at_its_deadline(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(busy) as supervisor:
            handle = await supervisor.spawn(busy, "a", deadline=100)
            await trio.sleep(1)
            await handle.evict()
            await trio.sleep(98)
            assert disk.rows["a"].state == "running"
            await trio.sleep(3)
            assert await handle.get_state() is WorkflowState.FAILED


async def test_a_deleted_workflow_that_is_wanted_is_not_said_to_be_half_made(
    disk: Disk, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with disk.process(busy) as supervisor:
        handle = await supervisor.spawn(busy, "a")
        await handle.cancel()
        await trio.sleep(1)
        await supervisor.delete("a")
        with caplog.at_level(logging.INFO, "perdure.actors"):
            supervisor._residents.want("a")  # pyright: ignore[reportPrivateUsage]
            await trio.sleep(1)
    (record,) = [record for record in caplog.records if "'a'" in record.getMessage()]
    assert "is not run: it was deleted, or never completely created" in record.getMessage()
