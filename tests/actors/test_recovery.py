"""What a new process does with what a dead one left, and how dormant workflows come back when they are due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import WorkflowNotFoundError
from perdure.actors.suspects import SUSPECT_FROM
from perdure.storage import StorageError
from perdure.workflow import (
    Break,
    Context,
    Continue,
    HistoryDivergedError,
    SleepOutcome,
    StepInterruptedError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    workflow,
)

WHENS: tuple[When, ...] = ("before", "after")
effects: list[str] = []
keys: dict[str, set[str]] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()
    keys.clear()


@pytest.fixture
def make_disk(driver_kind: DriverKind, tmp_path: Path) -> Callable[[], Disk]:
    """Makes empty disks."""
    made: list[Disk] = []

    def make() -> Disk:
        disk = Disk(driver_kind, tmp_path / str(len(made)))
        made.append(disk)
        return disk

    return make


async def effect(name: str) -> str:
    effects.append(name)
    keys.setdefault(name, set()).add(current_step().idempotency_key)
    return name


async def shaky() -> str:
    await effect("shaky")
    if current_step().attempt == 1:
        raise OSError("not yet")
    return "shaky"


@workflow(name="shop")
async def shop(ctx: Context, input: int) -> Any:
    """A bit of everything: steps, a retry, a sleep, a message, a loop."""
    first = await ctx.step("first", effect, "first")
    shook = await ctx.step("shaky", shaky)
    nap = await ctx.sleep("nap", 60)
    message = await ctx.queue.next("go", names=["go"])

    async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
        await ctx.step("add", effect, f"add-{total}")
        await ctx.sleep("pause", 1)
        return Continue(total + 1) if total < 2 else Break(total)

    total = await ctx.loop("totals", body, 0, history_prune_interval=2)
    try:
        last = await ctx.step("last", effect, "last", at_most_once=True)
    except StepInterruptedError:
        last = "interrupted"
    return [input, first, shook, nap is SleepOutcome.COMPLETED, message.body, total, last]


RESULT = [7, "first", "shaky", True, "now", 2]
EFFECTS = {"first": 1, "shaky": 2, "add-0": 1, "add-1": 1, "add-2": 1, "last": 1}


class Life:
    """What a client of one workflow was told so far, over any number of processes."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.is_spawned = False
        self.is_sent = False
        self.result: Any = None

    async def live(self) -> None:
        """Do what was not acknowledged yet, and wait for the end."""
        async with self.disk.process(shop) as supervisor:
            if not self.is_spawned:
                await supervisor.spawn(shop, "s-1", 7)
                self.is_spawned = True
            handle = await supervisor.get("s-1")
            if not self.is_sent:
                await handle.message("go", "now", id="m-1")
                self.is_sent = True
            # Nobody asks for anything now: what brings the workflow on is recovery, and its own time.
            for _ in range(50):
                await trio.sleep(10)
                self.disk.store.check()
            assert await handle.get_state() is WorkflowState.COMPLETED
            self.result = await handle.result()

    def check(self, *, deaths: int) -> None:
        assert self.result[:-1] == RESULT
        assert self.result[-1] in ("last", "interrupted") if deaths else self.result[-1] == "last"
        assert effects.count("last") <= 1, "at most once"
        missing = set(EFFECTS) - set(effects)
        assert missing == set() or (missing == {"last"} and self.result[-1] == "interrupted")
        assert set(effects) <= set(EFFECTS)
        assert len(effects) <= sum(EFFECTS.values()) + deaths, "a death repeats one effect at most"
        assert all(len(found) == 1 for found in keys.values()), "the idempotency key is the same for every attempt"
        assert self.disk.rows["s-1"].next_wake_ms is None


class TestDeath:
    async def test_a_death_at_every_write_loses_nothing_that_was_acknowledged(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39 at the supervisor's level: before and after every write, the catalog's included; explored equals counted."""
        life = Life(make_disk())
        with scheduled(1):
            await life.live()
        life.check(deaths=0)
        counted = len(life.disk.store.written)
        assert counted > 20
        explored = 0
        for write in range(counted):
            for when in WHENS:
                effects.clear()
                keys.clear()
                life = Life(make_disk())
                life.disk.store.die_at = (write, when)
                try:
                    with scheduled(1):
                        await life.live()
                except StorageError:
                    assert life.disk.store.is_dead
                    await life.live()
                explored += life.disk.lives
                life.check(deaths=1)
        assert explored == 2 * counted

    async def test_deaths_in_a_row_at_random_writes(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39: and again during recovery."""
        for start in range(8):
            effects.clear()
            keys.clear()
            life = Life(make_disk())
            deaths = 0
            while life.result is None:
                store = life.disk.next_store() if deaths else life.disk.store
                store.die_at = (start + 3 * deaths, "after" if (start + deaths) % 2 else "before")
                try:
                    await life.live()
                except StorageError:
                    assert store.is_dead
                    deaths += 1
            assert deaths > 2
            life.check(deaths=deaths)


@workflow(name="waiter")
async def waiter(ctx: Context, input: Any) -> Any:
    return (await ctx.queue.next("go", names=["go"])).body


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> float:
    began = trio.current_time()
    await ctx.sleep("nap", seconds)
    woken_at[ctx.workflow_id] = trio.current_time()
    return trio.current_time() - began


@workflow(name="worker")
async def worker(ctx: Context, seconds: float) -> str:
    async def work() -> str:
        effects.append(ctx.workflow_id)
        await trio.sleep(seconds)
        return "worked"

    return await ctx.step("work", work)


woken_at: dict[str, float] = {}


class TestStart:
    async def test_what_was_pending_running_or_is_due_runs_and_the_rest_is_not_opened(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(waiter, sleeper, worker) as supervisor:
            await supervisor.spawn(waiter, "waiting")
            await supervisor.spawn(sleeper, "overdue", 100)
            await supervisor.spawn(sleeper, "due", 3700)
            await supervisor.spawn(sleeper, "not-due", 1_000_000)
            await supervisor.spawn(worker, "running", 20)
            await trio.sleep(1)
            await (await supervisor.spawn(worker, "ended", 0)).result()
            await trio.sleep(1)
            disk.store.die_at = (len(disk.store.written) + 2, "after")
            with pytest.raises(StorageError):
                await supervisor.spawn(worker, "pending", 20)
        assert disk.rows["pending"].state == "pending"
        effects.clear()
        await trio.sleep(3698)
        async with disk.process(waiter, sleeper, worker) as supervisor:
            await trio.sleep(10)
            assert set(disk.store.opens) == {"pending", "running", "overdue", "due"}
            assert sorted(effects) == ["pending", "running"]
            states = {row.workflow_id: row.state for row in await disk.store.list_rows()}
            assert states == {
                "waiting": "sleeping",
                "not-due": "sleeping",
                "overdue": "completed",
                "due": "completed",
                "ended": "completed",
                "pending": "running",
                "running": "running",
            }
            await trio.sleep(100)
            assert await disk.store.count_rows(state="completed") == 5
            assert set(disk.store.opens) == {"pending", "running", "overdue", "due"}

    async def test_looks_at_the_very_start_keep_nobody_from_being_recovered(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(worker) as supervisor:
            await supervisor.spawn(worker, "w-1", 10)
            await wait_all_tasks_blocked()
            disk.die()
        store = disk.next_store()
        store.delay_s = store.look_s = 0.01
        async with disk.process(worker) as supervisor:
            handle = await supervisor.get("w-1")
            for _ in range(5):
                await handle.get_state()
            await trio.sleep(100)
            assert disk.rows["w-1"].state == "completed"

    async def test_an_orderly_end_is_no_different(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter, sleeper, worker, grace=0) as supervisor:
            await supervisor.spawn(waiter, "waiting")
            await supervisor.spawn(sleeper, "not-due", 1_000_000)
            await supervisor.spawn(worker, "running", 20)
            await trio.sleep(1)
        async with disk.process(waiter, sleeper, worker) as supervisor:
            await trio.sleep(1000)
            assert disk.store.opens == ["running"]
            assert effects == ["running", "running"]
            assert await (await supervisor.get("running")).result() == "worked"

    async def test_an_empty_start_and_an_idle_one_write_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter):
            await trio.sleep(1000)
            assert disk.store.written == []
        async with disk.process(waiter) as supervisor:
            await supervisor.spawn(waiter, "w-1")
            await trio.sleep(1)
        async with disk.process(waiter):
            await trio.sleep(1000)
            assert (disk.store.written, disk.store.opens) == ([], [])

    async def test_many_that_were_running_all_finish_while_new_ones_come(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(worker) as supervisor:
            for number in range(60):
                await supervisor.spawn(worker, f"old-{number}", 10)
            await wait_all_tasks_blocked()
            disk.die()
        effects.clear()
        async with disk.process(worker) as supervisor:
            for number in range(30):
                await supervisor.spawn(worker, f"new-{number}", 10)
                await supervisor.spawn(worker, f"old-{number}", 10)
            await trio.sleep(100)
            assert await disk.store.count_rows(state="completed") == 90
        assert sorted(effects) == sorted([f"old-{n}" for n in range(60)] + [f"new-{n}" for n in range(30)])

    async def test_a_diverged_workflow_stays_as_it_is_and_goes_on_with_the_right_code(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S4 in a supervisor: one bad deployment fails nothing."""

        @workflow(name="worker")
        async def other(ctx: Context, seconds: float) -> str:
            await ctx.sleep("work", seconds)
            return "slept"

        async with disk.process(worker) as supervisor:
            assert await (await supervisor.spawn(worker, "w-1", 0)).result() == "worked"

        @workflow(name="worker")
        async def longer(ctx: Context, seconds: float) -> int:
            await worker.function(ctx, seconds)
            return (await ctx.queue.next("go")).body

        async with disk.process(longer) as supervisor:
            await supervisor.spawn(longer, "w-3", 0)
            await trio.sleep(50)
            await (await supervisor.get("w-3")).message("go", 3)
            disk.die()
        before = dict(disk.namespaces["w-3"])
        async with disk.process(other) as supervisor:
            await trio.sleep(100)
            trouble = supervisor.troubles()
            assert list(trouble) == ["w-3"]
            assert isinstance(trouble["w-3"], HistoryDivergedError)
            assert "'work'" in str(trouble["w-3"])
            assert await (await supervisor.spawn(other, "w-4", 1)).result() == "slept", "the others go on"
            assert disk.namespaces["w-3"] == before, "nothing was written"
        async with disk.process(longer) as supervisor:
            await trio.sleep(1)
            assert supervisor.troubles() == {}
            assert await (await supervisor.get("w-3")).result() == 3


class TestAlarms:
    async def test_dormant_sleepers_are_woken_on_time_whatever_their_order(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S24: a restart before the deadline; several at the same millisecond; a later one first."""
        naps = {"late": 500.0, "early": 100.0, "same-1": 300.0, "same-2": 300.0, "same-3": 300.0, "later": 301.5}
        began = trio.current_time()
        async with disk.process(sleeper) as supervisor:
            for workflow_id, seconds in naps.items():
                await supervisor.spawn(sleeper, workflow_id, seconds)
            await trio.sleep(1)
        async with disk.process(sleeper) as supervisor:
            await trio.sleep(50)
            assert disk.store.opens == []
            await trio.sleep(500)
            assert sorted(disk.store.opens) == sorted(naps), "each was opened once"
        for workflow_id, seconds in naps.items():
            assert 0 <= woken_at[workflow_id] - began - seconds < 0.01, workflow_id

    @pytest.mark.parametrize("nap_s", [0.1, 0.6])
    @pytest.mark.parametrize("takes_s", [0.0, 0.02])
    async def test_an_evicted_sleeper_is_woken_on_time_whenever_it_was_evicted(
        self, disk: Disk, takes_s: float, nap_s: float, autojump_clock: MockClock
    ) -> None:
        """S33: also when its time comes while it is being evicted."""
        woken_in_the_act = 0
        async with disk.process(sleeper) as supervisor:
            for number in range(30):
                workflow_id = f"s-{number}"
                # Another sleeps to the same moment, so that somebody looks then who is due.
                companion = await supervisor.spawn(sleeper, f"companion-{number}", nap_s)
                handle = await supervisor.spawn(sleeper, workflow_id, nap_s)
                began = trio.current_time()
                await wait_all_tasks_blocked()
                await companion.evict()
                await trio.sleep(nap_s - 0.04 + number / 500)
                disk.store.delay_s = takes_s
                await handle.evict()
                await trio.sleep(10)
                if await handle.get_state() is WorkflowState.RUNNING:
                    woken_in_the_act += 1  # its alarm had come, and it was stopped while it went on
                    await handle.wake()
                    await handle.result()
                else:
                    assert woken_at[workflow_id] - began < nap_s + 7 * takes_s + 0.01
                assert await handle.get_state() is WorkflowState.COMPLETED, number
                disk.store.delay_s = 0.0
            assert woken_in_the_act <= 1

    async def test_a_later_alarm_is_not_forgotten_for_an_earlier_one(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(sleeper) as supervisor:
            began = trio.current_time()
            for workflow_id, seconds in (("b", 200.0), ("a", 100.0), ("c", 300.0)):
                handle = await supervisor.spawn(sleeper, workflow_id, seconds)
                await trio.sleep(1)
                await handle.evict()
            await trio.sleep(400)
        assert [round(woken_at[workflow_id] - began) for workflow_id in "abc"] == [101, 200, 302]

    async def test_mail_that_nobody_waits_for_delays_no_alarm(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(sleeper) as supervisor:
            handle = await supervisor.spawn(sleeper, "s-1", 100.0)
            await trio.sleep(1)
            await handle.message("unrelated", 1)
            await handle.evict()
            assert await handle.get_state() is WorkflowState.SLEEPING
            await trio.sleep(150)
            assert await handle.get_state() is WorkflowState.COMPLETED

    async def test_a_look_at_the_moment_of_the_alarm_does_not_swallow_it(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(sleeper) as supervisor:
            handle = await supervisor.spawn(sleeper, "s-1", 100.0)
            await trio.sleep(1)
        async with disk.process(sleeper) as supervisor:
            handle = await supervisor.get("s-1")
            disk.store.delay_s = 0.01
            while trio.current_time() < 103:
                await handle.get_state()
                await trio.sleep(0.001 if trio.current_time() > 98 else 1)
            assert await handle.get_state() is WorkflowState.COMPLETED

    async def test_the_clock_set_forward_wakes_who_became_due_and_set_back_makes_wait(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S24: wall clock set back or forward an hour while waiting, for dormant workflows."""
        async with disk.process(sleeper) as supervisor:
            await supervisor.spawn(sleeper, "s-1", 3000)
            await supervisor.spawn(sleeper, "s-2", 3600 + 3000)
            await trio.sleep(1)
        async with disk.process(sleeper) as supervisor:
            await trio.sleep(1)
            disk.clock.move(3600)
            await trio.sleep(1)
            assert disk.rows["s-1"].state == "completed"
            disk.clock.move(-3600)
            await trio.sleep(3600)
            assert disk.rows["s-2"].state == "sleeping"
            await trio.sleep(3010)
            assert disk.rows["s-2"].state == "completed"
        assert supervisor.troubles() == {}

    async def test_a_queue_read_times_out_in_a_dormant_workflow(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S26: the deadline survives a restart."""

        @workflow(name="patient")
        async def patient(ctx: Context, input: None) -> int:
            return len(await ctx.queue.next_batch("go", timeout=100))

        async with disk.process(patient) as supervisor:
            await supervisor.spawn(patient, "p-1")
            await trio.sleep(1)
        async with disk.process(patient) as supervisor:
            await trio.sleep(150)
            assert disk.rows["p-1"].state == "completed"
            assert await (await supervisor.get("p-1")).result() == 0


class TestMail:
    async def test_a_message_wakes_a_dormant_workflow(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(waiter) as supervisor:
            await supervisor.spawn(waiter, "w-1")
            await trio.sleep(1)
        async with disk.process(waiter) as supervisor:
            await trio.sleep(10)
            assert disk.store.opens == []
            handle = await supervisor.get("w-1")
            await handle.message("go", 5)
            assert disk.store.opens == ["w-1"], "once, for the message and the run"
            assert await handle.result() == 5

    @pytest.mark.parametrize("look", [False, True])
    async def test_a_message_that_was_acknowledged_is_handled_after_a_death(
        self, disk: Disk, look: bool, autojump_clock: MockClock
    ) -> None:
        """S27: at any moment after the acknowledgement, looked at or not."""
        for wait_ms in range(0, 1000, 100):
            workflow_id = f"w-{wait_ms}-{look}"
            async with disk.process(waiter) as supervisor:
                handle = await supervisor.spawn(waiter, workflow_id)
                await trio.sleep(1)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handle.message, "go", 5)
                    await handle.evict()
                if look:
                    await handle.get_state()
                await trio.sleep(wait_ms / 1000)
                disk.die()
            async with disk.process(waiter):
                await trio.sleep(1)
                assert disk.rows[workflow_id].state == "completed"

    async def test_a_message_that_races_with_an_eviction_is_handled_in_this_process(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S45: a message that races with a workflow's leaving: delivered, and not at the next start only."""
        async with disk.process(waiter) as supervisor:
            for number in range(40):
                handle = await supervisor.spawn(waiter, f"w-{number}")
                await trio.sleep(1)
                disk.store.delay_s = 0.01 if number % 2 else 0.0
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handle.message, "go", number)
                    await trio.sleep(number // 2 / 1000)
                    await handle.evict()
                disk.store.delay_s = 0.0
                await trio.sleep(1)
                state = await handle.get_state()
                # Evicted in the very act of taking it, it was running, and stays out until it is woken.
                assert state in (WorkflowState.COMPLETED, WorkflowState.RUNNING), number
                await handle.wake()
                assert await handle.result() == number

    @pytest.mark.parametrize("what", ["message", "wake"])
    async def test_whoever_asks_for_it_while_its_step_unwinds_brings_it_back(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        """S33, S45: an eviction that a step's own clean-up holds up: what comes meanwhile is handled in this process."""

        @workflow(name="tidy")
        async def tidy(ctx: Context, input: None) -> Any:
            async def work() -> str:
                effects.append("began")
                if len(effects) == 1:
                    try:
                        await trio.sleep_forever()
                    finally:
                        with trio.CancelScope(shield=True):
                            await trio.sleep(10)
                return "worked"

            await ctx.step("work", work, timeout=0)
            return None if what == "wake" else (await ctx.queue.next("go")).body

        async with disk.process(tidy) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(tidy, "t-1")
            await trio.sleep(1)
            nursery.start_soon(handle.evict)
            await trio.sleep(1)
            nursery.start_soon(*((handle.wake,) if what == "wake" else (handle.message, "go", 5)))
            await trio.sleep(100)
            assert disk.rows["t-1"].state == "completed"
            assert await handle.result() == (None if what == "wake" else 5)
        assert effects == ["began", "began"]


class TestHalfMade:
    async def test_a_death_at_every_write_of_a_spawn_leaves_nothing_or_a_workflow_that_runs(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S44, S52: row, file, first batch; afterwards the id is free or taken, never stuck."""
        disk = make_disk()
        async with disk.process(worker) as supervisor:
            await supervisor.spawn(worker, "w-1", 0)
            counted = len(disk.store.written)
            assert disk.store.written == ["rows", "create", "batch"]
        outcomes: list[str] = []
        for write in range(counted):
            for when in WHENS:
                for again in (False, True):
                    effects.clear()
                    disk = make_disk()
                    disk.store.die_at = (write, when)
                    async with disk.process(worker) as supervisor:
                        with pytest.raises(StorageError):
                            await supervisor.spawn(worker, "w-1", 0)
                    async with disk.process(worker) as supervisor:
                        if again:
                            assert await (await supervisor.spawn(worker, "w-1", 0)).result() == "worked"
                            assert effects == ["w-1"]
                            continue
                        await trio.sleep(1)
                        assert supervisor.troubles() == {}
                        try:
                            handle = await supervisor.get("w-1")
                        except WorkflowNotFoundError:
                            outcomes.append("nothing")
                            assert effects == []
                            assert await disk.store.count_rows() == 0
                        else:
                            outcomes.append("runs")
                            assert await handle.result() == "worked"
                            assert effects == ["w-1"]
        assert outcomes == ["nothing"] * 5 + ["runs"]


class TestCrashLoops:
    async def test_a_workflow_that_kills_the_process_each_time_ends_and_its_neighbours_finish(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S18: a step that kills the process every time ends as `CrashLoopError`, its neighbours unharmed."""
        begun: list[str] = []

        @workflow(name="poison")
        async def poison(ctx: Context, input: None) -> None:
            async def kill() -> None:
                begun.append("poison")
                await trio.sleep(0.5)
                disk.die()
                dead.set()
                await trio.sleep_forever()

            await ctx.step("kill", kill)

        lives = 0
        is_over = False
        while not is_over:
            dead = trio.Event()
            async with disk.process(worker, poison, grace=0) as supervisor:
                if lives == 0:
                    for number in range(20):
                        await supervisor.spawn(worker, f"w-{number}", 2.0)
                    await supervisor.spawn(poison, "poison")
                with trio.move_on_after(100):
                    await dead.wait()
                    lives += 1
                    continue
                is_over = True
                with pytest.raises(WorkflowFailedError, match="CrashLoopError"):
                    await (await supervisor.get("poison")).result()
                for number in range(20):
                    assert await (await supervisor.get(f"w-{number}")).result() == "worked"
        assert begun == ["poison"] * 10
        assert lives == 10

    async def test_suspects_that_wait_for_their_turn_are_in_nobodys_way(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S18, S32, S33: they are evicted, cancelled, sent messages and shut down as anybody, and others run beside them."""
        for _ in range(SUSPECT_FROM):
            async with disk.process(worker) as supervisor:
                for number in range(5):
                    await supervisor.spawn(worker, f"w-{number}", 20.0)
                await trio.sleep(1)
                disk.die()
        effects.clear()
        async with disk.process(worker, grace=2) as supervisor:
            await trio.sleep(1)
            assert len(effects) == 1, "one at a time"
            assert await (await supervisor.spawn(worker, "innocent", 1.0)).result() == "worked"
            waiting = [f"w-{number}" for number in range(5) if f"w-{number}" not in effects]
            began = trio.current_time()
            await (await supervisor.get(waiting[0])).evict()
            await (await supervisor.get(waiting[1])).cancel()
            with pytest.raises(WorkflowCancelledError):
                await (await supervisor.get(waiting[1])).result()
            await (await supervisor.get(waiting[2])).message("unrelated")
            assert trio.current_time() - began < 0.1
        assert trio.current_time() - began < 2.1
        effects.clear()
        async with disk.process(worker) as supervisor:
            for _ in range(3):
                await trio.sleep(1000)
            for workflow_id in {f"w-{number}" for number in range(5)} - {waiting[1]}:
                handle = await supervisor.get(workflow_id)
                await handle.wake()
                assert await handle.result() == "worked"
