"""Deleting in the background what ended long ago, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors.retention import PAGE, PAUSE_S, check_retention
from perdure.storage import StorageError
from perdure.workflow import Context, InvalidArgumentError, WorkflowState, workflow

DAY = 86_400.0


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="bad")
async def bad(ctx: Context, input: None) -> None:
    raise ValueError("no")


async def test_what_ended_is_kept_for_its_time_and_then_deleted(disk: Disk, autojump_clock: MockClock) -> None:
    retention = {"completed": timedelta(days=2), "failed": 5 * DAY}
    async with disk.process(nap, bad, retention=retention) as supervisor:
        await supervisor.spawn(nap, "short", 10)
        await supervisor.spawn(nap, "long", 30 * DAY)
        await supervisor.spawn(bad, "bad")
        await (await supervisor.spawn(nap, "gone", 30 * DAY)).cancel()
        await trio.sleep(2 * DAY)
        assert set(disk.rows) == {"short", "long", "bad", "gone"}
        await trio.sleep(60)
        assert set(disk.rows) == {"long", "bad", "gone"}
        await trio.sleep(3 * DAY)
        assert set(disk.rows) == {"long", "gone"}
        await trio.sleep(26 * DAY)
        assert {info.id: info.state for info in await supervisor.list()} == {
            "long": WorkflowState.COMPLETED,
            "gone": WorkflowState.CANCELLED,
        }
        await trio.sleep(2 * DAY)
        assert set(disk.rows) == {"gone"}, "what is not named is kept"
        assert set(disk.namespaces) == {"gone"}


async def test_the_age_goes_on_over_restarts(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        await (await supervisor.spawn(nap, "nap-1", 0)).result()
    await trio.sleep(3 * DAY)
    async with disk.process(nap, retention={"completed": 4 * DAY}):
        await trio.sleep(DAY / 2)
        assert set(disk.rows) == {"nap-1"}
    await trio.sleep(DAY)
    async with disk.process(nap, retention={"completed": 4 * DAY}) as supervisor:
        await trio.sleep(1)
        assert await supervisor.count() == 0
        assert disk.namespaces == {}


async def test_many_go_in_pages_and_what_runs_does_not_wait_for_them(disk: Disk, autojump_clock: MockClock) -> None:
    count = 3 * PAGE + 1
    async with disk.process(nap) as supervisor:
        for number in range(count):
            await supervisor.spawn(nap, f"nap-{number}", 0)
        await trio.sleep(10)
    async with disk.process(nap, retention={"completed": 1}) as supervisor:
        await trio.sleep(PAUSE_S / 2)
        assert count - 2 * PAGE <= await supervisor.count() <= count - PAGE
        assert disk.store.opens == [], "nothing is opened to be deleted"
        await trio.sleep(10 * PAUSE_S)
        assert await supervisor.count() == 0


async def test_what_has_duties_or_a_problem_or_is_recovered_is_not_deleted(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(nap, bad) as supervisor:
        for name in ("owing", "sick", "recovered", "plain"):
            await supervisor.spawn(bad, name)
        await trio.sleep(1)
    store = disk.next_store()
    await store.acquire()
    rows = {row.workflow_id: row for row in await store.list_rows()}
    # Its duties are known from its own file; here only the row is of interest.
    await store.put_rows(
        [replace(rows["owing"], next_wake_ms=2**42), replace(rows["sick"], problem="storage: its file is gone")]
    )
    await store.aclose()
    async with disk.process(nap, bad, retention={"failed": DAY}) as supervisor:
        handle = await supervisor.get("recovered")
        await trio.sleep(DAY / 2)
        await handle.recover()
        await trio.sleep(DAY / 2 + 60)
        assert set(disk.rows) == {"owing", "sick", "recovered"}
        await trio.sleep(DAY)
        assert set(disk.rows) == {"owing", "sick"}


async def test_what_comes_back_while_others_are_deleted_is_kept(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S43: whether it has ended is asked again when its turn comes, also of one that is not in memory."""
    is_broken = True

    @workflow(name="mended")
    async def mended(ctx: Context, input: None) -> None:
        if is_broken:
            raise ValueError("no")
        await ctx.sleep("nap", 30 * DAY)

    async with disk.process(mended, retention={"failed": 10}) as supervisor:
        for name in ("first", "second"):
            await supervisor.spawn(mended, name)
        delete = disk.store.delete
        begun = trio.Event()

        async def slow(workflow_id: str) -> None:
            begun.set()
            await trio.sleep(60)
            await delete(workflow_id)

        monkeypatch.setattr(disk.store, "delete", slow)
        await begun.wait()
        is_broken = False
        handle = await supervisor.get("second")
        await handle.recover()
        await trio.sleep(1)
        await handle.evict()
        await trio.sleep(DAY)
        assert set(disk.rows) == set(disk.namespaces) == {"second"}
        assert await handle.get_state() is WorkflowState.SLEEPING


async def test_one_that_cannot_be_deleted_does_not_keep_the_others(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S41: it is tried again later."""
    async with disk.process(nap, retention={"completed": 10}) as supervisor:
        for number in range(2 * PAGE):
            await supervisor.spawn(nap, f"nap-{number:02}", 0)
        delete = disk.store.delete
        tries = 0

        async def refuse(workflow_id: str) -> None:
            nonlocal tries
            if workflow_id == "nap-03":
                tries += 1
                raise StorageError("the file cannot be removed")
            await delete(workflow_id)

        with monkeypatch.context() as patch:
            patch.setattr(disk.store, "delete", refuse)
            await trio.sleep(60)
            assert set(disk.rows) == {"nap-03"}
        await trio.sleep(7_200)
        assert disk.rows == {}
        assert 1 <= tries < 20


async def test_trouble_with_the_catalog_is_waited_out(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk.process(nap, retention={"completed": 10}) as supervisor:

        async def refuse(state: str, before_ms: int, **options: Any) -> Any:
            raise StorageError("the disk fails")

        with monkeypatch.context() as patch:
            patch.setattr(disk.store, "find_ended", refuse)
            await supervisor.spawn(nap, "nap-1", 0)
            await trio.sleep(600)
            assert set(disk.rows) == {"nap-1"}
        await trio.sleep(3_700)
        assert disk.rows == {}


async def test_leaving_the_block_in_the_middle_is_orderly(disk: Disk, autojump_clock: MockClock) -> None:
    """S49: what is being deleted is gone or there, and the next life goes on."""
    async with disk.process(nap) as supervisor:
        for number in range(3 * PAGE):
            await supervisor.spawn(nap, f"nap-{number}", 0)
        await trio.sleep(10)
    store = disk.next_store()
    store.delay_s = 0.01
    async with disk.process(nap, retention={"completed": 1}):
        await trio.sleep(PAUSE_S / 2)
    left = len(disk.rows)
    assert 0 < left < 3 * PAGE
    assert set(disk.rows) == set(disk.namespaces)
    async with disk.process(nap, retention={"completed": 1}):
        await trio.sleep(10)
        assert disk.rows == {}


@pytest.mark.parametrize(
    ("retention", "kept_ms"),
    [
        (None, {}),
        ({}, {}),
        ({"completed": 1.5}, {"completed": 1_500}),
        ({WorkflowState.FAILED: timedelta(days=1), "cancelled": 0}, {"failed": 86_400_000, "cancelled": 0}),
    ],
)
def test_times_are_seconds_or_timedeltas(retention: Any, kept_ms: dict[str, int]) -> None:
    assert check_retention(retention) == kept_ms


@pytest.mark.parametrize(
    ("retention", "says"),
    [
        (30, "mapping"),
        ({"running": 30}, "that have ended"),
        ({7: 30}, "that have ended"),
        ({"completed": -1}, "0 or more"),
        ({"completed": timedelta(days=-1)}, "0 or more"),
        ({"completed": "30 days"}, "number of seconds"),
        ({"completed": float("inf")}, "finite"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(retention: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        check_retention(retention)
    assert "timedelta(days=30)" in str(caught.value)


async def test_what_is_not_kept_at_all_goes_soon_and_nobody_looks_without_rest(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(nap, retention={"completed": 0}) as supervisor:
        looks = 0
        find_ended = disk.store.find_ended

        async def counted(state: str, before_ms: int, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return await find_ended(state, before_ms, **options)

        disk.store.find_ended = counted  # type: ignore[method-assign]
        await supervisor.spawn(nap, "short", 10)
        await trio.sleep(100)
        assert set(disk.rows) == set()
        assert looks <= 2 * 100 + 10, (
            "a look that finds something, or nothing, and one for what comes next; once a second"
        )
