"""Very many workflows that sleep: neither the start nor memory grows with them (S46)."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors.dispatch import AT_ONCE
from perdure.storage import CatalogRow
from perdure.workflow import Context, workflow


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    return (await ctx.sleep("nap", seconds)).value


async def fill(disk: Disk, count: int, wake_ms: int) -> None:
    """Put the rows of this many sleeping workflows into the catalog; they are never to be opened."""
    store = disk.next_store()
    await store.acquire()
    for first in range(0, count, 1000):
        await store.inner.put_rows(
            [
                CatalogRow(f"asleep-{number:06}", "sleeper", "sleeping", wake_ms + number, False, 1, 1)
                for number in range(first, min(first + 1000, count))
            ]
        )
    await store.aclose()


async def peak_of_start(disk: Disk) -> int:
    """Bytes that a start and an hour of an idle supervisor take at most."""
    gc.collect()
    tracemalloc.start()
    try:
        async with disk.process(sleeper):
            await trio.sleep(3600)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class TestStart:
    """S46: neither start-up time nor memory grow with who sleeps; who is due runs on time."""

    async def test_who_sleeps_is_neither_opened_nor_held_in_memory(self, disk: Disk, autojump_clock: MockClock) -> None:
        later_ms = disk.clock.now_ms() + 10**9
        await peak_of_start(disk)  # imports and caches
        await fill(disk, 100, later_ms)
        few = await peak_of_start(disk)
        await fill(disk, 20_000, later_ms)
        if disk.kind == "memory":  # the store itself is in memory, and looks through its rows
            async with disk.process(sleeper):
                await trio.sleep(3600)
        else:
            many = await peak_of_start(disk)
            assert many < few + 200_000, "bytes; a row takes some hundred"
        assert disk.store.opens == []

    async def test_the_due_ones_run_at_once_a_few_at_a_time_and_the_others_on_their_time(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(sleeper) as supervisor:
            for number in range(150):
                await supervisor.spawn(sleeper, f"due-{number}", 1000)
            for number in range(20):
                await supervisor.spawn(sleeper, f"soon-{number}", 10_000 + number)
            await trio.sleep(1)
        await fill(disk, 5000, disk.clock.now_ms() + 10**9)
        await trio.sleep(2000)
        most = 0
        async with disk.process(sleeper) as supervisor:
            dispatcher = supervisor._residents.dispatcher

            def look() -> None:
                nonlocal most
                most = max(most, dispatcher._limiter.borrowed_tokens)

            disk.store.when_opened = look
            await wait_all_tasks_blocked()
            for number in range(150):
                assert await (await supervisor.get(f"due-{number}")).result() == "completed"
            assert 1 <= most <= AT_ONCE
            assert {opened.split("-")[0] for opened in disk.store.opens} == {"due"}
            await trio.sleep(10_000)
            disk.store.opens.clear()
            for number in range(20):
                assert await (await supervisor.get(f"soon-{number}")).result() == "completed"

    async def test_an_alarm_that_falls_due_while_many_are_recovered_is_not_missed(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        results: dict[str, Any] = {}
        async with disk.process(sleeper) as supervisor:
            for number in range(100):
                await supervisor.spawn(sleeper, f"due-{number}", 1000)
            for number in range(30):
                await supervisor.spawn(sleeper, f"near-{number}", 2000 + number / 10)
            await trio.sleep(1)
        await trio.sleep(1998.5)
        async with disk.process(sleeper, idle_timeout=0) as supervisor:
            disk.store.delay_s = 0.02
            for name, count in (("due", 100), ("near", 30)):
                for number in range(count):
                    results[f"{name}-{number}"] = await (await supervisor.get(f"{name}-{number}")).result()
        assert set(results.values()) == {"completed"}
        assert len(results) == 130
