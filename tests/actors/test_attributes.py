"""Attributes that workflows set themselves: found through the catalog, whatever dies when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock

from perdure.storage import StorageError
from perdure.workflow import Context, workflow


@workflow(name="member")
async def member(ctx: Context, input: None) -> dict[str, Any]:
    """Is silver, then gold, and no trial any more."""
    await ctx.set_attributes("begin", {"tier": "silver"})
    await ctx.queue.next("upgrade")
    await ctx.set_attributes("upgraded", {"tier": "gold"}, remove=["trial"])
    await ctx.sleep("a while", 100)
    return dict(await ctx.attributes("end"))


async def test_a_workflow_is_found_by_what_it_has_set(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(member) as supervisor:
        handle = await supervisor.spawn(member, "m-1", attributes={"trial": True, "customer": 7})
        await trio.sleep(1)
        assert disk.rows["m-1"].attributes == {"trial": True, "customer": 7, "tier": "silver"}
        await handle.message("upgrade")
        await trio.sleep(1)
        assert disk.rows["m-1"].attributes == {"customer": 7, "tier": "gold"}
        assert await handle.result() == {"customer": 7, "tier": "gold"}


async def test_a_death_at_any_write_leaves_the_catalog_with_what_is_stored(
    driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S39, S50: a row that was not written any more is mended by the next process."""
    disks = (Disk(driver_kind, tmp_path / str(number)) for number in range(1000))
    with scheduled(1):
        counted = await _life(next(disks))
    explored = 0
    whens: tuple[When, ...] = ("before", "after")
    for write in range(counted):
        for when in whens:
            disk = next(disks)
            disk.store.die_at = (write, when)
            try:
                with scheduled(1):
                    await _life(disk)
            except StorageError:
                assert disk.store.is_dead
                await _life(disk)
            explored += disk.lives
    assert explored == 2 * counted


async def _life(disk: Disk) -> int:
    async with disk.process(member) as supervisor:
        spawn: Callable[..., Any] = supervisor.spawn
        handle = await spawn(member, "m-1", attributes={"trial": True})
        await handle.message("upgrade", id="u-1")
        await trio.sleep(1)
        disk.store.check()
        assert disk.rows["m-1"].attributes == {"tier": "gold"}
        return len(disk.store.written)
