"""Workflows that cannot run: each is listed with its reason, and none of the others is kept from running."""

# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import UnregisteredWorkflowError
from perdure.storage import CatalogRow, CorruptStoreError, StorageError
from perdure.workflow import Context, HistoryDivergedError, InvalidArgumentError, workflow


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="nap")
async def other_nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("another", seconds)
    return "rested"


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go", names=["go"])).body


async def test_nothing_is_wrong_with_what_runs_waits_or_has_ended(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap, waiter) as supervisor:
        await supervisor.spawn(nap, "nap-1", 5)
        await supervisor.spawn(waiter, "waiter-1")
        await trio.sleep(10)
        assert await supervisor.faulted() == []
    async with disk.process(waiter) as supervisor:
        assert await supervisor.faulted() == [], "what has ended needs no function"


async def test_dormant_workflows_whose_function_is_unknown_are_told_from_the_catalog(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """The ones that only wait too, without anybody opening them; registered again, they go on."""
    async with disk.process(nap, waiter) as supervisor:
        for number in range(3):
            await supervisor.spawn(waiter, f"waiter-{number}")
            await trio.sleep(1)
        await supervisor.spawn(nap, "nap-1", 5_000)
        await trio.sleep(1)
    async with disk.process(nap) as supervisor:
        faulted = await supervisor.faulted()
        assert [found.id for found in faulted] == ["waiter-0", "waiter-1", "waiter-2"]
        assert {found.workflow for found in faulted} == {"waiter"}
        assert all("workflows=[waiter]" in found.reason for found in faulted)
        assert [found.since for found in faulted] == sorted(found.since for found in faulted)
        assert [found.id for found in await supervisor.faulted(limit=2)] == ["waiter-0", "waiter-1"]
        assert disk.store.opens == []
        with pytest.raises(UnregisteredWorkflowError):
            await (await supervisor.get("waiter-0")).result()
    async with disk.process(nap, waiter) as supervisor:
        assert await supervisor.faulted() == []
        handle = await supervisor.get("waiter-0")
        await handle.message("go", 7)
        assert await handle.result() == 7


async def test_one_that_diverged_is_told_with_its_error_and_since_when(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        await supervisor.spawn(nap, "nap-1", 50)
        await trio.sleep(1)
    async with disk.process(other_nap) as supervisor:
        began = disk.clock.now_ms() / 1000
        await trio.sleep(100)
        (found,) = await supervisor.faulted()
        assert (found.id, found.workflow) == ("nap-1", "nap")
        assert isinstance(found.error, HistoryDivergedError)
        assert found.reason == str(found.error)
        assert began + 40 <= found.since <= began + 60
        (info,) = await supervisor.list()
        assert info.reason == found.reason
        assert (await supervisor.stats()).faulted == 1
        # Tried again, it is found again.
        await trio.sleep(100)
        await (await supervisor.get("nap-1")).wake()
        await trio.sleep(5)
        (again,) = await supervisor.faulted()
        assert again.since > found.since
    async with disk.process(nap) as supervisor:
        await trio.sleep(100)
        assert await supervisor.faulted() == []
        assert await (await supervisor.get("nap-1")).result() == "rested"


async def test_a_damaged_file_is_told_until_it_is_mended(disk: Disk, autojump_clock: MockClock) -> None:
    """S41: with its name, and the others go on."""
    if disk.kind == "memory":
        async with disk.process(nap) as supervisor:
            sick = CatalogRow("nap-1", "nap", "sleeping", 5, False, 1_000, 2_000, "storage: gone")
            await disk.store.put_rows([sick])
            (found,) = await supervisor.faulted()
            assert (found.id, found.reason, found.since, found.error) == ("nap-1", "storage: gone", 2.0, None)
        return
    async with disk.process(nap) as supervisor:
        await supervisor.spawn(nap, "nap-1", 5)
        await supervisor.spawn(nap, "nap-2", 5)
        await trio.sleep(1)
        path = Path(supervisor.describe("nap-1"))
    good = path.read_bytes()
    path.write_bytes(b"garbage " * 1_000)
    async with disk.process(nap) as supervisor:
        await trio.sleep(10)
        assert await (await supervisor.get("nap-2")).result() == "rested"
        (found,) = await supervisor.faulted()
        assert found.id == "nap-1"
        assert str(path) in found.reason
        assert isinstance(found.error, CorruptStoreError)
        path.write_bytes(good)
        assert await (await supervisor.get("nap-1")).get_output() is None
        assert await supervisor.reindex() == 0
        await (await supervisor.get("nap-1")).wake()
        assert await (await supervisor.get("nap-1")).result() == "rested"
        assert await supervisor.faulted() == []


async def test_a_fault_of_the_storage_is_told_while_it_lasts(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk.process(nap) as supervisor:
        handle = await supervisor.spawn(nap, "nap-1", 50)
        await trio.sleep(1)
        await handle.evict()
        open_driver = disk.store.open_driver

        async def refuse(workflow_id: str, *, create: bool = False) -> Any:
            raise StorageError("the disk fails")

        with monkeypatch.context() as patch:
            patch.setattr(disk.store, "open_driver", refuse)
            await trio.sleep(60)
            (found,) = await supervisor.faulted()
            assert "the disk fails" in found.reason
        assert disk.store.open_driver == open_driver
        await trio.sleep(100)
        await handle.wake()
        assert await handle.result() == "rested"
        assert await supervisor.faulted() == []


async def test_a_limit_that_is_none_is_refused(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        with pytest.raises(InvalidArgumentError, match="limit"):
            await supervisor.faulted(limit=0)
