"""The catalog of an open store, read again: what is wrong is put right, and nothing is made later than it may be."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import trio
from file_stores import damage, opened, read, row, spawn

from perdure.storage import layout
from perdure.storage.driver import AlarmChange, Batch, Driver
from perdure.storage.file_store import FileStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_rows_come_back_from_the_files(data: Path) -> None:
    """S50: many of them, page after page, with nobody having to close anything."""
    async with opened(data, commit_in="inline") as store:
        ids = [f"order-{number:03}" for number in range(250)]
        for workflow_id in ids:
            await spawn(store, workflow_id, state="sleeping", alarm=70)
        expected = await store.list_rows(limit=1_000)
        store._access().catalog._connection.execute("DELETE FROM workflows WHERE workflow_id > 'order-100'")
        assert await store.reindex() == 149
        assert [replace(each, updated_at_ms=2_000) for each in await store.list_rows(limit=1_000)] == expected
        assert await store.reindex() == 0


@pytest.mark.parametrize("how", ["garbage", "gone"])
async def test_a_damaged_or_missing_file_becomes_a_problem_and_a_mended_one_none(data: Path, how: str) -> None:
    """S41: seen without anybody having opened the workflow."""
    async with opened(data) as store:
        await spawn(store, "order-1", state="sleeping", alarm=70)
        await spawn(store, "order-2")
        path = Path(store.path_of("order-1"))
        good = path.read_bytes()
        path.unlink() if how == "gone" else damage(path, how)
        assert await store.reindex() == 1
        sick = await store.get_row("order-1")
        assert sick is not None
        assert sick.problem is not None
        assert str(path) in sick.problem
        assert (await store.get_row("order-2")) == row("order-2", state="running")
        path.write_bytes(good)
        assert await store.reindex() == 1
        well = await store.get_row("order-1")
        assert well is not None
        assert (well.state, well.next_wake_ms, well.problem) == ("sleeping", 70, None)


async def test_a_file_that_was_put_there_meanwhile_is_found(data: Path) -> None:
    """S50: as a rebuild would find it."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await spawn(store, "order-2")
        path = Path(store.path_of("order-1"))
    kept = shutil.copy(path, data.parent / "kept")
    async with opened(data) as store:
        await store.delete("order-1")
        shutil.copy(kept, path)
        strange = path.with_name(path.name.replace("order-1", "order-3"))
        strange.write_bytes(b"garbage " * 2_000)
        assert await store.reindex() == 2
        assert await read(store, "order-1") == b"order-1"
        listed = {found.workflow_id: found.problem for found in await store.list_rows()}
        assert set(listed) == {"order-1", "order-2", "?" + strange.name}
        assert "damaged" in (listed["?" + strange.name] or "")
        assert await store.reindex() == 0


@pytest.mark.parametrize("commit_in", ["auto", "inline", "thread"])
async def test_what_is_being_made_or_deleted_meanwhile_is_left_alone(data: Path, commit_in: str) -> None:
    """S52: a file is there before it is recorded and nobody takes it from its maker; a deleted workflow's row stays away."""
    async with opened(data, commit_in=commit_in) as store:
        for number in range(10):
            await spawn(store, f"gone-{number}")

        async def make(number: int) -> None:
            await spawn(store, f"order-{number}")
            assert await read(store, f"order-{number}") == f"order-{number}".encode()

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(store.reindex)
                nursery.start_soon(make, number)
                nursery.start_soon(store.delete, f"gone-{number}")
        rows = await store.list_rows()
        assert rows == [row(f"order-{number}", state="running") for number in range(10)]


def order(wake: int | None) -> float:
    """A wake, to compare it."""
    return inf if wake is None else wake


class Life:
    """A workflow that sleeps and is woken, with its row kept by the rule of the catalog."""

    def __init__(self, store: FileStore, driver: Driver, check: Callable[[], Awaitable[None]]) -> None:
        self.store = store
        self.driver = driver
        self.check = check
        self.wake: int | None = 0

    async def go_to(self, state: str, alarm: int | None) -> None:
        wake = alarm if state == "sleeping" else 0
        row_now = row("order-1", state=state)
        if wake is not None and (self.wake is None or wake < self.wake):
            await self.store.put_rows([replace(row_now, next_wake_ms=wake)])
        await trio.lowlevel.checkpoint()
        self.wake = wake
        await self.driver.batch(Batch(puts=[(layout.STATE_KEY, state.encode())], alarm=AlarmChange("order-1", alarm)))
        await self.check()
        await trio.lowlevel.checkpoint()
        await self.store.put_rows([replace(row_now, next_wake_ms=wake)])


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
async def test_the_row_of_a_live_workflow_is_never_later_than_the_workflow(data: Path, commit_in: str) -> None:
    """S50: reindexing again and again beside a workflow that sleeps and wakes; the catalog's rule holds after each batch."""
    async with opened(data, commit_in=commit_in) as store:
        await spawn(store, "order-1")
        driver = await store.open_driver("order-1")
        late = 0

        async def check() -> None:
            nonlocal late
            wanted = order(life.wake)
            found = await store.get_row("order-1")
            assert found is not None
            late += order(found.next_wake_ms) > max(
                wanted, order(life.wake)
            )  # it may have changed while the row was read

        life = Life(store, driver, check)
        is_over = False

        async def reindex() -> None:
            while not is_over:
                await store.reindex()
                await check()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reindex)
            for number in range(60):
                await life.go_to("sleeping", 1_000 + number if number % 3 else None)
                await life.go_to("running" if number % 2 else "sleeping", 500 - number)
            is_over = True
        assert late == 0
        await driver.aclose()
