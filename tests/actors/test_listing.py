"""Listing and counting workflows: what is durable is shown, and nothing is opened for it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import Supervisor, SupervisorClosedError, WorkflowInfo, WorkflowNotFoundError
from perdure.storage import CatalogRow, InvalidAttributeError, StorageError
from perdure.workflow import Context, InvalidArgumentError, WorkflowState, workflow


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go", names=["go"])).body


@workflow(name="bad")
async def bad(ctx: Context, input: None) -> None:
    raise ValueError("no")


async def fill(supervisor: Supervisor) -> None:
    for number in range(6):
        await supervisor.spawn(nap, f"nap-{number}", 10_000, attributes={"customer": number % 2, "vip": number == 0})
        await trio.sleep(1)
    await supervisor.spawn(waiter, "waiter-1", attributes={"customer": 1})
    await trio.sleep(1)
    await supervisor.spawn(bad, "bad-1")
    await trio.sleep(1)
    await (await supervisor.spawn(nap, "done-1", 0)).result()
    await trio.sleep(1)


def ids(infos: list[WorkflowInfo]) -> list[str]:
    return [info.id for info in infos]


async def test_workflows_are_found_by_what_is_asked_for_and_none_is_opened(
    disk: Disk, autojump_clock: MockClock
) -> None:
    naps = [f"nap-{number}" for number in range(6)]
    async with disk.process(nap, waiter, bad) as supervisor:
        began = disk.clock.now_ms() / 1000
        await fill(supervisor)
    async with disk.process(nap, waiter, bad) as supervisor:
        assert ids(await supervisor.list()) == [*naps, "waiter-1", "bad-1", "done-1"]
        assert ids(await supervisor.list(workflow=nap)) == [*naps, "done-1"]
        assert ids(await supervisor.list(workflow="waiter")) == ["waiter-1"]
        assert ids(await supervisor.list(state="failed")) == ["bad-1"]
        assert ids(await supervisor.list(state=[WorkflowState.FAILED, "completed"])) == ["bad-1", "done-1"]
        assert ids(await supervisor.list(state=WorkflowState.SLEEPING, workflow=nap)) == naps
        assert ids(await supervisor.list(created_before=began + 2)) == naps[:2]
        assert ids(await supervisor.list(created_before=datetime.fromtimestamp(began + 2, UTC))) == naps[:2]
        assert ids(await supervisor.list(attributes={"customer": 1})) == ["nap-1", "nap-3", "nap-5", "waiter-1"]
        assert ids(await supervisor.list(attributes={"customer": 0, "vip": True})) == ["nap-0"]
        assert ids(await supervisor.list(attributes={"customer": True})) == []
        assert ids(await supervisor.list(attributes={"vip": 1})) == []
        assert ids(await supervisor.list(parent_id="nap-0")) == []
        assert await supervisor.count() == 9
        assert await supervisor.count(state="sleeping", workflow=nap, attributes={"customer": 1}) == 3
        assert await supervisor.count(state=["failed", "cancelled"]) == 1
        assert disk.store.opens == []


async def test_pages_go_on_where_they_ended_also_after_a_deletion(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap, waiter, bad) as supervisor:
        await fill(supervisor)
        everything = await supervisor.list()
        pages: list[WorkflowInfo] = []
        while page := await supervisor.list(after=pages[-1] if pages else None, limit=2):
            pages += page
        assert pages == everything
        assert ids(await supervisor.list(after="nap-4", limit=2)) == ["nap-5", "waiter-1"]
        last = next(info for info in everything if info.id == "bad-1")
        await supervisor.delete("bad-1")
        assert ids(await supervisor.list(after=last)) == ["done-1"]
        with pytest.raises(WorkflowNotFoundError, match="bad-1"):
            await supervisor.list(after="bad-1")


async def test_an_entry_says_what_is_known(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap, waiter, bad) as supervisor:
        began = disk.clock.now_ms() / 1000
        await supervisor.spawn(nap, "nap-1", 500, attributes={"customer": 7})
        await trio.sleep(1)
        (info,) = await supervisor.list()
        assert (info.id, info.workflow, info.state, info.attributes) == (
            "nap-1",
            "nap",
            WorkflowState.SLEEPING,
            {"customer": 7},
        )
        assert info.created_at == began
        assert began <= info.updated_at <= began + 1
        assert info.next_wake == began + 500
        assert (info.mail_waiting, info.parent_id, info.is_live, info.reason) == (False, None, True, None)
        await (await supervisor.get("nap-1")).evict()
        await (await supervisor.get("nap-1")).evict()
        (info,) = await supervisor.list()
        assert (info.state, info.is_live, info.next_wake) == (WorkflowState.SLEEPING, False, began + 500)
        await trio.sleep(600)
        (info,) = await supervisor.list()
        assert (info.state, info.is_live, info.next_wake) == (WorkflowState.COMPLETED, False, None)
        assert info.updated_at == pytest.approx(began + 500, abs=1)


async def test_a_live_workflow_shows_its_state_now(disk: Disk, autojump_clock: MockClock) -> None:
    """Not as the catalog had it when it last was written."""
    async with disk.process(nap, waiter) as supervisor:
        handle = await supervisor.spawn(waiter, "waiter-1")
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle.message, "go", 7)
            assert await handle.result() == 7
            (info,) = await supervisor.list()
            assert info.state is WorkflowState.COMPLETED
            assert await supervisor.count(state="completed") == 1
            assert await supervisor.count(state=["pending", "running", "sleeping"]) == 0


async def test_one_that_cannot_run_has_a_reason(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap, waiter, bad) as supervisor:
        await fill(supervisor)
    async with disk.process(waiter) as supervisor:
        (info,) = await supervisor.list(workflow=nap, state="sleeping", limit=1)
        assert "no workflow 'nap' is registered" in (info.reason or "")
        (info,) = await supervisor.list(workflow=waiter)
        assert info.reason is None
        (info,) = await supervisor.list(workflow=bad)
        assert info.reason is None, "it has ended"


async def test_attributes_and_times_of_making_outlive_the_catalog(disk: Disk, autojump_clock: MockClock) -> None:
    """S50: deleted, and read again from the files, it finds what it found."""
    async with disk.process(nap, waiter, bad) as supervisor:
        await fill(supervisor)
        everything = await supervisor.list()
    if disk.kind == "sqlite":
        (disk.path / "catalog.sqlite").unlink()
    async with disk.process(nap, waiter, bad) as supervisor:
        found = await supervisor.list()
        assert [(info.id, info.created_at, info.attributes, info.next_wake) for info in found] == [
            (info.id, info.created_at, info.attributes, info.next_wake) for info in everything
        ]
        assert ids(await supervisor.list(attributes={"customer": 1})) == ["nap-1", "nap-3", "nap-5", "waiter-1"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"state": "finished"}, "no state of a workflow"),
        ({"state": [7]}, "no state of a workflow"),
        ({"workflow": 7}, "must be a function"),
        ({"created_before": "yesterday"}, "seconds since the epoch"),
        ({"created_before": datetime(2030, 1, 1)}, "timezone"),
        ({"parent_id": 7}, "workflow id"),
        ({"after": 7}, r"after=page\[-1\]"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "10000"),
        ({"limit": True}, "whole number"),
    ],
)
async def test_what_cannot_be_asked_is_refused_with_what_to_write(
    disk: Disk, autojump_clock: MockClock, options: dict[str, Any], says: str
) -> None:
    async with disk.process(nap) as supervisor:
        with pytest.raises(InvalidArgumentError, match=says):
            await supervisor.list(**options)


async def test_what_can_be_no_attribute_is_refused_when_spawned_and_when_searched(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(nap) as supervisor:
        wrong: dict[str, Any] = {"customer": [7]}
        with pytest.raises(InvalidAttributeError, match="customer"):
            await supervisor.spawn(nap, "nap-1", 1, attributes=wrong)
        with pytest.raises(InvalidAttributeError, match="customer"):
            await supervisor.count(attributes=wrong)
        assert disk.store.written == []


async def test_nothing_is_listed_once_the_block_is_left(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        pass
    for ask in (supervisor.list(), supervisor.count(), supervisor.stats(), supervisor.faulted()):
        with pytest.raises(SupervisorClosedError):
            await ask


async def test_a_catalog_that_cannot_be_written_is_listed_as_it_is(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S41: looking goes on while the disk is full."""
    async with disk.process(nap) as supervisor:
        await supervisor.spawn(nap, "nap-1", 100)

        async def refuse(rows: list[CatalogRow]) -> None:
            raise StorageError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(disk.store, "put_rows", refuse)
            await trio.sleep(1)
            assert ids(await supervisor.list()) == ["nap-1"]
