"""Rollback under a supervisor: awaited, resumed at the next start, brought back by its alarm, recovered."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.workflow import (
    Context,
    RollbackContext,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowState,
    workflow,
)

calls: list[str] = []
undo_fails = False
pay_fails = True


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global undo_fails, pay_fails
    calls.clear()
    undo_fails, pay_fails = False, True


async def book(what: str) -> str:
    calls.append(what)
    return what


async def cancel_booking(ctx: RollbackContext, booked: str) -> None:
    if undo_fails:
        raise ConnectionError("not now")
    await trio.sleep(10)
    calls.append(f"cancel {booked}")


@workflow(name="trip")
async def trip(ctx: Context, input: Any) -> str:
    await ctx.rollback_checkpoint("trip")
    for what in ("flight", "hotel"):
        await ctx.step(
            what, book, what, rollback=cancel_booking, retry_backoff_base=500, retry_backoff_max=1000, max_retries=9
        )
    if pay_fails:
        raise ValueError("no money")
    return "booked"


UNDONE = ["flight", "hotel", "cancel hotel", "cancel flight"]


async def test_the_result_comes_once_everything_is_undone(disk: Disk, autojump_clock: MockClock) -> None:
    """S35: until then the workflow takes messages and says where it stands."""
    async with disk.process(trip) as supervisor:
        handle = await supervisor.spawn(trip, "t-1")
        await trio.sleep(1)
        assert await handle.get_state() is WorkflowState.ROLLING_BACK
        error = await handle.get_error()
        assert error is not None
        assert error.message == "no money"
        await handle.message("hurry")
        with pytest.raises(WorkflowFailedError, match="no money"):
            await handle.result()
        assert calls == UNDONE
        with pytest.raises(WorkflowEndedError):
            await handle.message("too late")


async def test_the_next_start_goes_on_with_a_rollback(disk: Disk, autojump_clock: MockClock) -> None:
    """S35: nobody has to ask for it; the handler that the process died in runs again, those before it do not."""
    async with disk.process(trip) as supervisor:
        await supervisor.spawn(trip, "t-1")
        await trio.sleep(15)
        assert calls == ["flight", "hotel", "cancel hotel"]
        disk.die()
    async with disk.process(trip) as supervisor:
        await trio.sleep(15)
        handle = await supervisor.get("t-1")
        assert await handle.get_state() is WorkflowState.FAILED
    # The handler in progress went on for its grace, but that it was done could not be recorded any more.
    assert calls == [*UNDONE, "cancel flight"]


async def test_a_pause_between_attempts_outlives_the_process_and_an_eviction(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S35, S24: the alarm brings it back, and not before."""
    global undo_fails
    undo_fails = True
    async with disk.process(trip) as supervisor:
        handle = await supervisor.spawn(trip, "t-1")
        await trio.sleep(1)
        began = trio.current_time()
        await handle.evict()
        undo_fails = False
        await trio.sleep(900)
        assert await handle.get_state() is WorkflowState.ROLLING_BACK
        assert calls == ["flight", "hotel"]
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        assert calls == UNDONE
        assert 1000 <= trio.current_time() - began + 1 <= 1025


async def test_a_wake_ends_the_pause(disk: Disk, autojump_clock: MockClock) -> None:
    """S24, S35: of a dormant workflow too."""
    global undo_fails
    undo_fails = True
    async with disk.process(trip) as supervisor:
        handle = await supervisor.spawn(trip, "t-1")
        await trio.sleep(1)
        await handle.evict()
        undo_fails = False
        began = trio.current_time()
        await handle.wake()
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        assert trio.current_time() - began < 25
    assert calls == UNDONE


async def test_cancel_ends_the_rollback(disk: Disk, autojump_clock: MockClock) -> None:
    """S32: what is not undone stays."""
    async with disk.process(trip) as supervisor:
        handle = await supervisor.spawn(trip, "t-1")
        await trio.sleep(15)
        await handle.cancel()
        with pytest.raises(WorkflowCancelledError):
            await handle.result()
        await trio.sleep(1000)
    assert calls == ["flight", "hotel", "cancel hotel"]


async def test_recover_runs_what_was_undone_again(disk: Disk, autojump_clock: MockClock) -> None:
    """S36: on a live supervisor, and over a restart."""
    global pay_fails
    async with disk.process(trip) as supervisor:
        handle = await supervisor.spawn(trip, "t-1")
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        await handle.recover()
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        assert calls == UNDONE * 2
        pay_fails = False
        await handle.recover()
        disk.die()
    async with disk.process(trip) as supervisor:
        assert await (await supervisor.get("t-1")).result() == "booked"
    assert set(calls[8:]) == {"flight", "hotel"}
    assert calls[-1] == "hotel"


async def test_a_shutdown_waits_for_the_handler_within_its_grace(disk: Disk, autojump_clock: MockClock) -> None:
    """S49, S35: the next handler is for the next start."""
    async with disk.process(trip) as supervisor:
        await supervisor.spawn(trip, "t-1")
        await trio.sleep(5)
    assert calls == ["flight", "hotel", "cancel hotel"]
    async with disk.process(trip) as supervisor:
        handle = await supervisor.get("t-1")
        with pytest.raises(WorkflowFailedError):
            await handle.result()
    assert calls == UNDONE
