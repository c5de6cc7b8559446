"""What workflows owe to each other, where the other one is not well: its storage fails, its code does not fit, it is gone."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk, When
from harness import SlowDriver
from trio.testing import MockClock

from perdure.actors import duties
from perdure.storage import Batch, Driver, StorageError, layout
from perdure.workflow import Context, FaultError, WorkflowState, workflow


@workflow(name="child")
async def child(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "done"


@workflow(name="endless")
async def endless(ctx: Context, input: Any) -> None:
    await ctx.queue.next("never")


@workflow(name="parent")
async def parent(ctx: Context, seconds: float) -> str:
    return await ctx.call("call", child, seconds, workflow_id="c")


@workflow(name="leaver")
async def leaver(ctx: Context, seconds: float) -> str:
    return await ctx.call("call", child, seconds, workflow_id="c", on_parent_end="leave")


@workflow(name="keeper")
async def keeper(ctx: Context, input: Any) -> None:
    await ctx.call("call", endless, None, workflow_id="e")


def nothing_is_owed(disk: Disk) -> bool:
    return all(
        layout.DUTIES_KEY not in namespace and not any(key.startswith(layout.CALLS_PREFIX) for key in namespace)
        for namespace in disk.namespaces.values()
    )


class Failing:
    """Lets the storage of one workflow fail for some time."""

    def __init__(self, disk: Disk, workflow_id: str) -> None:
        self.until = 0.0
        self.failures = 0
        original = disk.store.open_driver

        async def open_driver(wanted: str, *, create: bool = False) -> Driver:
            if wanted == workflow_id and trio.current_time() < self.until:
                self.failures += 1
                raise StorageError("not now")
            return await original(wanted, create=create)

        disk.store.open_driver = open_driver  # type: ignore[method-assign]


class Slow(SlowDriver):
    """Its batches take a while each, and none is written at once."""

    def batch_nowait(self, batch: Batch) -> bool:
        return False


def slow_down(disk: Disk, workflow_id: str) -> None:
    """Let each write of one workflow take some seconds."""
    original = disk.store.open_driver

    async def open_driver(wanted: str, *, create: bool = False) -> Driver:
        driver = await original(wanted, create=create)
        return Slow(driver, 3.0) if wanted == workflow_id else driver  # type: ignore[return-value]

    disk.store.open_driver = open_driver  # type: ignore[method-assign]


async def test_the_call_is_durable_before_its_child_exists(disk: Disk, autojump_clock: MockClock) -> None:
    """S39: killed in between, the next run knows of the child, whatever becomes of the caller."""
    known: list[bool] = []

    def look(when: When) -> None:
        if "c" in disk.rows:
            known.append(any(key.startswith(layout.CALLS_PREFIX) for key in disk.namespaces["p"]))

    async with disk.process(parent, child) as supervisor:
        disk.store.watch = look
        handle = await supervisor.spawn(parent, "p", 100)
        await trio.sleep(50)
        disk.store.watch = None
        assert await handle.result() == "done"
    assert len(known) > 2
    assert all(known)


class TestTell:
    async def test_no_caller_is_told_of_an_end_that_is_not_durable(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S29, S39: a child that still has its own child to cancel ends, and the storage of its end takes long.

        Killed meanwhile, the next run finds one that has not ended, and may end otherwise.
        """

        @workflow(name="gives up")
        async def gives_up(ctx: Context, seconds: float) -> str:
            async def call(ctx: Context) -> None:
                await ctx.call("call", endless, None, workflow_id="e")

            async def nap(ctx: Context) -> None:
                await ctx.sleep("nap", seconds)

            await ctx.race("race", {"call": call, "nap": nap})
            return "done"

        @workflow(name="parent")
        async def parent(ctx: Context, seconds: float) -> str:
            return await ctx.call("call", gives_up, seconds, workflow_id="c")

        told: list[bool] = []

        def look(when: When) -> None:
            if any(
                key.startswith(layout.CALLS_PREFIX) and b"done" in value
                for key, value in disk.namespaces.get("p", {}).items()
            ):
                told.append(disk.namespaces["c"][layout.STATE_KEY] == b"completed")

        async with disk.process(parent, gives_up, endless) as supervisor:
            slow_down(disk, "c")
            disk.store.watch = look
            handle = await supervisor.spawn(parent, "p", 100)
            assert await handle.result() == "done"
            disk.store.watch = None
        assert told
        assert all(told)

    async def test_a_parent_whose_storage_fails_is_told_later(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", 100)
            await trio.sleep(1)
            await handle.evict()
            failing = Failing(disk, "p")
            failing.until = trio.current_time() + 130
            await trio.sleep(105)
            assert await (await supervisor.get("c")).result() == "done"
            assert layout.DUTIES_KEY in disk.namespaces["c"]
            assert disk.rows["c"].next_wake_ms == 0
            await trio.sleep(100)
            assert await handle.result() == "done"
            assert failing.failures > 1
        assert nothing_is_owed(disk)

    async def test_a_parent_whose_storage_fails_till_the_end_is_told_at_the_next_start(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", 10)
            await trio.sleep(1)
            await handle.evict()
            Failing(disk, "p").until = 1e9
            await trio.sleep(100)
        assert layout.DUTIES_KEY in disk.namespaces["c"]
        async with disk.process(parent, child) as supervisor:
            await trio.sleep(10)
            assert disk.rows["p"].state == "completed"
        assert nothing_is_owed(disk)

    async def test_a_parent_whose_code_does_not_fit_hears_of_it_all_the_same(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S4: faulted as its child ends, it goes on with the right code, and asks nobody."""

        @workflow(name="parent")
        async def wrong(ctx: Context, seconds: float) -> str:
            await ctx.sleep("something else", 1)
            return "wrong"

        async with disk.process(parent, child) as supervisor:
            await supervisor.spawn(parent, "p", 10)
            await trio.sleep(1)
        async with disk.process(wrong, child) as supervisor:
            await trio.sleep(20)
            handle = await supervisor.get("p")
            with pytest.raises(FaultError):
                await handle.result()
            assert await handle.get_state() is not WorkflowState.COMPLETED
        store = disk.next_store()
        await store.acquire()
        await store.delete("c")
        await store.aclose()
        async with disk.process(parent, child) as supervisor:
            await trio.sleep(10)
            assert await (await supervisor.get("p")).result() == "done"
        assert nothing_is_owed(disk)

    async def test_a_parent_that_is_gone_is_told_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(leaver, child) as supervisor:
            handle = await supervisor.spawn(leaver, "p", 10)
            await trio.sleep(1)
            await handle.cancel()
            await supervisor.delete("p")
            await supervisor.spawn(leaver, "p", 99999)  # the id is used again, for something else
            await trio.sleep(20)
            assert disk.rows["c"].state == "completed"
            await supervisor.delete("c")
        assert "c" not in disk.namespaces

    async def test_what_is_owed_is_no_reason_to_be_deleted_before(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(keeper, endless) as supervisor:
            handle = await supervisor.spawn(keeper, "p", None)
            await trio.sleep(1)
            await handle.cancel()
            await supervisor.delete("p")
            assert await (await supervisor.get("e")).get_state() is WorkflowState.CANCELLED


class TestCancel:
    async def test_a_child_whose_storage_fails_is_cancelled_later(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(keeper, endless) as supervisor:
            handle = await supervisor.spawn(keeper, "p", None)
            await trio.sleep(1)
            await (await supervisor.get("e")).evict()
            failing = Failing(disk, "e")
            failing.until = trio.current_time() + 60
            await handle.cancel()
            await trio.sleep(30)
            assert disk.rows["e"].state == "sleeping"
            assert disk.rows["p"].next_wake_ms == 0
            await trio.sleep(100)
            assert disk.rows["e"].state == "cancelled"
            assert disk.rows["p"].next_wake_ms is None
        assert nothing_is_owed(disk)

    async def test_a_parent_whose_code_does_not_fit_is_not_begun_again_and_again_while_a_child_cannot_be_cancelled(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S4, S41: a wrong deployment meets a disk that fails: both are tried again after pauses, and nothing spins."""

        @workflow(name="gives up")
        async def gives_up(ctx: Context, input: Any) -> None:
            async def call(ctx: Context) -> None:
                await ctx.call("call", endless, None, workflow_id="e")

            async def nap(ctx: Context) -> None:
                await ctx.sleep("nap", 5)

            await ctx.race("race", {"call": call, "nap": nap})
            await ctx.sleep("rest", 1e4)

        @workflow(name="gives up")
        async def wrong(ctx: Context, input: Any) -> None:
            await ctx.sleep("something else", 1)

        async with disk.process(gives_up, endless) as supervisor:
            await supervisor.spawn(gives_up, "p", None)
            await trio.sleep(1)
            await (await supervisor.get("e")).evict()
            failing = Failing(disk, "e")
            failing.until = 1e9
            await trio.sleep(20)
        assert layout.DUTIES_KEY in disk.namespaces["p"]
        async with disk.process(wrong, endless) as supervisor:
            failing = Failing(disk, "e")
            failing.until = trio.current_time() + 1000
            original = disk.store.open_driver
            begun = 0

            async def open_driver(wanted: str, *, create: bool = False) -> Driver:
                nonlocal begun
                begun += wanted == "p"
                if begun > 500:
                    raise SystemExit("it spins")
                return await original(wanted, create=create)

            disk.store.open_driver = open_driver  # type: ignore[method-assign]
            await trio.sleep(900)
            assert isinstance(supervisor.troubles()["p"], FaultError)
            assert 10 <= failing.failures <= 30, "after 1, 2, 4, ... 60 seconds"
            assert begun < 100
            await trio.sleep(200)
            assert disk.rows["e"].state == "cancelled"
        assert layout.DUTIES_KEY not in disk.namespaces["p"]


class TestWaiting:
    async def test_one_that_ends_while_its_duties_are_queued_does_them_and_nothing_spins(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its turn comes while it does them itself, which takes long: whoever takes turns sleeps meanwhile."""

        @workflow(name="gives up")
        async def gives_up(ctx: Context, input: Any) -> None:
            async def call(ctx: Context) -> None:
                await ctx.call("call", endless, None, workflow_id="e")

            async def nap(ctx: Context) -> None:
                await ctx.sleep("nap", 5)

            await ctx.race("race", {"call": call, "nap": nap})
            await ctx.sleep("nap", 5)

        turns = 0
        take = trio.CapacityLimiter.acquire_on_behalf_of

        async def counted(self: trio.CapacityLimiter, borrower: Any) -> None:
            nonlocal turns
            turns += 1
            assert turns < 1000, "it spins"
            await take(self, borrower)

        monkeypatch.setattr(duties, "_WORKFLOWS_AT_ONCE", 1)
        async with disk.process(gives_up, endless, idle_timeout=None) as supervisor:
            await supervisor.spawn(gives_up, "p", None)
            slow = await supervisor.spawn(endless, "slow")
            await trio.sleep(1)
            await slow.evict()
            await (await supervisor.get("e")).evict()
            began = trio.current_time()
            original = disk.store.open_driver

            async def open_driver(wanted: str, *, create: bool = False) -> Driver:
                await trio.sleep_until(began + {"slow": 100, "e": 200}.get(wanted, 0))
                return await original(wanted, create=create)

            disk.store.open_driver = open_driver  # type: ignore[method-assign]
            supervisor._residents.duties.want("slow")  # pyright: ignore[reportPrivateUsage]
            await trio.sleep(1)
            monkeypatch.setattr(trio.CapacityLimiter, "acquire_on_behalf_of", counted)
            await trio.sleep(150)
            assert disk.rows["p"].state == "completed"
            assert disk.rows["e"].state == "sleeping"
            await trio.sleep(100)
            assert disk.rows["e"].state == "cancelled"
            assert disk.rows["p"].next_wake_ms is None
        assert nothing_is_owed(disk)


class TestLeaving:
    async def test_calls_and_sends_that_wait_as_the_block_is_left_go_on_at_the_next_start(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S49"""

        @workflow(name="reads")
        async def reads(ctx: Context, count: int) -> list[Any]:
            await ctx.sleep("nap", 100)
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(count)]

        @workflow(name="busy")
        async def busy(ctx: Context, input: Any) -> list[Any]:
            async def call(ctx: Context) -> Any:
                return await ctx.call("reads", reads, 3, workflow_id="r")

            async def send(ctx: Context) -> None:
                await ctx.sleep("nap", 1)
                for number in range(3):
                    await ctx.send(f"send-{number}", "r", "item", number)

            return (await ctx.join("both", {"call": call, "send": send}))["call"]

        for seconds in (0.0, 1.0, 5.0, 50.0):
            async with disk.process(busy, reads, mailbox_limit=1, grace=0) as supervisor:
                await supervisor.spawn(busy, "p", None)
                await trio.sleep(seconds)
        async with disk.process(busy, reads, mailbox_limit=1) as supervisor:
            assert await (await supervisor.get("p")).result() == [0, 1, 2]
        assert nothing_is_owed(disk)
