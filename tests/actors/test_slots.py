"""How many workflows are live at once, and that all finish all the same (S47)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors.slots import LENT_LEAST, MAX_LIVE_DEFAULT, Slots, default_max_live, lent_max_of
from perdure.workflow import Context, InvalidArgumentError, workflow

running = 0
most_running = 0


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    global running, most_running
    running = most_running = 0


async def work(seconds: float) -> None:
    global running, most_running
    running += 1
    most_running = max(most_running, running)
    try:
        await trio.sleep(seconds)
    finally:
        running -= 1


@workflow(name="busy")
async def busy(ctx: Context, input: int) -> int:
    await ctx.step("first", work, 1)
    await ctx.sleep("between", 1000)
    await ctx.step("second", work, 1)
    return input


class TestDefault:
    def test_it_leaves_descriptors_for_the_program(self) -> None:
        assert default_max_live(None) == MAX_LIVE_DEFAULT
        assert default_max_live(1_000_000) == MAX_LIVE_DEFAULT
        assert default_max_live(1024) == 384
        assert default_max_live(10) == 1, "at least one"

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "10"])
    async def test_a_wrong_cap_is_refused(self, disk: Disk, wrong: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="max_live=1000"):
            async with disk.process(busy, max_live=wrong):
                raise AssertionError("it was opened")


class TestSlots:
    def test_a_place_is_given_back_once(self) -> None:
        slots = Slots(1)
        place = slots.take_nowait()
        assert place is not None
        assert slots.take_nowait() is None
        place.give_back()
        place.give_back()
        assert slots.taken == 0
        assert slots.take_nowait() is not None
        assert slots.take_nowait() is None

    def test_as_many_places_are_lent_as_there_are_descriptors_for(self) -> None:
        assert lent_max_of(None, 10) == MAX_LIVE_DEFAULT
        assert lent_max_of(1024, default_max_live(1024)) == LENT_LEAST
        assert lent_max_of(20_000, 4096) == (20_000 - 256) // 2 - 4096
        slots = Slots(3, lent_max=2)
        assert [slots.take_nowait() is not None for _ in range(3)] == [True] * 3
        assert [slots.lend() for _ in range(3)] == [True, True, False]
        assert slots.taken == 1
        slots.take_back()
        assert (slots.taken, slots.lent) == (2, 1)

    def test_a_lent_place_is_taken_back_though_none_is_free(self) -> None:
        slots = Slots(1)
        first = slots.take_nowait()
        assert first is not None
        slots.lend()
        assert slots.take_nowait() is not None
        slots.take_back()
        assert slots.taken == 2
        first.give_back()
        assert slots.take_nowait() is None, "the other still has it"


class TestCap:
    """S47: more live workflows than the cap, all wanting to run."""

    @pytest.mark.parametrize("max_live", [1, 3, 20])
    async def test_all_finish_and_no_more_than_the_cap_run(
        self, disk: Disk, max_live: int, autojump_clock: MockClock
    ) -> None:
        async with disk.process(busy, max_live=max_live) as supervisor:
            handles = [await supervisor.spawn(busy, f"b-{number}", number) for number in range(20)]
            await trio.sleep(0.5)
            assert supervisor._residents.slots.taken == max_live
            assert [await handle.result() for handle in handles] == list(range(20))
            assert most_running == max_live
            assert supervisor.troubles() == {}
            await trio.testing.wait_all_tasks_blocked()
            assert supervisor._residents.slots.taken == 0

    async def test_what_is_asked_of_dormant_workflows_needs_no_place(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(busy, max_live=1) as supervisor:
            await supervisor.spawn(busy, "b-0", 0)
            other = await supervisor.spawn(busy, "b-1", 1)
            with trio.fail_after(0.5):
                await other.message("any", 1)
                assert (await other.get_state()).value == "pending"
                await other.cancel()
                assert (await other.get_state()).value == "cancelled"

    @pytest.mark.parametrize("max_live", [1, 2, 5])
    async def test_workflows_that_wait_for_each_others_messages_all_finish(
        self, disk: Disk, max_live: int, autojump_clock: MockClock
    ) -> None:
        """A ring: each waits for its neighbour's message, and sends one on in a step."""

        @workflow(name="link")
        async def link(ctx: Context, number: int) -> int:
            body = (await ctx.queue.next("token")).body

            async def send() -> None:
                await (await supervisor.get(f"l-{(number + 1) % 10}")).message("token", body + 1, id=f"{number}-{body}")

            await ctx.step("pass on", send)
            return body

        async with disk.process(link, max_live=max_live) as supervisor:
            handles = [await supervisor.spawn(link, f"l-{number}", number) for number in range(10)]
            await handles[0].message("token", 0)
            with trio.fail_after(10_000):
                assert [await handle.result() for handle in handles[:9]] == list(range(9))

    @pytest.mark.parametrize("max_live", [1, 2])
    async def test_steps_that_wait_for_other_workflows_results_lend_their_places(
        self, disk: Disk, max_live: int, autojump_clock: MockClock
    ) -> None:
        @workflow(name="nested")
        async def nested(ctx: Context, depth: int) -> int:
            async def below() -> int:
                handle = await supervisor.spawn(nested, f"n-{depth - 1}", depth - 1)
                return await handle.result()

            return 1 + await ctx.step("below", below, timeout=0) if depth else 0

        async with disk.process(nested, max_live=max_live) as supervisor:
            with trio.fail_after(10_000):
                assert await (await supervisor.spawn(nested, "n-10", 10)).result() == 10
            await trio.testing.wait_all_tasks_blocked()
            assert supervisor._residents.slots.taken == 0

    async def test_who_is_held_for_a_moment_makes_room_once_it_is_let_go(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S45, S47: nobody else asks, and no timeout comes to help."""

        @workflow(name="waiter")
        async def waiter(ctx: Context, input: None) -> Any:
            return (await ctx.queue.next("go")).body

        async with disk.process(busy, waiter, max_live=1, idle_timeout=None) as supervisor:
            await supervisor.spawn(waiter, "w-1")
            await trio.sleep(1)
            async with supervisor._residents.using("w-1"):
                handle = await supervisor.spawn(busy, "b-1", 1)
                await trio.sleep(1)
            with trio.fail_after(5000):
                assert await handle.result() == 1

    async def test_who_becomes_idle_while_others_are_queued_makes_room(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S47: it was at work as the others came."""

        @workflow(name="worker")
        async def worker(ctx: Context, input: None) -> Any:
            await ctx.step("work", trio.sleep, 5)
            return (await ctx.queue.next("go")).body

        async with disk.process(busy, worker, max_live=1, idle_timeout=None) as supervisor:
            await supervisor.spawn(worker, "w-1")
            handle = await supervisor.spawn(busy, "b-1", 1)
            with trio.fail_after(5000):
                assert await handle.result() == 1

    async def test_recovered_workflows_finish_too(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(busy) as supervisor:
            for number in range(20):
                await supervisor.spawn(busy, f"b-{number}", number)
            await trio.sleep(0.5)
            disk.die()
        async with disk.process(busy, max_live=2) as supervisor:
            handles = [await supervisor.get(f"b-{number}") for number in range(20)]
            assert [await handle.result() for handle in handles] == list(range(20))
            assert supervisor.troubles() == {}
