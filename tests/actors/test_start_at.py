"""`start_at=` and `deadline=` of `spawn`: a workflow that is to start later, and one that is to end in time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock

from perdure.storage import StorageError, layout
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    RollbackContext,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowState,
    workflow,
)

begun: list[float] = []


@pytest.fixture(autouse=True)
def _none_begun() -> None:
    begun.clear()


@workflow(name="greeter")
async def greeter(ctx: Context, name: str) -> list[Any]:
    """Notes when it was begun, and returns what mail it found."""
    await ctx.step("begin", note)
    mail = await ctx.queue.next_batch("mail", count=10, timeout=0)
    return [name, [message.body for message in mail]]


async def note() -> None:
    begun.append(trio.current_time())


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    """Waits for a message for as long as it takes."""
    return (await ctx.queue.next("go")).body


class TestStartAt:
    async def test_nothing_runs_before_and_then_it_does(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            assert disk.rows["g-1"].state == "pending"
            await trio.sleep(99)
            assert await handle.get_state() is WorkflowState.PENDING
            assert begun == []
            assert await handle.result() == ["Ann", []]
            assert begun == [pytest.approx(100, abs=0.1)]

    async def test_a_datetime_says_when(self, disk: Disk, autojump_clock: MockClock) -> None:
        when = datetime.fromtimestamp(disk.clock.now_ms() / 1000, UTC) + timedelta(days=365)
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=when)
            assert await handle.result() == ["Ann", []]
            assert begun == [pytest.approx(365 * 86400, abs=0.1)]

    async def test_a_time_that_is_past_is_now(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(greeter) as supervisor:
            when = datetime(2001, 1, 1, tzinfo=UTC)
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=when)
            assert await handle.result() == ["Ann", []]
            assert begun == [pytest.approx(0, abs=0.1)]

    async def test_it_is_not_in_memory_before(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S46: what starts later costs a row and a file."""
        async with disk.process(greeter) as supervisor:
            await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            await trio.sleep(1)
            assert disk.rows["g-1"].next_wake_ms == disk.clock.now_ms() + 99_000
            assert supervisor._residents.live == {}  # pyright: ignore[reportPrivateUsage]
        async with disk.process(greeter) as supervisor:
            await trio.sleep(50)
            assert disk.store.opens == []
            await trio.sleep(50)
            assert await (await supervisor.get("g-1")).result() == ["Ann", []]

    async def test_down_at_that_time_it_starts_with_the_supervisor(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(greeter) as supervisor:
            await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
        await trio.sleep(1000)
        async with disk.process(greeter) as supervisor:
            assert await (await supervisor.get("g-1")).result() == ["Ann", []]
            assert begun == [pytest.approx(1000, abs=0.1)]

    async def test_a_message_is_kept_for_it_and_does_not_start_it(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S45: never lost, whatever it is that it waits for."""
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            await handle.message("mail", "early")
            await trio.sleep(50)
            assert begun == []
            await handle.message("mail", "late")
            assert (disk.rows["g-1"].state, disk.rows["g-1"].next_wake_ms) == ("pending", disk.clock.now_ms() + 50_000)
            assert await handle.result() == ["Ann", ["early", "late"]]
            assert begun == [pytest.approx(100, abs=0.1)]

    async def test_wake_starts_it_at_once(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            await trio.sleep(1)
            await handle.wake()
            assert await handle.result() == ["Ann", []]
            await trio.sleep(200)
            assert begun == [pytest.approx(1, abs=0.1)]

    async def test_woken_it_starts_after_a_death_too(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S39: `wake()` is durable on return."""
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            await handle.wake()
            disk.die()
        async with disk.process(greeter) as supervisor:
            assert await (await supervisor.get("g-1")).result() == ["Ann", []]
            assert trio.current_time() < 1

    async def test_cancelled_it_never_starts(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S32: cancelled before it was begun, with no alarm left."""
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            await handle.cancel()
            await trio.sleep(200)
            with pytest.raises(WorkflowCancelledError):
                await handle.result()
            assert layout.ALARM_KEY not in disk.namespaces["g-1"]
            assert disk.rows["g-1"].next_wake_ms is None
        assert begun == []

    async def test_spawned_again_it_keeps_its_start(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S44: the same id, workflow and input give the existing one, which is not started by it."""
        async with disk.process(greeter) as supervisor:
            await supervisor.spawn(greeter, "g-1", "Ann", start_at=100)
            handle = await supervisor.spawn(greeter, "g-1", "Ann")
            await trio.sleep(50)
            assert begun == []
            assert await handle.result() == ["Ann", []]
            assert begun == [pytest.approx(100, abs=0.1)]

    async def test_the_wall_clock_decides(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S24: set forward it is due, set back it waits."""
        async with disk.process(greeter) as supervisor:
            await supervisor.spawn(greeter, "g-1", "Ann", start_at=3600)
            await supervisor.spawn(greeter, "g-2", "Bob", start_at=2 * 3600)
            disk.clock.move(3600)
            await trio.sleep(1)
            assert len(begun) == 1
            disk.clock.move(-3600)
            await trio.sleep(3700)
            assert len(begun) == 1
            await trio.sleep(3700)
            assert len(begun) == 2

    async def test_a_death_at_any_write_neither_loses_it_nor_starts_it_early(
        self, driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S39: of the making of a workflow that is to start later."""
        disks = (Disk(driver_kind, tmp_path / str(number)) for number in range(1000))
        whens: tuple[When, ...] = ("before", "after")
        with scheduled(1):
            counted = await self._life(next(disks))
        explored = 0
        for write in range(counted):
            for when in whens:
                disk = next(disks)
                disk.store.die_at = (write, when)
                begun.clear()
                try:
                    with scheduled(1):
                        await self._life(disk)
                except StorageError:
                    assert disk.store.is_dead
                    await self._life(disk)
                explored += disk.lives
                assert len(begun) in (1, 2), "a step that dies runs again"
        assert explored == 2 * counted

    async def _life(self, disk: Disk) -> int:
        async with disk.process(greeter) as supervisor:
            starts = datetime.fromtimestamp(1_700_000_000 + 100 * (1 + trio.current_time() // 100), UTC)
            disk.clock.move((1_700_000_000_000 + 1000 * trio.current_time() - disk.clock.now_ms()) / 1000)
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=starts)
            await trio.sleep(1)
            await handle.message("mail", "early", id="m-1")
            disk.store.check()
            await trio.sleep(10)
            disk.store.check()
            assert disk.lives or begun == []
            await trio.sleep(200)
            disk.store.check()
            assert await handle.result() == ["Ann", ["early"]]
            return len(disk.store.written)


class TestDeadline:
    async def test_one_that_waits_in_memory_fails_in_time(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", deadline=100)
            with pytest.raises(WorkflowFailedError, match="deadline") as raised:
                await handle.result()
            assert raised.value.error.name == "WorkflowDeadlineError"
            assert trio.current_time() == pytest.approx(100, abs=0.1)

    async def test_one_that_is_not_in_memory_fails_in_time(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", deadline=100)
            await trio.sleep(1)
            await handle.evict()
            assert await handle.get_state() is WorkflowState.SLEEPING
            await trio.sleep(101)
            assert await handle.get_state() is WorkflowState.FAILED
            assert disk.rows["w-1"].state in ("sleeping", "running", "failed")

    async def test_one_that_was_sent_what_it_does_not_wait_for_fails_in_time(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        @workflow(name="picky")
        async def picky(ctx: Context, input: None) -> Any:
            return (await ctx.queue.next("go", names=["go"])).body

        async with disk.process(picky) as supervisor:
            handle = await supervisor.spawn(picky, "p-1", deadline=100)
            await trio.sleep(1)
            await handle.message("other")
            await handle.evict()
            await trio.sleep(101)
            assert await handle.get_state() is WorkflowState.FAILED

    async def test_one_that_was_evicted_from_a_step_fails_in_time(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S33: nothing brings it back before, as it was evicted; at its deadline it fails all the same."""

        @workflow(name="worker")
        async def worker(ctx: Context, input: None) -> None:
            await ctx.step("work", trio.sleep, 3600, timeout=0)

        async with disk.process(worker) as supervisor:
            handles = [await supervisor.spawn(worker, f"w-{seconds}", deadline=seconds) for seconds in (200, 100)]
            await trio.sleep(1)
            for handle in handles:
                await handle.evict()
                assert await handle.get_state() is WorkflowState.RUNNING
            await trio.sleep(50)
            assert supervisor._residents.live == {}  # pyright: ignore[reportPrivateUsage]
            for handle in reversed(handles):
                with pytest.raises(WorkflowFailedError, match="deadline"):
                    await handle.result()
                assert trio.current_time() == pytest.approx(float(handle.workflow_id[2:]), abs=0.1)

    async def test_down_at_that_time_it_fails_at_the_next_start(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            await supervisor.spawn(waiter, "w-1", deadline=100)
            await trio.sleep(1)
        await trio.sleep(1000)
        async with disk.process(waiter) as supervisor:
            await trio.sleep(1)
            assert await (await supervisor.get("w-1")).get_state() is WorkflowState.FAILED

    async def test_one_that_has_not_started_by_then_fails_and_never_does(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(greeter) as supervisor:
            handle = await supervisor.spawn(greeter, "g-1", "Ann", start_at=200, deadline=100)
            with pytest.raises(WorkflowFailedError, match="deadline"):
                await handle.result()
            assert trio.current_time() == pytest.approx(100, abs=0.1)
            await trio.sleep(200)
        assert begun == []

    async def test_counted_from_the_spawn_and_not_from_the_start(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", start_at=60, deadline=100)
            with pytest.raises(WorkflowFailedError, match="deadline"):
                await handle.result()
            assert trio.current_time() == pytest.approx(100, abs=0.1)

    async def test_recovered_it_goes_on_without_one(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S36: also after a restart."""
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1", deadline=100)
            await trio.sleep(200)
            await handle.recover()
            await trio.sleep(200)
            assert await handle.get_state() is WorkflowState.SLEEPING
        async with disk.process(waiter) as supervisor:
            handle = await supervisor.get("w-1")
            await handle.message("go", "late")
            assert await handle.result() == "late"

    async def test_a_message_after_it_is_refused(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S45: a message and the deadline at one moment: delivered, or refused."""
        from perdure.workflow import WorkflowEndedError

        for offset in (-0.002, -0.001, 0, 0.001, 0.002):
            async with disk.process(waiter) as supervisor:
                workflow_id = f"w{offset}"
                disk.store.delay_s = 0.001
                handle = await supervisor.spawn(waiter, workflow_id, deadline=100)
                began = trio.current_time()
                await trio.sleep_until(began + 100 + offset)
                try:
                    await handle.message("go", offset)
                except WorkflowEndedError:
                    assert await handle.get_state() is WorkflowState.FAILED
                await trio.sleep(5)
                assert (await handle.get_state()).is_terminal
                disk.store.delay_s = 0


undone: list[str] = []


async def undo(ctx: RollbackContext, output: str) -> None:
    undone.append(ctx.error.name)


async def reserve() -> str:
    return "reserved"


@workflow(name="booking")
async def booking(ctx: Context, input: None) -> None:
    """Reserves, which can be undone, calls a workflow that takes for ever, and waits for it."""
    await ctx.rollback_checkpoint("begin")
    await ctx.step("reserve", reserve, rollback=undo)
    await ctx.call("wait", waiter, None, workflow_id="w-1")


class TestDeath:
    async def test_a_death_at_any_write_leaves_one_that_fails_in_time_and_is_undone(
        self, driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S39: from the making of a workflow over its deadline to the end of its rollback, and of the workflow it called."""
        disks = (Disk(driver_kind, tmp_path / str(number)) for number in range(1000))
        whens: tuple[When, ...] = ("before", "after")
        with scheduled(1):
            counted = await self._life(next(disks))
        explored = 0
        for write in range(counted):
            for when in whens:
                disk = next(disks)
                disk.store.die_at = (write, when)
                try:
                    with scheduled(1):
                        await self._life(disk)
                except StorageError:
                    assert disk.store.is_dead
                    await self._life(disk)
                explored += disk.lives
        assert explored == 2 * counted

    async def _life(self, disk: Disk) -> int:
        undone.clear()
        until = datetime.fromtimestamp(disk.clock.now_ms() / 1000, UTC) + timedelta(seconds=10)
        async with disk.process(booking, waiter) as supervisor:
            handle = await supervisor.spawn(booking, "b-1", deadline=until)
            for _ in range(40):
                await trio.sleep(1)
                disk.store.check()
            with pytest.raises(WorkflowFailedError) as raised:
                await handle.result()
            assert raised.value.error.name == "WorkflowDeadlineError"
            history = {entry.path: entry for entry in await handle.history()}
            if ("reserve",) in history:  # it came so far before it died
                reserved = history[("reserve",)].metadata
                assert reserved is not None
                assert reserved.rollback_completed_at_ms is not None
                assert set(undone) <= {"WorkflowDeadlineError"}
            if "w-1" in disk.rows:
                assert disk.rows["w-1"].state == "cancelled", "its caller has ended"
            assert supervisor.troubles() == {}
            return len(disk.store.written)


@pytest.mark.parametrize("argument", ["start_at", "deadline"])
@pytest.mark.parametrize("wrong", [-1, "noon", False, float("nan"), 1_700_000_000, datetime(2030, 1, 1)])
async def test_what_is_no_time_is_refused_and_nothing_is_made(
    disk: Disk, argument: str, wrong: Any, autojump_clock: MockClock
) -> None:
    async with disk.process(greeter) as supervisor:
        spawn: Callable[..., Any] = supervisor.spawn
        with pytest.raises(InvalidArgumentError, match=argument):
            await spawn(greeter, "g-1", "Ann", **{argument: wrong})
        assert disk.store.written == []
