"""A supervisor in virtual time, whose block is a process that can die."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from perdure.storage import MemoryDriver
from perdure.testing import (
    CrashPoint,
    FaultyDriver,
    SimulatedClock,
    SimulatedCrash,
    SimulatedDisk,
    Simulation,
    VirtualTimeError,
    run_virtual,
    virtual_supervisor,
)
from perdure.workflow import (
    Context,
    InvalidArgumentError,
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
