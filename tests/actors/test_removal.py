"""Deleting workflows: only what has ended, for good, and never the old result under an id that is used again."""

# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError, WorkflowNotEndedError, WorkflowNotFoundError
from perdure.storage import CatalogRow, StorageError
from perdure.workflow import Context, WorkflowState, workflow


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return f"rested {seconds:g}"


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go", names=["go"])).body


async def test_an_ended_workflow_is_gone_and_its_id_starts_afresh(disk: Disk, autojump_clock: MockClock) -> None:
    """S52: with another input, and with nothing of the old history."""
    async with disk.process(nap) as supervisor:
        old = await supervisor.spawn(nap, "nap-1", 5, attributes={"customer": 7})
        assert await old.result() == "rested 5"
        await supervisor.delete("nap-1")
        assert await supervisor.count() == 0
        assert "nap-1" not in disk.namespaces
        with pytest.raises(WorkflowNotFoundError):
            await supervisor.get("nap-1")
        with pytest.raises(WorkflowNotFoundError):
            await old.get_state()
        with pytest.raises(WorkflowNotFoundError):
            await old.result()
        with pytest.raises(WorkflowNotFoundError):
            await supervisor.delete("nap-1")
        assert await (await supervisor.spawn(nap, "nap-1", 9)).result() == "rested 9"
        assert await old.result() == "rested 9", "a handle stands for an id"
        assert await supervisor.count(attributes={"customer": 7}) == 0


@pytest.mark.parametrize("is_live", [True, False])
async def test_what_goes_on_is_refused_and_goes_on(disk: Disk, autojump_clock: MockClock, is_live: bool) -> None:
    async with disk.process(nap) as supervisor:
        handle = await supervisor.spawn(nap, "nap-1", 50)
        await trio.sleep(1)
        if not is_live:
            await handle.evict()
        with pytest.raises(WorkflowNotEndedError, match=r"cancel it first.*'nap-1'.*cancel\(\)") as caught:
            await supervisor.delete("nap-1")
        assert (caught.value.workflow_id, caught.value.state) == ("nap-1", "sleeping")
        assert await handle.result() == "rested 50"
        await supervisor.delete("nap-1")


async def test_a_cancelled_workflow_is_deleted_as_soon_as_it_has_unwound(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        handle = await supervisor.spawn(nap, "nap-1", 50)
        await wait_all_tasks_blocked()
        await handle.cancel()
        await supervisor.delete("nap-1")
        assert "nap-1" not in disk.namespaces
        await trio.sleep(100)
        assert disk.rows == {}
        assert await supervisor.count() == 0


async def test_deletions_spawns_and_looks_at_once_leave_one_life_or_none(disk: Disk, autojump_clock: MockClock) -> None:
    """S44, S52: whatever comes first, a spawn gives the result of its own input."""
    async with disk.process(nap) as supervisor:
        results: list[str] = []

        async def spawn(seconds: float) -> None:
            with suppress(WorkflowNotFoundError):
                results.append(await (await supervisor.spawn(nap, "nap-1", seconds)).result())

        async def delete() -> None:
            with suppress(WorkflowNotFoundError, WorkflowNotEndedError):
                await supervisor.delete("nap-1")

        async def look() -> None:
            with suppress(WorkflowNotFoundError):
                await (await supervisor.get("nap-1")).get_output()

        for number in range(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(spawn, number)
                for _ in range(3):
                    nursery.start_soon(look)
                    nursery.start_soon(delete)
                await trio.sleep(0 if number % 2 else number)
                nursery.start_soon(delete)
                nursery.start_soon(look)
            while disk.rows:
                await delete()
                await trio.sleep(1)
            assert set(results) <= {f"rested {number}"}
            results.clear()
            assert disk.namespaces == {}


async def test_who_waits_for_the_result_is_told_that_it_is_gone(disk: Disk, autojump_clock: MockClock) -> None:
    """S51: and nobody waits for ever."""
    async with disk.process(nap, waiter) as supervisor:
        handle = await supervisor.spawn(waiter, "waiter-1")
        await trio.sleep(1)
        await handle.evict()
        gone: list[str] = []

        async def wait() -> None:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - cancelled first, or deleted first
                await handle.result()
            gone.append(type(caught.value).__name__)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait)
            await trio.sleep(1)
            await handle.cancel()
            await supervisor.delete("waiter-1")
        assert set(gone) <= {"WorkflowCancelledError", "WorkflowNotFoundError"}
        assert len(gone) == 5


async def test_a_row_that_is_being_written_does_not_come_back(disk: Disk, autojump_clock: MockClock) -> None:
    """S52: the catalog is written in the background, and is not behind a deletion."""
    disk.store.delay_s = 0.3
    async with disk.process(nap) as supervisor:
        handle = await supervisor.spawn(nap, "nap-1", 0)
        await handle.result()
        for pause in (0.0, 0.1, 0.2):
            await trio.sleep(pause)
        await supervisor.delete("nap-1")
        await trio.sleep(5)
        assert disk.rows == {}
        assert await supervisor.list() == []


async def test_what_cannot_be_read_is_deleted_when_asked_for(disk: Disk, autojump_clock: MockClock) -> None:
    """S41: the way out that its error names."""
    if disk.kind == "memory":
        row = CatalogRow("nap-1", "nap", "sleeping", 5, False, 1, 1, "storage: gone")
        async with disk.process(nap) as supervisor:
            await disk.store.put_rows([row])
            await supervisor.delete("nap-1")
            assert await supervisor.count() == 0
        return
    async with disk.process(nap) as supervisor:
        await supervisor.spawn(nap, "nap-1", 5_000)
        await trio.sleep(1)
        path = Path(supervisor.describe("nap-1"))
    path.write_bytes(b"garbage " * 1_000)
    async with disk.process(nap) as supervisor:
        await supervisor.reindex()
        (sick,) = await supervisor.faulted()
        assert "set aside" in sick.reason
        await supervisor.delete("nap-1")
        assert list(path.parent.iterdir()) == []
        assert await (await supervisor.spawn(nap, "nap-1", 1)).result() == "rested 1"


@workflow(name="caller")
async def caller(ctx: Context, input: None) -> str:
    return await ctx.call("nap", nap, 1, workflow_id="child")


async def test_a_child_is_deleted_once_its_caller_knows_how_it_ended(disk: Disk, autojump_clock: MockClock) -> None:
    """S52: right after its end it is waited for that it has told; the caller goes on with what it was told."""
    async with disk.process(nap, caller) as supervisor:
        parent = await supervisor.spawn(caller, "parent")
        child = None
        while child is None:
            await trio.sleep(0.1)
            with suppress(WorkflowNotFoundError):
                child = await supervisor.get("child")
        assert await child.result() == "rested 1"
        await supervisor.delete("child")
        assert await parent.result() == "rested 1"
        await supervisor.delete("parent")
        assert disk.rows == {}


async def test_one_that_cannot_do_its_duties_is_refused(disk: Disk, autojump_clock: MockClock) -> None:
    """Its caller's storage fails, so nobody can be told how it ended; later it can."""
    async with disk.process(nap, caller) as supervisor:
        parent = await supervisor.spawn(caller, "parent")
        await trio.sleep(0.5)
        await parent.evict()
        open_driver = disk.store.open_driver

        async def refuse(workflow_id: str, *, create: bool = False) -> Any:
            if workflow_id == "parent":
                raise StorageError("the disk fails")
            return await open_driver(workflow_id, create=create)

        disk.store.open_driver = refuse  # type: ignore[method-assign]
        assert await (await supervisor.get("child")).result() == "rested 1"
        with pytest.raises(WorkflowNotEndedError, match="still has to tell others"):
            await supervisor.delete("child")
        disk.store.open_driver = open_driver  # type: ignore[method-assign]
        assert await parent.result() == "rested 1"
        await trio.sleep(200)
        await supervisor.delete("child")


async def test_a_deletion_that_waits_for_a_copy_holds_up_nobody_else(
    disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk.process(nap) as supervisor:
        await (await supervisor.spawn(nap, "nap-1", 0)).result()
        delete = disk.store.delete

        async def slow(workflow_id: str) -> None:
            await trio.sleep(60)
            await delete(workflow_id)

        monkeypatch.setattr(disk.store, "delete", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.delete, "nap-1")
            await trio.sleep(1)
            began = trio.current_time()
            assert await (await supervisor.spawn(nap, "nap-2", 2)).result() == "rested 2"
            assert trio.current_time() - began < 10
        assert set(disk.rows) == {"nap-2"}


async def test_nothing_is_deleted_once_the_block_is_left(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        await (await supervisor.spawn(nap, "nap-1", 0)).result()
    with pytest.raises(SupervisorClosedError):
        await supervisor.delete("nap-1")
    assert "nap-1" in disk.namespaces


async def life(disk: Disk, told: list[str]) -> None:
    async with disk.process(nap) as supervisor:
        told.append(await (await supervisor.spawn(nap, "nap-1", 5)).result())
        await supervisor.delete("nap-1")
        told.append("deleted")
        await supervisor.spawn(nap, "nap-1", 9)
        told.append("spawned")
        told.append(await (await supervisor.get("nap-1")).result())


@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_at_any_write_the_old_result_never_comes_back(
    driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock, when: When
) -> None:
    """S52: what was acknowledged is so in the next life, and the rest is done again."""
    with scheduled(7):
        whole = Disk(driver_kind, tmp_path / "whole")
        told: list[str] = []
        await life(whole, told)
        assert told == ["rested 5", "deleted", "spawned", "rested 9"]
        writes = len(whole.store.written)
    assert writes > 8
    outcomes: set[tuple[str, ...]] = set()
    for number in range(writes):
        disk = Disk(driver_kind, tmp_path / f"{number}-{when}")
        told = []
        with scheduled(7):
            disk.store.die_at = (number, when)
            with suppress(StorageError, WorkflowNotFoundError):
                await life(disk, told)
            if not disk.store.is_dead:
                disk.die()
        async with disk.process(nap) as supervisor:
            await trio.sleep(20)
            found = {info.id: info.state for info in await supervisor.list()}
            assert set(found.values()) <= {WorkflowState.COMPLETED}
            result = await (await supervisor.get("nap-1")).get_output() if found else None
            if "spawned" in told:
                assert result == "rested 9"
            elif "deleted" in told:
                assert result in (None, "rested 9")
            elif told:
                assert result in (None, "rested 5"), "it is there whole, or gone for good"
            else:
                assert result in (None, "rested 5")
            outcomes.add((*told, str(result)))
            if found:
                await supervisor.delete("nap-1")
            assert await (await supervisor.spawn(nap, "nap-1", 3)).result() == "rested 3"
    assert ("rested 5", "rested 5" if when == "before" else "None") in outcomes
    assert any(outcome[:2] == ("rested 5", "deleted") for outcome in outcomes)
