"""Schedules under a supervisor: each occurrence runs once, whatever happens to the process, the clock or an earlier run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import trio
import trio.testing
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock

from perdure.actors import (
    ScheduleHandle,
    ScheduleNotFoundError,
    Supervisor,
    SupervisorClosedError,
    UnregisteredWorkflowError,
    WorkflowNotEndedError,
    WorkflowNotFoundError,
)
from perdure.actors.recurrence import moment_text
from perdure.storage import StorageError
from perdure.workflow import Context, InvalidArgumentError, WorkflowState, workflow

HOUR = 3600.0
START_MS = 1_700_000_000_000
"""What the clock of a disk shows at first: 2023-11-14 22:13:20 UTC."""

begun: list[tuple[str, Any]] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    begun.clear()
    yield
    begun.clear()


@workflow(name="report")
async def report(ctx: Context, input: Any) -> Any:
    async def write() -> None:
        begun.append((ctx.workflow_id, input))

    await ctx.step("write", write)
    return input


@workflow(name="waiter")
async def waiter(ctx: Context, input: Any) -> Any:
    async def write() -> None:
        begun.append((ctx.workflow_id, input))

    await ctx.step("write", write)
    return (await ctx.queue.next("go")).body


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


def run_id(name: str, hours: float) -> str:
    """The id of the run so many hours after the clock's start."""
    return f"{name}@{moment_text(START_MS + round(hours * 3_600_000))}"


def ids() -> list[str]:
    return [workflow_id for workflow_id, _ in begun]


async def sleep_until(disk: Disk, moment: datetime) -> None:
    await disk.clock.wait_until_ms(round(moment.timestamp() * 1000))
    await trio.sleep(1)


class TestRunning:
    async def test_each_occurrence_is_run_once_with_the_input_as_it_was(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        given = {"lines": [1, 2]}
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("hourly", report, given, every=HOUR)
            given["lines"].append(3)
            await trio.sleep(3 * HOUR + 1)
            assert begun == [(run_id("hourly", hour), {"lines": [1, 2]}) for hour in (1, 2, 3)]
            assert await (await supervisor.get(run_id("hourly", 2))).result() == {"lines": [1, 2]}
            info = await schedule.info()
            assert info.last_at == datetime.fromtimestamp(START_MS / 1000 + 3 * HOUR, UTC)
            assert info.next_at == datetime.fromtimestamp(START_MS / 1000 + 4 * HOUR, UTC)
            assert (info.name, info.workflow, info.spec) == ("hourly", "report", "every 3600 s")
            assert (info.active, info.queued, info.is_paused, info.problem) == ((), 0, False, None)

    async def test_a_year_of_a_cron_expression_follows_the_zone(
        self, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        disk = Disk("memory", tmp_path)
        async with disk.process(report) as supervisor:
            await supervisor.schedule("daily", report, cron="30 2 * * *", timezone="Europe/Berlin", misfire="all")
            await sleep_until(disk, at("2024-11-14T12:00"))
        assert len(begun) == len(set(begun)) == 366
        assert "daily@2024-03-31T01:00:00Z" in ids(), "the clock was set from 2 to 3, and 2:30 did not come"
        assert "daily@2024-10-27T00:30:00Z" in ids(), "2:30 came twice"
        assert "daily@2024-10-27T01:30:00Z" not in ids()
        assert "daily@2024-07-01T00:30:00Z" in ids()
        assert "daily@2024-01-01T01:30:00Z" in ids()

    async def test_the_occurrence_is_told_to_the_workflow(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("hourly", report, every=HOUR, workflow_id="reports/{time} of {name}")
            await trio.sleep(HOUR + 1)
        time = moment_text(START_MS + 3_600_000)
        assert ids() == [f"reports/{time} of hourly"]
        assert disk.rows[ids()[0]].attributes == {"schedule": "hourly", "scheduled_at": time}

    async def test_a_thousand_schedules_wait_in_one_task(self, tmp_path: Path, autojump_clock: MockClock) -> None:
        """And those that are due together are decided in few batches."""
        disk = Disk("memory", tmp_path)
        async with disk.process(report) as supervisor:
            await trio.testing.wait_all_tasks_blocked()
            before = trio.lowlevel.current_statistics().tasks_living
            for number in range(1_000):
                await supervisor.schedule(f"s{number}", report, number, cron=f"{number % 60} 9 * * *")
            await trio.testing.wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().tasks_living == before
            assert len(await supervisor.schedules()) == 1_000
            batches = disk.store.written.count("own")
            await sleep_until(disk, at("2023-11-15T10:00"))
            assert disk.store.written.count("own") - batches < 1_000
        assert sorted(begun) == sorted(
            (f"s{number}@2023-11-15T09:{number % 60:02}:00Z", number) for number in range(1_000)
        )

    async def test_nothing_is_made_on_disk_while_there_is_no_schedule(self, disk: Disk) -> None:
        async with disk.process(report) as supervisor:
            assert await supervisor.schedules() == ()
            await (await supervisor.spawn(report, "r-1")).result()
        assert not (disk.path / "own.sqlite").exists()


class TestDefinitions:
    async def test_the_same_again_changes_nothing_and_writes_nothing(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("hourly", report, {"a": 1, "b": 2}, every=HOUR)
            await trio.sleep(HOUR / 2)
            written = len(disk.store.written)
            await supervisor.schedule("hourly", "report", {"b": 2, "a": 1}, every=3600)
            assert len(disk.store.written) == written
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("hourly", report, {"a": 1, "b": 2}, every=HOUR)
            assert disk.store.written == []
            await trio.sleep(HOUR / 2 + 1)
            assert ids() == [run_id("hourly", 1)]
            assert repr(schedule) == "<schedule 'hourly'>"

    async def test_another_definition_replaces_it_and_keeps_what_has_occurred(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, 1, every=HOUR)
            await trio.sleep(HOUR + 1)
            schedule = await supervisor.schedule("s", report, 2, every=HOUR)
            await trio.sleep(HOUR)
            assert begun == [(run_id("s", 1), 1), (run_id("s", 2), 2)], "the hours are counted on"
            await supervisor.schedule("s", report, 2, cron="0 9 * * *", timezone="America/New_York")
            info = await schedule.info()
            assert info.next_at == at("2023-11-15T09:00", "America/New_York")
            assert info.next_at is not None
            assert info.next_at.utcoffset() == at("2023-11-15T09:00", "America/New_York").utcoffset()
            assert info.last_at is not None
            assert info.spec == "0 9 * * * America/New_York"

    async def test_what_was_decided_under_the_earlier_definition_is_not_run_again_under_the_new_one(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """The run was made, the process died before that was noted, and the program comes back with another input."""
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, 1, every=HOUR)
            disk.store.watch = lambda when: (
                disk.die() if when == "after" and run_id("s", 1) in disk.namespaces else None
            )
            with pytest.raises(StorageError):
                await self._sleep(disk, HOUR + 60)
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("s", report, 2, every=HOUR)
            await trio.sleep(1)
            assert ids() == [run_id("s", 1)]
            assert (await schedule.info()).active == ()

    async def _sleep(self, disk: Disk, seconds: float) -> None:
        for _ in range(round(seconds / 10)):
            await trio.sleep(10)
            disk.store.check()

    async def test_a_removed_schedule_starts_nothing_and_its_name_is_free(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("s", report, every=HOUR)
            await supervisor.unschedule("s")
            for refused in (schedule.info, schedule.pause, schedule.resume):
                with pytest.raises(ScheduleNotFoundError, match=r"supervisor\.schedule\('s'") as caught:
                    await refused()
            assert caught.value.name == "s"
            with pytest.raises(ScheduleNotFoundError):
                await supervisor.unschedule("s")
            with pytest.raises(ScheduleNotFoundError):
                await supervisor.get_schedule("s")
            await trio.sleep(2 * HOUR)
            assert begun == []
            assert disk.own == {}
            await supervisor.schedule("s", report, every=HOUR)
            assert isinstance(await supervisor.get_schedule("s"), ScheduleHandle)
            await trio.sleep(HOUR + 1)
        assert ids() == [run_id("s", 3)]

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"cron": "nine o'clock"}, r'cron="0 9 \* \* 1-5"'),
            ({}, "either cron= or every="),
            ({"every": -1}, r"every=60\.0"),
        ],
    )
    async def test_a_wrong_definition_is_refused_at_once(self, disk: Disk, options: Any, match: str) -> None:
        async with disk.process(report) as supervisor:
            with pytest.raises(InvalidArgumentError, match=match):
                await supervisor.schedule("s", report, **options)
            with pytest.raises(InvalidArgumentError, match=r'supervisor\.schedule\("nightly-report"'):
                await supervisor.schedule("", report, every=HOUR)
            with pytest.raises(UnregisteredWorkflowError, match=r"workflows=\[waiter\]"):
                await supervisor.schedule("s", waiter, every=HOUR)
            assert disk.store.written == []

    async def test_a_closed_supervisor_refuses(self, disk: Disk) -> None:
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("s", report, every=HOUR)
        with pytest.raises(SupervisorClosedError):
            await schedule.pause()
        with pytest.raises(SupervisorClosedError):
            await supervisor.schedule("s", report, every=HOUR)
        with pytest.raises(SupervisorClosedError):
            await supervisor.schedules()


class TestOverlap:
    async def test_skip_drops_what_occurs_while_a_run_has_not_ended_over_restarts_too(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(waiter) as supervisor:
            await supervisor.schedule("s", waiter, every=HOUR, overlap="skip")
            await trio.sleep(2.5 * HOUR)
            assert ids() == [run_id("s", 1)]
        async with disk.process(waiter) as supervisor:
            schedule = await supervisor.get_schedule("s")
            assert (await schedule.info()).active == (run_id("s", 1),)
            await trio.sleep(HOUR)
            assert ids() == [run_id("s", 1)]
            await (await supervisor.get(run_id("s", 1))).message("go")
            await trio.sleep(HOUR)
            assert ids() == [run_id("s", 1), run_id("s", 4)]

    async def test_a_run_that_ended_while_nobody_looked_holds_up_nothing(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """The process dies when the run has ended, and before the catalog and the schedule know; it is due at once again."""
        async with disk.process(waiter) as supervisor:
            await supervisor.schedule("s", waiter, every=HOUR, overlap="skip")
            await trio.sleep(HOUR + 1)
            handle = await supervisor.get(run_id("s", 1))
            await handle.message("go")
            while b"completed" not in disk.namespaces[run_id("s", 1)].values():
                await trio.lowlevel.checkpoint()
            disk.die()
        disk.clock.move(HOUR)
        async with disk.process(waiter):
            await trio.sleep(1)
            assert ids() == [run_id("s", 1), run_id("s", 2)]

    @pytest.mark.parametrize("is_restarted", [False, True])
    async def test_queue_starts_what_occurs_one_after_the_other(
        self, disk: Disk, autojump_clock: MockClock, is_restarted: bool
    ) -> None:
        async with disk.process(waiter) as supervisor:
            await supervisor.schedule("s", waiter, every=HOUR, overlap="queue")
            await trio.sleep(3.5 * HOUR)
            if not is_restarted:
                await self._drain(supervisor)
        if is_restarted:
            async with disk.process(waiter) as supervisor:
                await trio.sleep(1)
                await self._drain(supervisor)

    async def _drain(self, supervisor: Supervisor) -> None:
        schedule = await supervisor.get_schedule("s")
        assert (await schedule.info()).queued == 2
        for hour in (1, 2, 3):
            assert ids() == [run_id("s", past) for past in range(1, hour + 1)]
            await (await supervisor.get(run_id("s", hour))).message("go")
            await trio.sleep(1)
        info = await schedule.info()
        assert (info.active, info.queued) == ((), 0)

    async def test_allow_starts_each(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            schedule = await supervisor.schedule("s", waiter, every=HOUR, overlap="allow")
            await trio.sleep(3.5 * HOUR)
            assert (await schedule.info()).active == tuple(run_id("s", hour) for hour in (1, 2, 3))

    @pytest.mark.parametrize("end", ["cancel", "fail"])
    async def test_a_run_that_ends_otherwise_has_ended(self, disk: Disk, autojump_clock: MockClock, end: str) -> None:
        @workflow(name="waiter")
        async def fragile(ctx: Context, input: Any) -> None:
            begun.append((ctx.workflow_id, input))
            if (await ctx.queue.next("go")).body == "fail":
                raise ValueError("no")

        async with disk.process(fragile) as supervisor:
            await supervisor.schedule("s", fragile, every=HOUR)
            await trio.sleep(HOUR + 1)
            handle = await supervisor.get(run_id("s", 1))
            await (handle.cancel() if end == "cancel" else handle.message("go", "fail"))
            await trio.sleep(HOUR)
            assert await handle.get_state() in (WorkflowState.CANCELLED, WorkflowState.FAILED)
        assert run_id("s", 2) in ids()

    async def test_two_schedules_may_share_their_runs(self, disk: Disk, autojump_clock: MockClock) -> None:
        """Their templates give the same ids, for the same workflow and input: one run serves both, and ends for both."""
        async with disk.process(waiter) as supervisor:
            for name in ("s", "t"):
                await supervisor.schedule(name, waiter, cron="0 * * * *", workflow_id="shared-{time}")
            for moment in ("2023-11-14T23:00:00", "2023-11-15T00:00:00"):
                await sleep_until(disk, at(moment))
                shared = f"shared-{moment}Z"
                assert [info.active for info in await supervisor.schedules()] == [(shared,), (shared,)]
                await (await supervisor.get(shared)).message("go")
                await trio.sleep(1)
                assert [info.active for info in await supervisor.schedules()] == [(), ()]
            assert supervisor._schedules._ended == set()  # pyright: ignore[reportPrivateUsage]
            assert supervisor._schedules._runs == {}  # pyright: ignore[reportPrivateUsage]
        assert len(ids()) == 2

    async def test_hundreds_of_runs_that_end_together_are_noted_in_few_batches(
        self, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        disk = Disk("memory", tmp_path)
        async with disk.process(waiter) as supervisor:
            schedule = await supervisor.schedule("s", waiter, every=1, overlap="allow")
            await trio.sleep(300.5)
            await schedule.pause()
            active = (await schedule.info()).active
            assert len(active) == 300
            before = disk.store.written.count("own")
            async with trio.open_nursery() as nursery:
                for workflow_id in active:
                    nursery.start_soon((await supervisor.get(workflow_id)).cancel)
            await trio.sleep(10)
            assert (await schedule.info()).active == ()
            assert disk.store.written.count("own") - before < 250


class TestPause:
    async def test_a_paused_schedule_starts_nothing_over_restarts_until_it_is_resumed(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(report) as supervisor:
            schedule = await supervisor.schedule("s", report, every=HOUR, misfire="all")
            await schedule.pause()
            await trio.sleep(1.5 * HOUR)
        async with disk.process(report) as supervisor:
            await trio.sleep(HOUR)
            schedule = await supervisor.schedule("s", report, every=HOUR, misfire="all")
            assert (await schedule.info()).is_paused, "saying the same again does not resume it"
            assert begun == []
            await schedule.resume()
            await trio.sleep(HOUR)
            assert ids() == [run_id("s", 3)]
            assert not (await schedule.info()).is_paused


class TestMissed:
    @pytest.mark.parametrize(("misfire", "expected"), [("once", [4]), ("skip", []), ("all", [2, 3, 4])])
    async def test_what_occurs_while_nothing_runs_is_handled_at_the_next_start(
        self, disk: Disk, autojump_clock: MockClock, misfire: Any, expected: list[int]
    ) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR, overlap="allow", misfire=misfire)
            await trio.sleep(1.5 * HOUR)
        await trio.sleep(3 * HOUR)
        begun.clear()
        async with disk.process(report):
            await trio.sleep(1)
            assert ids() == [run_id("s", hour) for hour in expected]
            await trio.sleep(HOUR)
            assert ids() == [run_id("s", hour) for hour in [*expected, 5]]

    async def test_a_machine_that_was_suspended_is_late_and_no_more(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S24's clocks: it jumps while the schedule waits."""
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR)
            await trio.sleep(HOUR / 2)
            disk.clock.move(3 * HOUR)
            await trio.sleep(1)
            assert ids() == [run_id("s", 3)]
            await trio.sleep(HOUR / 2)
            assert ids() == [run_id("s", 3), run_id("s", 4)]

    async def test_a_clock_that_is_set_back_repeats_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, cron="0 * * * *")
            await sleep_until(disk, at("2023-11-15T00:00"))
            assert ids() == ["s@2023-11-14T23:00:00Z", "s@2023-11-15T00:00:00Z"]
            disk.clock.move(-1.5 * HOUR)
            await sleep_until(disk, at("2023-11-15T00:30"))
            assert len(ids()) == 2
        async with disk.process(report):
            await sleep_until(disk, at("2023-11-15T01:00"))
        assert ids()[2:] == ["s@2023-11-15T01:00:00Z"]

    async def test_a_schedule_whose_workflow_is_not_registered_stands_still_until_it_is(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(report, waiter) as supervisor:
            await supervisor.schedule("s", report, every=HOUR)
            await supervisor.schedule("t", waiter, every=HOUR)
        async with disk.process(waiter) as supervisor:
            await trio.sleep(2.5 * HOUR)
            info, other = await supervisor.schedules()
            assert info.problem is not None
            assert "no workflow 'report' is registered" in info.problem
            assert other.problem is None
            assert ids() == [run_id("t", 1)], "the others go on"
        begun.clear()
        async with disk.process(report, waiter):
            await trio.sleep(1)
            assert ids() == [run_id("s", 2)]


class TestDeletion:
    async def test_a_run_may_not_be_deleted_before_it_is_noted_as_made(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR)
            own = supervisor._own  # pyright: ignore[reportPrivateUsage]
            batches = 0
            batch = own.batch

            async def fail(given: Any) -> None:
                nonlocal batches
                batches += 1
                if 1 < batches < 6:  # the first is the decision
                    raise StorageError("the disk is full")
                await batch(given)

            monkeypatch.setattr(own, "batch", fail)
            await trio.sleep(HOUR + 1)
            assert ids() == [run_id("s", 1)]
            with pytest.raises(WorkflowNotEndedError, match="is being made by its schedule"):
                await supervisor.delete(run_id("s", 1))
            await trio.sleep(60)
            await supervisor.delete(run_id("s", 1))
            await trio.sleep(60)
            assert (await (await supervisor.get_schedule("s")).info()).active == ()
        assert ids() == [run_id("s", 1)]

    async def test_a_run_that_is_not_noted_as_made_outlives_its_retention_and_a_death_and_runs_once(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S39: deleted before the note, as its time is over, it would be made again by whoever reads the decision."""
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR, misfire="all")
        with pytest.RaisesGroup(StorageError, flatten_subgroups=True, allow_unwrapped=True):
            async with disk.process(report, retention={"completed": 60}) as supervisor:
                own = supervisor._own  # pyright: ignore[reportPrivateUsage]
                batch, batches = own.batch, 0

                async def fail(given: Any) -> None:
                    nonlocal batches
                    batches += 1
                    if batches > 1:  # the first is the decision
                        raise StorageError("the disk is full")
                    await batch(given)

                monkeypatch.setattr(own, "batch", fail)
                await trio.sleep(HOUR + 600)
                assert batches > 1
                assert disk.rows[run_id("s", 1)].state == "completed"
                disk.die()
                disk.store.check()
        async with disk.process(report, retention={"completed": 60}) as supervisor:
            await trio.sleep(600)
            assert disk.rows == {}, "noted as made, it is kept no longer"
        assert ids() == [run_id("s", 1)]

    async def test_deleting_the_run_that_holds_up_a_schedule_lets_it_go_on(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(waiter) as supervisor:
            await supervisor.schedule("s", waiter, every=HOUR, overlap="queue")
            await trio.sleep(2.5 * HOUR)
            await (await supervisor.get(run_id("s", 1))).cancel()
            await supervisor.delete(run_id("s", 1))
            await trio.sleep(1)
            assert ids() == [run_id("s", 1), run_id("s", 2)]


class TestStorage:
    async def test_a_run_that_cannot_be_started_for_now_is_started_later_and_holds_up_no_other_schedule(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S41."""
        original = disk.store.open_driver
        is_full = True

        async def open_driver(workflow_id: str, *, create: bool = False) -> Any:
            if is_full and workflow_id.startswith("s@"):
                raise StorageError("the disk is full")
            return await original(workflow_id, create=create)

        monkeypatch.setattr(disk.store, "open_driver", open_driver)
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR)
            await supervisor.schedule("t", report, every=HOUR)
            await trio.sleep(1.5 * HOUR)
            assert ids() == [run_id("t", 1)]
            is_full = False
            await trio.sleep(60)
            assert ids() == [run_id("t", 1), run_id("s", 1)]

    async def test_a_write_whose_outcome_is_unknown_is_looked_up(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S21's rule for what a supervisor keeps for itself: applied or not, each occurrence runs once."""
        async with disk.process(report) as supervisor:
            await supervisor.schedule("s", report, every=HOUR)
            own = supervisor._own  # pyright: ignore[reportPrivateUsage]
            for number in range(8):
                driver = own._driver  # pyright: ignore[reportPrivateUsage]
                assert driver is not None
                original = driver.batch

                async def fail(batch: Any, original: Any = original, is_applied: bool = number % 2 == 0) -> None:
                    if is_applied:
                        await original(batch)
                    raise StorageError("made unknown by the test")

                monkeypatch.setattr(driver, "batch", fail)
                await trio.sleep(HOUR)
            await trio.sleep(60)
        assert ids() == [run_id("s", hour) for hour in range(1, 9)]


WHENS: tuple[When, ...] = ("before", "after")


class Life:
    """A program that asks for two schedules at each start, as such programs do, and lives for some hours."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.is_over = False

    async def live(self) -> None:
        async with self.disk.process(report, waiter) as supervisor:
            await supervisor.schedule("s", report, 7, every=HOUR, misfire="all", overlap="allow")
            await supervisor.schedule("q", waiter, 8, every=HOUR, misfire="all", overlap="queue")
            end_ms = START_MS + round(3.5 * HOUR * 1000)
            while self.disk.clock.now_ms() < end_ms:
                await trio.sleep(60)
                self.disk.store.check()
                for info in await supervisor.schedules():
                    for workflow_id in info.active:
                        try:
                            await (await supervisor.get(workflow_id)).message("go", id="go")
                        except WorkflowNotFoundError:
                            continue  # it is about to be made
            await trio.sleep(60)
            self.is_over = True

    def check(self) -> None:
        """Each occurrence once: a second run would have an id of its own, or the same id and another step."""
        assert self.is_over
        expected = {run_id(name, hour) for name in ("s", "q") for hour in (1, 2, 3)}
        assert set(self.disk.rows) == expected
        assert {row.state for row in self.disk.rows.values()} == {"completed"}
        assert set(ids()) == expected
        queued = [workflow_id for workflow_id in ids() if workflow_id.startswith("q@")]
        assert queued == sorted(queued), "in order"


class TestDeath:
    async def test_at_every_write_each_occurrence_runs_once(
        self, driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S39 for schedules: before and after every write, those of the schedules, the catalog and the runs."""
        disks = (Disk(driver_kind, tmp_path / str(number)) for number in range(10_000))
        life = Life(next(disks))
        with scheduled(1):
            await life.live()
        life.check()
        total = len(life.disk.store.written)
        assert total > 40
        explored = 0
        step = 1 if driver_kind == "memory" else 9
        for write in range(0, total, step):
            for when in WHENS:
                begun.clear()
                life = Life(next(disks))
                life.disk.clock.move(-(life.disk.clock.now_ms() - START_MS) / 1000)
                life.disk.store.die_at = (write, when)
                try:
                    with scheduled(1):
                        await life.live()
                except* StorageError:
                    pass
                if not life.is_over:
                    assert life.disk.store.is_dead
                    explored += 1
                    await life.live()
                life.check()
        assert explored > 1.5 * total / step
