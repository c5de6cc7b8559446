"""Nobody who waits for a dormant workflow misses what happens to it, and looking leaves nothing behind (S51)."""

from __future__ import annotations

import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors.arrivals import Arrivals
from perdure.workflow import Context, workflow


class TestArrivals:
    def test_what_happened_since_the_look_began_is_not_missed(self) -> None:
        arrivals = Arrivals()
        since = arrivals.count
        assert not arrivals.expect("w-1", since).is_set()
        arrivals.announce("w-2")
        assert arrivals.expect("w-1", since).is_set()
        assert not arrivals.expect("w-1", arrivals.count).is_set()

    def test_all_who_wait_are_told_once(self) -> None:
        arrivals = Arrivals()
        first, second = arrivals.expect("w-1", 0), arrivals.expect("w-1", 0)
        assert first is second
        other = arrivals.expect("w-2", 0)
        arrivals.announce("w-1")
        assert (first.is_set(), other.is_set()) == (True, False)
        assert not arrivals.expect("w-1", arrivals.count).is_set()

    def test_nobody_waits_once_it_is_closed(self) -> None:
        arrivals = Arrivals()
        waiting = arrivals.expect("w-1", 0)
        arrivals.close()
        assert waiting.is_set()
        assert arrivals.expect("w-2", arrivals.count).is_set()

    async def test_results_that_are_asked_for_leave_nothing_behind(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="quick")
        async def quick(ctx: Context, input: int) -> int:
            return (await ctx.queue.next("go")).body if input < 0 else input

        async with disk.process(quick, idle_timeout=1) as supervisor, trio.open_nursery() as nursery:
            handles = [await supervisor.spawn(quick, f"q-{number}", number) for number in range(-3, 30)]
            await trio.sleep(5)
            for handle in handles[:3]:
                nursery.start_soon(handle.result)
            await wait_all_tasks_blocked()
            for _ in range(3):
                assert [await handle.result() for handle in handles[3:]] == list(range(30))
            assert len(supervisor._residents._arrivals._events) == 3
            for handle in handles[:3]:
                await handle.message("go", 1)
            await trio.sleep(1)
            assert len(supervisor._residents._arrivals._events) == 0


class TestFullMailboxes:
    async def test_a_step_that_waits_for_room_or_for_a_reply_keeps_no_place(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S47, S48: one place, and the workflow that would make room has none."""

        @workflow(name="slow-reader")
        async def slow_reader(ctx: Context, count: int) -> int:
            await ctx.step("prepare", trio.sleep, 5)
            total = 0
            for number in range(count):
                message = await ctx.queue.next(f"in-{number}", names=["in"], completable=True)
                total += message.body
                await message.complete(total)
            return total

        @workflow(name="sender")
        async def sender(ctx: Context, input: None) -> int:
            async def send() -> int:
                handle = await supervisor.get("reader")
                for number in range(10):
                    await handle.message("in", number, id=f"m-{number}")
                return int(await handle.request("in", 100, timeout=1000, id="last"))

            return await ctx.step("send", send, timeout=0)

        async with disk.process(slow_reader, sender, max_live=1, mailbox_limit=2) as supervisor:
            sending = await supervisor.spawn(sender, "sender")
            reader = await supervisor.spawn(slow_reader, "reader", 11)
            with trio.fail_after(5000):
                assert await sending.result() == 145
                assert await reader.result() == 145
