"""Workflows that deal with each other, and a process that dies at every write of theirs, before it and after it.

A life of the process is played to its end; where it died, another one begins with nothing but what is on the disk, and nobody
asks for anything but what was not acknowledged. In the end everything is as without a death.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.storage import StorageError, layout
from perdure.workflow import (
    Context,
    WorkflowCancelledError,
    WorkflowFailedError,
    workflow,
)

WHENS: tuple[When, ...] = ("before", "after")
effects: list[str] = []


async def effect(name: str) -> str:
    effects.append(name)
    await trio.lowlevel.checkpoint()
    return name


@pytest.fixture
def make_disk(driver_kind: DriverKind, tmp_path: Path) -> Callable[[], Disk]:
    """Makes empty disks."""
    made: list[Disk] = []

    def make() -> Disk:
        disk = Disk(driver_kind, tmp_path / str(len(made)))
        made.append(disk)
        return disk

    return make


class Family:
    """A parent and its relatives, over any number of processes."""

    def __init__(self, disk: Disk, *workflows: Any, options: dict[str, Any] | None = None, seconds: int = 500) -> None:
        self.disk = disk
        self.workflows = workflows
        self.options = options or {}
        self.seconds = seconds
        self.is_spawned = False
        self.results: dict[str, Any] = {}

    async def live(self) -> None:
        """Spawn the parent, if that was not acknowledged, and let time pass until all is over."""
        async with self.disk.process(*self.workflows, **self.options) as supervisor:
            if not self.is_spawned:
                await supervisor.spawn(self.workflows[0], "p", None)
                self.is_spawned = True
            for _ in range(self.seconds // 10):
                await trio.sleep(10)
                self.disk.store.check()
            for workflow_id in self.disk.rows:
                self.results[workflow_id] = await _result(supervisor, workflow_id)

    def outcome(self) -> list[Any]:
        """What came of each workflow, without the digits that are another's in each run."""
        return sorted((re.sub("-[0-9a-f]{12}", "-", key), str(value)) for key, value in self.results.items())

    def check(self) -> None:
        """Nothing is left to do for anybody."""
        assert {row.workflow_id: row.next_wake_ms for row in self.disk.rows.values()} == dict.fromkeys(self.results)
        for workflow_id, namespace in self.disk.namespaces.items():
            left = [key for key in namespace if key == layout.DUTIES_KEY or key.startswith(layout.CALLS_PREFIX)]
            assert left == [], workflow_id


async def _result(supervisor: Supervisor, workflow_id: str) -> Any:
    try:
        with trio.fail_after(1000):
            return await (await supervisor.get(workflow_id)).result()
    except WorkflowFailedError as error:
        return f"failed: {error.error}"
    except WorkflowCancelledError:
        return "cancelled"


async def explore(
    make: Callable[[], Family], check: Callable[[Family], None], *, again: bool = True, stride: int = 1
) -> int:
    """Play a family's life without a death, then with one at every write; and with a second at the recovery's first."""
    effects.clear()
    family = make()
    with scheduled(1):
        await family.live()
    family.check()
    check(family)
    expected, counted = family.outcome(), len(family.disk.store.written)
    once = sorted(effects)
    explored = 0
    for write in range(0, counted, stride):
        for when in WHENS:
            effects.clear()
            family = make()
            family.disk.store.die_at = (write, when)
            deaths = 0
            while not family.results:
                try:
                    with scheduled(1):
                        await family.live()
                except* StorageError:
                    assert family.disk.store.is_dead
                    deaths += 1
                    family.results.clear()
                    if deaths == 1 and again:
                        family.disk.next_store().die_at = (explored % 3, "after" if when == "before" else "before")
            assert deaths >= 1
            explored += 1
            assert family.outcome() == expected, (write, when)
            family.check()
            check(family)
            assert set(effects) == set(once), (write, when)
            assert len(effects) <= len(once) + deaths * 3, (write, when)
    return explored


@workflow(name="child")
async def child(ctx: Context, input: str) -> str:
    await ctx.step("work", effect, input)
    await ctx.sleep("nap", 5)
    return await ctx.step("more", effect, f"{input}-more")


@workflow(name="parent")
async def parent(ctx: Context, input: Any) -> list[Any]:
    first = await ctx.step("first", effect, "first")
    result = await ctx.call("child", child, "a")
    return [first, result, await ctx.step("last", effect, "last")]


class TestCall:
    async def test_a_death_anywhere_leaves_one_child_and_its_result(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39: the parent's call, the child's making and its end, and the notice of it; on both stores."""

        def check(family: Family) -> None:
            assert family.results["p"] == ["first", "a-more", "last"]
            assert len(family.results) == 2

        explored = await explore(lambda: Family(make_disk(), parent, child), check)
        assert explored > 20

    async def test_the_same_where_only_one_may_be_in_memory(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39, S47: the parent leaves memory for its child, and comes back for the child's end."""

        @workflow(name="leaver")
        async def leaver(ctx: Context, input: Any) -> list[Any]:
            return [await ctx.call("child", child, "a"), await ctx.call("other", child, "b")]

        def check(family: Family) -> None:
            assert family.results["p"] == ["a-more", "b-more"]

        await explore(lambda: Family(make_disk(), leaver, child, options={"max_live": 1}), check, again=False)
