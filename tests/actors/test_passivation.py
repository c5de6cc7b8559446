"""Workflows that only wait leave memory, and what they wait for brings them back (S45, S46)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.lowlevel
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import Supervisor
from perdure.workflow import Context, Continue, InvalidArgumentError, SleepOutcome, WorkflowHandle, control, workflow

runs: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    runs.clear()


@workflow(name="waiter")
async def waiter(ctx: Context, count: int) -> list[Any]:
    runs.append(ctx.workflow_id)
    heard: list[Any] = []
    for number in range(count):
        heard.append((await ctx.queue.next(f"go-{number}", names=["go"])).body)
        await ctx.step(f"note-{number}", trio.sleep, 0)
    return heard


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    runs.append(ctx.workflow_id)
    return (await ctx.sleep("nap", seconds)).value


@workflow(name="worker")
async def worker(ctx: Context, seconds: float) -> None:
    runs.append(ctx.workflow_id)
    await ctx.step("work", trio.sleep, seconds, timeout=0)


def live(supervisor: Supervisor) -> set[str]:
    return set(supervisor._residents.live)


class TestTimeout:
    async def test_an_idle_workflow_leaves_memory_and_a_message_brings_it_back(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(waiter, idle_timeout=30) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", 2)
            await trio.sleep(29)
            assert live(supervisor) == {"w-1"}
            await trio.sleep(2)
            assert live(supervisor) == set()
            await handle.message("go", "a")
            await wait_all_tasks_blocked()
            assert live(supervisor) == {"w-1"}
            await trio.sleep(20)
            await handle.message("go", "b")
            assert await handle.result() == ["a", "b"]
            assert runs == ["w-1", "w-1"], "the second message found it in memory"

    async def test_its_time_starts_anew_when_it_did_something(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter, idle_timeout=30) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", 10)
            for number in range(5):
                await trio.sleep(20)
                await handle.message("go", number)
            assert runs == ["w-1"]
            await trio.sleep(31)
            assert live(supervisor) == set()

    async def test_an_alarm_brings_it_back_on_time(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(sleeper, idle_timeout=5) as supervisor:
            handles = [await supervisor.spawn(sleeper, f"s-{number}", number * 10.0) for number in range(1, 4)]
            await trio.sleep(9)
            assert live(supervisor) == set()
            begun = trio.current_time()
            for number, handle in enumerate(handles, 1):
                assert await handle.result() == SleepOutcome.COMPLETED.value
                assert 0 <= trio.current_time() - begun - (number * 10 - 9) < 0.5

    async def test_a_wake_brings_it_back(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(sleeper, idle_timeout=5) as supervisor:
            handle = await supervisor.spawn(sleeper, "s-1", 1e6)
            await trio.sleep(9)
            assert live(supervisor) == set()
            await handle.wake()
            assert await handle.result() == SleepOutcome.INTERRUPTED.value

    async def test_who_works_or_retries_soon_stays_and_never_is_never(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(worker, waiter, idle_timeout=5) as supervisor:
            await supervisor.spawn(worker, "busy", 1000)
            await trio.sleep(100)
            assert live(supervisor) == {"busy"}
        async with disk.process(worker, waiter, idle_timeout=None) as supervisor:
            await supervisor.spawn(waiter, "w-1", 1)
            await trio.sleep(80_000)
            assert "w-1" in live(supervisor)

    @pytest.mark.parametrize("wrong", [-1, float("nan"), "5", True])
    async def test_a_wrong_timeout_is_refused(self, disk: Disk, wrong: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"idle_timeout=60\.0"):
            async with disk.process(waiter, idle_timeout=wrong):
                raise AssertionError("it was opened")

    async def test_whoever_waits_for_the_result_does_not_open_it_again_and_again(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S51: a waiter sits through many a passivation."""
        async with disk.process(waiter, idle_timeout=1) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(waiter, "w-1", 3)
            results: list[Any] = []

            async def wait() -> None:
                results.append(await handle.result())

            for _ in range(100):
                nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            disk.store.opens.clear()
            for number in range(3):
                await trio.sleep(10)
                await handle.message("go", number)
            await trio.sleep(1)
            assert results == [[0, 1, 2]] * 100
            # For each message a visit that puts it in, which goes on running; and the waiters' look at the end.
            assert len(disk.store.opens) <= 6


class TestOrder:
    async def test_the_longest_idle_leaves_first_when_places_are_needed(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(waiter, max_live=3, idle_timeout=None) as supervisor:
            for number in range(3):
                await supervisor.spawn(waiter, f"w-{number}", 9)
                await trio.sleep(1)
            await (await supervisor.get("w-0")).message("go", 1)
            await trio.sleep(1)
            await supervisor.spawn(waiter, "w-3", 9)
            await trio.sleep(1)
            assert live(supervisor) == {"w-0", "w-2", "w-3"}, "w-1 waited longest"

    async def test_nobody_leaves_while_there_is_a_place(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter, max_live=3, idle_timeout=None) as supervisor:
            for number in range(3):
                await supervisor.spawn(waiter, f"w-{number}", 9)
            await trio.sleep(1000)
            assert len(live(supervisor)) == 3
            assert supervisor._residents.passivation.count == 0


class TestRaces:
    """S45: a message, a wake or an alarm that races with passivation is delivered, at every moment of it."""

    async def test_what_was_woken_and_has_not_run_yet_does_not_leave(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """A wake is durable, and its workflow is to run next; if its place is wanted just then, it has to be another's."""

        @workflow(name="sleeper")
        async def sleeper(ctx: Context, input: None) -> str:
            return (await ctx.sleep("nap", 1e6)).value

        async with disk.process(sleeper, idle_timeout=None) as supervisor:
            handle = await supervisor.spawn(sleeper, "s-1", None)
            await trio.sleep(1)
            residents = supervisor._residents
            async with residents.using("s-1") as actor:
                await control.wake(actor.activation)
            assert actor.activation.quiet_since is not None, "it has not run yet"
            residents.passivation.make_room(1)
            with trio.fail_after(1000):
                assert await handle.result() == "interrupted"
            assert residents.passivation.count == 0

    @pytest.mark.parametrize("what", ["message", "wake", "alarm", "cancel", "evict", "spawn", "result"])
    async def test_at_every_moment_of_leaving(self, disk: Disk, what: str, autojump_clock: MockClock) -> None:
        @workflow(name="both")
        async def both(ctx: Context, seconds: float) -> Any:
            read = await ctx.queue.next_batch("go", timeout=seconds)
            slept = await ctx.sleep("nap", 1e6 if what == "wake" else 0)
            return [message.body for message in read], slept.value

        offsets = [number / 400 for number in range(-8, 40)]
        async with disk.process(both, idle_timeout=10) as supervisor:
            disk.store.delay_s = 0.01
            acts: dict[str, Callable[[WorkflowHandle], Any]] = {
                "message": lambda handle: handle.message("go", "m"),
                "wake": lambda handle: handle.wake(),
                "cancel": lambda handle: handle.cancel(),
                "evict": lambda handle: handle.evict(),
                "spawn": lambda handle: supervisor.spawn(both, handle.workflow_id, 10.05),
                "result": lambda handle: handle.result(),
                "alarm": lambda handle: handle.get_state(),
            }
            seconds = {"alarm": 10.05, "spawn": 10.05, "wake": 0.0, "result": 20.0}.get(what, 1e6)

            async def one(number: int, offset: float) -> None:
                deadline = seconds + offset if what == "alarm" else seconds
                handle = await supervisor.spawn(both, f"b-{number}", deadline)
                parked = supervisor._residents.live[handle.workflow_id].activation
                await trio.sleep(5)
                assert parked.quiet_since is not None
                await trio.sleep_until(parked.quiet_since + 10 + offset)
                await acts[what](handle)
                with trio.fail_after(1000):
                    if what == "cancel":
                        assert (await handle.get_state()).value == "cancelled"
                    elif what == "evict":
                        await handle.message("go", "m")
                        assert await handle.result() == [["m"], "completed"]
                    else:
                        expected = [
                            ["m"] if what == "message" else [],
                            "interrupted" if what == "wake" else "completed",
                        ]
                        assert await handle.result() == expected

            async with trio.open_nursery() as nursery:
                for number, offset in enumerate(offsets):
                    nursery.start_soon(one, number, offset)
            assert supervisor.troubles() == {}

    async def test_a_stream_of_messages_through_passivations_is_read_once_and_in_order(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S27, S45: each sender's messages in its order, none lost, none twice."""

        @workflow(name="reader")
        async def reader(ctx: Context, count: int) -> list[Any]:
            async def body(ctx: Context, heard: list[Any]) -> Any:
                from perdure.workflow import Break

                message = await ctx.queue.next("in")
                heard = [*heard, message.body]
                return Break(heard) if len(heard) == count else Continue(heard)

            return await ctx.loop("read", body, [])

        async with disk.process(reader, idle_timeout=0, max_live=2) as supervisor:
            disk.store.delay_s = 0.003
            handles = [await supervisor.spawn(reader, f"r-{number}", 60) for number in range(4)]

            async def send(handle: WorkflowHandle, sender: int) -> None:
                for number in range(20):
                    await handle.message("in", [sender, number])
                    await trio.sleep(0.01 * ((sender * 7 + number * 3) % 23))

            async with trio.open_nursery() as nursery:
                for handle in handles:
                    for sender in range(3):
                        nursery.start_soon(send, handle, sender)
            for handle in handles:
                heard = await handle.result()
                for sender in range(3):
                    assert [number for who, number in heard if who == sender] == list(range(20))
            assert supervisor._residents.passivation.count > 20

    async def test_shutdown_while_they_leave(self, disk: Disk, autojump_clock: MockClock) -> None:
        for number in range(30):
            async with disk.process(waiter, idle_timeout=1) as supervisor:
                disk.store.delay_s = 0.01
                handle = await supervisor.spawn(waiter, "w-1", 31)
                await trio.sleep(0.9 + number / 100)
                with trio.CancelScope(deadline=trio.current_time() + number / 400):
                    await handle.message("go", number, id=f"m-{number}")
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.get("w-1")
            for number in range(31):
                await handle.message("go", number, id=f"m-{number}")
            assert sorted(await handle.result()) == list(range(31))
