"""A supervisor in virtual time, whose block is a process that can die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import trio
import trio.lowlevel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.storage import Batch, MemoryDriver, StorageError, ValueTooLargeError
from perdure.testing import (
    CrashPoint,
    FaultyDriver,
    ProcessPlan,
    SimulatedClock,
    SimulatedCrash,
    SimulatedDisk,
    Simulation,
    VirtualTimeError,
    WorkflowMachine,
    process_rule,
    run_virtual,
    seeded_scheduling,
    virtual_supervisor,
)
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    SystemClock,
    WorkflowState,
    current_step,
    run_workflow,
    to_asyncio,
    workflow,
)

YEAR_S = 365 * 24 * 3600.0


async def echo(value: int) -> int:
    return value


def plain(value: int) -> int:
    assert current_step().name == "plain"
    return value + 1


@workflow
async def sleeper(ctx: Context, value: int) -> int:
    first = await ctx.step("first", echo, value)
    await ctx.sleep("year", YEAR_S)
    return await ctx.step("plain", plain, first)


@pytest.fixture(params=["memory", "sqlite"])
def make_disk(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """Makes empty disks of either kind."""
    made: list[SimulatedDisk] = []

    def make() -> SimulatedDisk:
        made.append(SimulatedDisk(None if request.param == "memory" else tmp_path / f"disk-{len(made)}"))
        return made[-1]

    return make


async def test_a_year_passes_in_no_time(autojump_clock: MockClock) -> None:
    begun_s = time.monotonic()
    clock = SimulatedClock()
    begun_ms = clock.now_ms()
    async with virtual_supervisor([sleeper], clock=clock) as supervisor:
        assert await (await supervisor.spawn(sleeper, "w", 1)).result() == 2
    assert clock.now_ms() - begun_ms >= YEAR_S * 1000
    assert time.monotonic() - begun_s < 60


async def test_real_time_is_refused() -> None:
    with pytest.raises(VirtualTimeError, match="autojump_clock"):
        async with virtual_supervisor([sleeper]):
            pass


def test_outside_of_trio_is_refused() -> None:
    manager = virtual_supervisor([sleeper])
    with pytest.raises(VirtualTimeError, match="run_virtual"):
        manager.__aenter__().send(None)


def test_a_process_that_dies_at_any_write_is_followed_by_one_that_ends_alike(make_disk: object) -> None:
    """S39, for the kit itself: explored equals counted, in memory and in files, twice for each write."""
    assert callable(make_disk)

    async def process(supervisor: object) -> int:
        handle = await supervisor.spawn(sleeper, "w", 1)  # type: ignore[attr-defined]
        return await handle.result()  # type: ignore[no-any-return]

    whole = Simulation([sleeper], disk=make_disk()).run(process)
    assert whole.value == 2
    explored = 0
    for point in whole.writes:
        for when in ("before", "after"):
            simulation = Simulation([sleeper], disk=make_disk())
            died = simulation.run(process, crash_at=CrashPoint(point.number, when))
            assert died.has_crashed
            assert died.value is None
            assert len(died.writes) == point.number + (when == "after")
            again = simulation.run(process, crash_at=CrashPoint(0, "after"))
            after = simulation.run(process)
            assert (again.life, after.life) == (1, 2)
            assert after.value == 2
            explored += 1
    assert explored == 2 * len(whole.writes) >= 12


async def _eight(supervisor: Supervisor) -> int:
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(supervisor.spawn, sleeper, f"w-{number}", number)
    return sum([await (await supervisor.get(f"w-{number}")).result() for number in range(8)])


def test_writes_side_by_side_have_a_number_each_and_each_can_have_its_turn(
    make_disk: Callable[[], SimulatedDisk],
) -> None:
    """S39: also where a store lets other writes begin before one is done, a planned death or fault comes, and once only."""
    whole = Simulation([sleeper], disk=make_disk()).run(_eight)
    assert whole.value == 36
    assert sorted(point.number for point in whole.writes) == list(range(len(whole.writes)))
    for number in range(12):
        for when in ("before", "after"):
            simulation = Simulation([sleeper], disk=make_disk())
            died = simulation.run(_eight, crash_at=CrashPoint(number, when))
            point = simulation.disk.gate.died_at
            assert died.has_crashed, (number, when)
            assert point is not None
            assert (point.number, point in died.writes) == (number, when == "after")
    refused = Simulation([sleeper], disk=make_disk())
    told: list[str] = []

    async def spawn_again(supervisor: Supervisor) -> int:
        while len(await supervisor.list()) < 8:
            try:
                await _eight(supervisor)
            except* StorageError as group:
                told.extend(str(error) for error in group.exceptions)
        return await _eight(supervisor)

    assert refused.run(spawn_again, faults=dict.fromkeys(range(8), "io")).value == 36
    assert len(told) == 8


def test_what_a_dying_process_was_still_making_is_none_of_its_writes(tmp_path: Path) -> None:
    """S39: the history of a disk says what the next process finds, and no write that came to its end after the death."""
    for number in range(0, 12, 3):
        disk = SimulatedDisk(tmp_path / f"disk-{number}")
        Simulation([sleeper], disk=disk).run(_eight, crash_at=CrashPoint(number, "after"))
        made = [point for point in disk.history if point.kind == "create"]
        assert disk.path is not None
        assert len(list((disk.path / "workflows").glob("*.sqlite"))) == len(made), number


class _Hesitant(MemoryDriver):
    """Leaves every batch to be waited for."""

    def batch_nowait(self, batch: Batch) -> bool:
        return False


async def test_a_write_that_could_not_be_made_gives_its_number_to_the_next() -> None:
    """S39: numbers are those of writes; what the inner driver refuses, or leaves to be waited for, is none."""
    driver = FaultyDriver(_Hesitant(value_bytes_max=4), crash_at=CrashPoint(1, "after"))
    small, large = Batch(puts=[(b"a", b"1")]), Batch(puts=[(b"a", b"12345")])
    with pytest.raises(ValueTooLargeError):
        await driver.batch(large)
    assert not driver.batch_nowait(small)
    await driver.batch(small)
    with pytest.raises(SimulatedCrash):
        await driver.batch(small)
    assert [point.number for point in driver.writes] == [0, 1]


async def test_a_crash_ends_the_block_and_lets_nothing_of_it_reach_the_disk(autojump_clock: MockClock) -> None:
    disk, clock = SimulatedDisk(), SimulatedClock()
    unwound = went_on = False
    async with virtual_supervisor([sleeper], disk=disk, clock=clock) as supervisor:
        handle = await supervisor.spawn(sleeper, "w", 1)
        await trio.sleep(10)
        written = len(disk.history)
        disk.crash()
        try:
            with trio.CancelScope(shield=True), pytest.raises(SimulatedCrash):
                await handle.message("late", None)
            await trio.lowlevel.checkpoint()
            went_on = True
        finally:
            unwound = True
    assert (unwound, went_on, disk.has_crashed) == (True, False, True)
    assert len(disk.history) == written
    async with virtual_supervisor([sleeper], disk=disk, clock=clock) as supervisor:
        assert await (await supervisor.get("w")).result() == 2
    assert not disk.has_crashed
    assert disk.lives == 2


async def test_what_the_block_raises_comes_out_as_it_was(autojump_clock: MockClock) -> None:
    with pytest.raises(ZeroDivisionError):
        async with virtual_supervisor([sleeper]):
            raise ZeroDivisionError


async def test_a_cancellation_from_outside_is_not_lost_in_a_crash(autojump_clock: MockClock) -> None:
    disk = SimulatedDisk()
    with trio.CancelScope() as scope:
        async with virtual_supervisor([sleeper], disk=disk) as supervisor:
            await supervisor.spawn(sleeper, "w", 1)
            disk.crash()
            scope.cancel()
            await trio.sleep_forever()
        pytest.fail("the cancellation was swallowed")
    assert scope.cancelled_caught


def test_the_clock_goes_on_from_one_run_to_the_next_and_can_be_set_back() -> None:
    clock = SimulatedClock()
    start_ms = clock.now_ms()
    run_virtual(trio.sleep, 5)
    assert clock.now_ms() == start_ms  # nobody looked

    async def main() -> None:
        clock.now_ms()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clock.wait_until_ms, start_ms + 60_000)
            await trio.sleep(50)
            clock.move(-30)
        assert trio.current_time() == pytest.approx(90)

    run_virtual(main)
    assert clock.now_ms() == start_ms + 60_000


async def test_no_time_passes_while_asyncio_is_waited_for(autojump_clock: MockClock) -> None:
    @workflow
    async def caller(ctx: Context, _: None) -> float:
        async def call() -> float:
            begun = trio.current_time()
            await to_asyncio(asyncio.sleep, 0.02)
            return trio.current_time() - begun

        return await ctx.step("call", call, timeout=1)

    async with virtual_supervisor([caller]) as supervisor:
        assert await (await supervisor.spawn(caller, "w")).result() == 0
    assert autojump_clock.autojump_threshold == 0


@pytest.mark.parametrize("fault", ["refused", "full", "io", "lost", "applied"])
def test_a_disk_that_fails_once_at_any_write_stops_nothing(fault: str) -> None:
    """S41: an error of the storage is no failure of the workflow."""

    async def process(supervisor: object) -> int:
        for _ in range(5):
            try:
                handle = await supervisor.spawn(sleeper, "w", 1)  # type: ignore[attr-defined]
                return await handle.result()  # type: ignore[no-any-return]
            except Exception:
                await trio.sleep(60)
        raise AssertionError("it never came through")

    count = len(Simulation([sleeper]).run(process).writes)
    for number in range(count):
        assert Simulation([sleeper]).run(process, faults={number: fault}).value == 2, number  # type: ignore[dict-item]


async def test_a_driver_of_its_own_dies_where_it_is_told_to(autojump_clock: MockClock) -> None:
    data: dict[bytes, bytes] = {}
    driver = FaultyDriver(MemoryDriver(data), crash_at=CrashPoint(1, "after"))
    with pytest.raises(SimulatedCrash):
        await run_workflow("w", sleeper, 1, driver)
    assert len(driver.writes) == 2
    with pytest.raises(SimulatedCrash):
        await driver.get(b"")
    result = await run_workflow("w", sleeper, 1, MemoryDriver(data))
    assert result.state is WorkflowState.SLEEPING


def test_bad_arguments_say_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="empty or missing"):
        SimulatedDisk(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"CrashPoint\(3, 'after'\)"):
        CrashPoint(-1)
    with pytest.raises(InvalidArgumentError, match="'before' or 'after'"):
        CrashPoint(1, "during")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no process"):
        SimulatedDisk().crash()
    with pytest.raises(InvalidArgumentError, match="1970"):
        SimulatedClock().move(-1e12)
    disk = SimulatedDisk()
    disk.boot()
    with pytest.raises(InvalidArgumentError, match="neither ended nor died"):
        disk.boot()


class TestWhatABlockRaisesAfterItsProcessDied:
    """S39: a test must not pass by dying; what comes out is the block's own, and what death itself raises is not."""

    async def test_an_assertion_right_after_the_crash(self, autojump_clock: MockClock) -> None:
        async def block() -> None:
            disk = SimulatedDisk()
            async with virtual_supervisor([sleeper], disk=disk) as supervisor:
                await supervisor.spawn(sleeper, "w", 1)
                disk.crash()
                raise AssertionError("the test's own")

        with pytest.raises(AssertionError, match="the test's own"):
            await block()

    @pytest.mark.parametrize("number", range(4))
    async def test_an_error_in_a_finally(self, autojump_clock: MockClock, number: int) -> None:
        async def block() -> None:
            async with virtual_supervisor([sleeper], crash_at=CrashPoint(number)) as supervisor:
                try:
                    await (await supervisor.spawn(sleeper, "w", 1)).result()
                finally:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await block()

    async def test_what_fails_in_a_nursery_without_the_cancellations_beside_it(self, autojump_clock: MockClock) -> None:
        async def fail() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ZeroDivisionError

        async def block() -> None:
            disk = SimulatedDisk()
            async with virtual_supervisor([sleeper], disk=disk), trio.open_nursery() as nursery:
                nursery.start_soon(fail)
                nursery.start_soon(trio.sleep_forever)
                await trio.testing.wait_all_tasks_blocked()
                disk.crash()
                await trio.sleep_forever()

        with pytest.raises(ExceptionGroup) as caught:
            await block()
        assert [type(each) for each in caught.value.exceptions] == [ZeroDivisionError]

    async def test_what_death_itself_raises_does_not(self, autojump_clock: MockClock) -> None:
        disk = SimulatedDisk()
        async with virtual_supervisor([sleeper], disk=disk) as supervisor:
            handle = await supervisor.spawn(sleeper, "w", 1)
            disk.crash()
            with trio.CancelScope(shield=True):
                await handle.message("late", None)
        assert disk.has_crashed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"faults": {3: "explode"}}, r"faults=\{3: 'full'\}"),
        ({"faults": {"3": "full"}}, r"faults=\{3: 'full'\}"),
        ({"faults": ["full"]}, r"faults=\{3: 'full'\}"),
        ({"crash_at": 3}, r"CrashPoint\(3, 'after'\)"),
        ({"durability": "normal"}, "leave durability= out"),
        ({"disk": "/tmp/x"}, r"SimulatedDisk\('/tmp/x'\)"),
        ({"clock": SystemClock()}, r"clock=SimulatedClock\(\)"),
        ({"clock": MockClock()}, r"clock=SimulatedClock\(\)"),
        ({"clock": 3}, r"clock is a SimulatedClock, .* not 3"),
        ({"seed": 3}, "does not take seed="),
    ],
)
async def test_bad_arguments_of_a_block_are_refused(
    autojump_clock: MockClock, arguments: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        async with virtual_supervisor([sleeper], **arguments):  # type: ignore[arg-type]
            pass


def test_other_bad_arguments_say_what_to_write_too() -> None:
    clock = SimulatedClock()
    for seconds in ("1h", timedelta(hours=1), float("nan"), float("inf"), True):
        with pytest.raises(InvalidArgumentError, match=r"clock\.move\(-3600\.0\)"):
            clock.move(seconds)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="driver"):
        FaultyDriver("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"crash_at=CrashPoint"):
        FaultyDriver(MemoryDriver(), crash_at=3)  # type: ignore[arg-type]
    for delay in ("x", -1, float("nan")):
        with pytest.raises(InvalidArgumentError, match=r"delay=0\.5"):
            FaultyDriver(MemoryDriver(), delay=delay)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"gate=WriteGate\(\)"):
        FaultyDriver(MemoryDriver(), gate=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"Simulation\(\[order\]\)"):
        Simulation(sleeper)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"clock=SimulatedClock\(\)"):
        Simulation([sleeper], clock=SystemClock())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"modules=\[shop\]"):
        Simulation([sleeper], modules=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"crashes=\[CrashPoint\(3, 'after'\)\]"):
        Simulation([sleeper]).run_to_end(_forgetful, crashes=CrashPoint(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"crash_at=CrashPoint"):
        Simulation([sleeper]).run_to_end(_forgetful, crashes=[3])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match=r"async def live\(supervisor\)"):
        Simulation([sleeper]).run(lambda supervisor: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidArgumentError, match="leave durability= out"):
        Simulation([sleeper], durability="full")
    with pytest.raises(InvalidArgumentError, match="seed"), seeded_scheduling("x"):  # type: ignore[arg-type]
        pass


async def test_what_starts_trio_says_so_within_it(autojump_clock: MockClock) -> None:
    """S39: a Trio run within a Trio run is refused with what to write, and not by Trio."""
    simulation = Simulation([sleeper])
    with pytest.raises(VirtualTimeError, match=r"async with virtual_supervisor"):
        simulation.run(_eight)
    with pytest.raises(VirtualTimeError, match=r"async with virtual_supervisor"):
        simulation.run_to_end(_eight)
    with pytest.raises(VirtualTimeError, match=r"await main\(\)"):
        run_virtual(trio.sleep, 1)
    with pytest.raises(VirtualTimeError, match=r"await supervisor\.list\(\)"):
        simulation.disk.snapshots()


async def _block() -> None:
    async with virtual_supervisor([sleeper]):
        pass


def test_under_asyncio_it_says_who_claimed_the_test() -> None:
    with pytest.raises(VirtualTimeError, match=r"asyncio_mode=auto.*anyio_backend"):
        asyncio.run(_block())


remembered: dict[str, str] = {}
token: object = None


async def remember() -> None:
    global token
    token = remembered["token"] = "secret"


@workflow
async def forgetful(ctx: Context, _: None) -> list[object]:
    await ctx.step("remember", remember)
    await ctx.sleep("a-while", 60)
    return [remembered.get("token"), token]


async def _forgetful(supervisor: Supervisor) -> list[object]:
    return await (await supervisor.spawn(forgetful, "w")).result()


class TestWhatAProcessKeptInAGlobal:
    """S39: every process of a simulation begins without what the one before it left in plain globals."""

    def test_is_not_there_after_a_crash_at_any_write(self) -> None:
        writes = Simulation([forgetful]).run(_forgetful).writes
        for keep_globals, expected in ((False, {("secret", "secret"), (None, None)}), (True, {("secret", "secret")})):
            found: set[tuple[object, ...]] = set()
            for point in writes[:-1]:
                simulation = Simulation([forgetful], keep_globals=keep_globals)
                value = simulation.run_to_end(_forgetful, crashes=[CrashPoint(point.number, "after")])[-1].value
                assert value is not None
                found.add(tuple(value))
            assert found == expected

    def test_is_not_there_after_an_end_in_order_nor_on_another_computer(self) -> None:
        async def look(supervisor: Supervisor) -> tuple[object, ...]:
            return dict(remembered), token

        simulation = Simulation([forgetful])
        assert simulation.run(_forgetful).value == ["secret", "secret"]
        assert (remembered, token) == ({"token": "secret"}, "secret"), "the test can look"
        assert simulation.run(look).value == ({}, None)
        assert simulation.run(_forgetful).value == ["secret", "secret"]
        assert Simulation([forgetful]).run(look).value == ({}, None)

    def test_but_what_the_test_did_in_between_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def look(supervisor: Supervisor) -> tuple[object, ...]:
            return dict(remembered), token

        simulation = Simulation([forgetful])
        monkeypatch.setitem(remembered, "before", "b")
        simulation.run(_forgetful)
        monkeypatch.setitem(globals(), "token", 3)
        assert simulation.run(look).value == ({"before": "b"}, 3)

    def test_is_not_there_in_further_modules(self) -> None:
        shop = ModuleType("shop")
        vars(shop).update(seen=[])

        async def see(supervisor: Supervisor) -> int:
            shop.seen.append(1)
            return len(shop.seen)

        simulation = Simulation([forgetful], modules=[shop])
        assert [simulation.run(see).value for _ in range(2)] == [1, 1]

    def test_is_found_by_a_machine(self) -> None:
        class Machine(WorkflowMachine):
            workflows: ClassVar[Any] = [forgetful]

            @process_rule(plan=st.just(ProcessPlan(stays_s=1)))
            async def begin(self, supervisor: Supervisor) -> None:
                await supervisor.spawn(forgetful, "w")

            async def check_end(self, supervisor: Supervisor) -> None:
                for info in await supervisor.list():
                    assert await (await supervisor.get(info.id)).result() == ["secret", "secret"]

        class Remembering(Machine):
            keep_globals: ClassVar[bool] = True

        small = settings(max_examples=5, stateful_step_count=2, deadline=None, database=None, derandomize=True)
        with pytest.raises(AssertionError, match="secret"):
            run_state_machine_as_test(Machine, settings=small)
        run_state_machine_as_test(Remembering, settings=small)
