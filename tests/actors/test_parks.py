"""Late parks: a workflow that waits between messages is not written each time, and nothing depends on that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When
from harness import DriverKind
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import Supervisor
from perdure.actors.parks import DELAY_S
from perdure.storage import Batch, BatchRefusedError, StorageError, layout
from perdure.workflow import Context, WorkflowCancelledError, WorkflowEndedError, WorkflowState, workflow

STATE = layout.STATE_KEY


@workflow(name="counter")
async def counter(ctx: Context, count: int) -> list[Any]:
    """Adds up as many messages as its input says, and then naps."""
    bodies = [(await ctx.queue.next(f"read-{number}", names=["go"])).body for number in range(count)]
    await ctx.sleep("nap", 100)
    return bodies


@workflow(name="napper")
async def napper(ctx: Context, count: int) -> str:
    """Naps beside a read, so that a park is late while an alarm is wanted."""

    async def read(ctx: Context) -> int:
        for number in range(count):
            await ctx.queue.next(f"read-{number}", names=["go"])
        return count

    async def nap(ctx: Context) -> str:
        return (await ctx.sleep("nap", 100)).value

    joined = await ctx.join("both", {"read": read, "nap": nap})
    return str(joined["nap"])


async def settled_sleep(seconds: float = 4 * DELAY_S) -> None:
    """Long enough for parks, and after them rows, to be written."""
    await trio.sleep(seconds)


async def parked_late(disk: Disk, supervisor: Supervisor, of: Any = counter, count: int = 3) -> Any:
    """The handle of a workflow that has read one message and waits for the next, which is not written yet."""
    handle = await supervisor.spawn(of, "c-1", count)
    await handle.message("go", 0)
    await wait_all_tasks_blocked()
    assert disk.namespaces["c-1"][STATE] == b"running"
    activation = supervisor._residents.live["c-1"].activation  # pyright: ignore[reportPrivateUsage]
    assert activation.is_parked_late
    return handle


class TestWhatIsWritten:
    async def test_a_message_that_is_handled_costs_two_commits(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor, count=200)
            before = len(disk.store.written)
            for number in range(100):
                await handle.message("go", number)
                await wait_all_tasks_blocked()
            assert disk.store.written[before:] == 200 * ["batch"], "in, and out; no row of the catalog either"

    async def test_that_it_waits_is_written_soon_if_it_goes_on_waiting(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(counter) as supervisor:
            await parked_late(disk, supervisor)
            await settled_sleep()
            assert disk.namespaces["c-1"][STATE] == b"sleeping"
            assert (disk.rows["c-1"].state, disk.rows["c-1"].next_wake_ms) == ("sleeping", None)
            before = len(disk.store.written)
            await trio.sleep(100)
            assert len(disk.store.written) == before, "once"

    async def test_a_busy_workflow_is_left_alone(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor, count=200)
            before = len(disk.store.written)
            for number in range(100):
                await trio.sleep(DELAY_S / 10)
                await handle.message("go", number)
            await wait_all_tasks_blocked()
            assert disk.store.written[before:].count("batch") == 200, "ten seconds' messages, and no park between"

    async def test_an_alarm_is_written_with_the_park(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(napper) as supervisor:
            await parked_late(disk, supervisor, napper)
            due_ms = disk.clock.now_ms() + 100_000
            await settled_sleep()
            assert abs(layout.decode_u64(disk.namespaces["c-1"][layout.ALARM_KEY]) - due_ms) < 1000
            assert disk.rows["c-1"].next_wake_ms == layout.decode_u64(disk.namespaces["c-1"][layout.ALARM_KEY])

    async def test_all_that_are_parked_are_written_when_asked(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(counter) as supervisor:
            await parked_late(disk, supervisor)
            await supervisor._residents.late_parks.flush()  # pyright: ignore[reportPrivateUsage]
            assert disk.namespaces["c-1"][STATE] == b"sleeping"


class TestWhatIsTold:
    async def test_a_state_is_told_once_it_is_durable(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor)
            assert await handle.get_state() is WorkflowState.SLEEPING
            assert disk.namespaces["c-1"][STATE] == b"sleeping"

    async def test_a_list_shows_who_waits(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(counter) as supervisor:
            await parked_late(disk, supervisor)
            (found,) = await supervisor.list()
            assert found.state is WorkflowState.SLEEPING
            assert found.is_live
            assert disk.namespaces["c-1"][STATE] == b"sleeping"

    async def test_a_message_to_one_that_was_written_meanwhile_is_read(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor)
            await handle.get_state()
            await handle.message("go", 1)
            await wait_all_tasks_blocked()
            assert disk.namespaces["c-1"][STATE] == b"running"
            await handle.message("go", 2)
            assert await handle.result() == [0, 1, 2]

    async def test_a_message_that_it_does_not_wait_for_leaves_it_parked(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor)
            await handle.message("other", 1)
            await settled_sleep()
            assert (disk.rows["c-1"].state, disk.rows["c-1"].next_wake_ms) == ("sleeping", None)
            assert disk.rows["c-1"].mail_waiting


class TestLeaving:
    async def test_evicted_it_sleeps_and_comes_back_by_its_alarm(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S33: evicted while that it waits is not written yet."""
        async with disk.process(napper) as supervisor:
            handle = await parked_late(disk, supervisor, napper)
            await handle.evict()
            assert disk.namespaces["c-1"][STATE] == b"sleeping"
            await trio.sleep(101)
            assert "c-1" in supervisor._residents.live  # pyright: ignore[reportPrivateUsage]
            await handle.message("go", 1)
            await handle.message("go", 2)
            assert await handle.result() == "completed"

    async def test_drained_it_sleeps(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S49: the block ends while that it waits is not written yet."""
        async with disk.process(counter) as supervisor:
            await parked_late(disk, supervisor)
        assert disk.namespaces["c-1"][STATE] == b"sleeping"
        assert (disk.rows["c-1"].state, disk.rows["c-1"].next_wake_ms) == ("sleeping", None)

    async def test_cancelled_it_ends(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S32: cancelled while that it waits is not written yet."""
        async with disk.process(counter) as supervisor:
            handle = await parked_late(disk, supervisor)
            await handle.cancel()
            with pytest.raises(WorkflowCancelledError):
                await handle.result()
            await settled_sleep()
            assert disk.namespaces["c-1"][STATE] == b"cancelled"
            assert layout.ALARM_KEY not in disk.namespaces["c-1"]

    async def test_woken_its_nap_is_over_for_good(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S24: `wake()` is durable on return, also where that the workflow waits is not written yet."""
        async with disk.process(napper) as supervisor:
            handle = await parked_late(disk, supervisor, napper)
            await handle.wake()
            disk.die()
        async with disk.process(napper) as supervisor:
            handle = await supervisor.get("c-1")
            await handle.message("go", 1)
            await handle.message("go", 2)
            assert await handle.result() == "interrupted"

    async def test_a_park_that_cannot_be_written_when_it_leaves_is_a_trouble(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S45: else nobody would know when to bring the workflow back."""
        async with disk.process(napper) as supervisor:
            handle = await parked_late(disk, supervisor, napper)
            actor = supervisor._residents.live["c-1"]  # pyright: ignore[reportPrivateUsage]

            async def refuse(batch: Batch) -> None:
                raise BatchRefusedError("the disk is full")

            monkeypatch.setattr(actor.driver, "batch", refuse)
            monkeypatch.setattr(actor.activation._committer, "_batch_nowait", None)  # pyright: ignore[reportPrivateUsage]
            await handle.evict()
            assert isinstance(actor.error, StorageError)
            await handle.message("go", 1)
            await handle.message("go", 2)
            assert await handle.result() == "completed"


WHENS: tuple[When, ...] = ("before", "after")


class TestDeath:
    """S39 where parks are late: before and after every write, the end is that of a run without a death."""

    @pytest.mark.parametrize("of", [counter, napper], ids=["counter", "napper"])
    async def test_at_every_write(
        self, of: Any, driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S27, S39: no message is lost, none is read twice."""
        disks = (Disk(driver_kind, tmp_path / str(number)) for number in range(1000))
        expected, total = await self._life(next(disks), of)
        explored = 0
        for write in range(total):
            for when in WHENS:
                disk = next(disks)
                disk.store.die_at = (write, when)
                try:
                    await self._life(disk, of)
                except* (StorageError, trio.TooSlowError):
                    assert disk.store.is_dead
                if not disk.store.is_dead:
                    continue  # rows that wait for company are written when they are
                explored += 1
                outcome, _ = await self._life(disk, of)
                assert outcome == expected, (write, when)
        assert explored >= 2 * total - 6

    async def _life(self, disk: Disk, of: Any) -> tuple[Any, int]:
        async with disk.process(of) as supervisor:
            handle = await supervisor.spawn(of, "c-1", 3)
            for number in range(3):
                await self._send(handle, number)
                await trio.sleep(DELAY_S / 4 if number < 2 else 3 * DELAY_S)
            with trio.fail_after(600):  # over a dead store it is restarted for ever
                result = await handle.result()
            return result, len(disk.store.written)

    async def _send(self, handle: Any, number: int) -> None:
        try:
            await handle.message("go", number, id=f"m-{number}")
        except WorkflowEndedError:
            assert (await handle.get_state()).is_terminal

    async def test_while_it_waits_costs_an_activation_and_counts_as_no_crash(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S18: dying again and again while a workflow waits is no crash loop of it."""
        for life in range(15):
            async with disk.process(counter) as supervisor:
                if life == 0:
                    await parked_late(disk, supervisor)
                else:
                    await wait_all_tasks_blocked()
                    assert disk.store.opens == ["c-1"], "it is activated needlessly"
                    assert layout.IDLE_ACTIVATIONS_KEY not in disk.namespaces["c-1"]
                disk.die()
        async with disk.process(counter) as supervisor:
            handle = await supervisor.get("c-1")
            for number in (1, 2):
                await handle.message("go", number)
            assert await handle.result() == [0, 1, 2]
