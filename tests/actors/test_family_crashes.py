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
from incarnations import record_write_points
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.storage import StorageError, layout
from perdure.workflow import (
    ChildFailedError,
    Context,
    CriticalError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowState,
    workflow,
)

pytestmark = pytest.mark.exhaustive

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
    make: Callable[[], Family], check: Callable[[Family], None], *, again: bool = True, is_same: bool = True
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
    for write in range(counted):
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
            explored += deaths > 0
            assert not is_same or family.outcome() == expected, (write, when)
            family.check()
            check(family)
            assert not is_same or set(effects) == set(once), (write, when)
            assert len(effects) <= len(once) + deaths * 3, (write, when)
    # Files are opened in threads, so which changes share a batch, and how many there are, is not the same each time.
    assert explored >= 2 * counted - 6
    record_write_points(counted)
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


@workflow(name="failing")
async def failing(ctx: Context, input: int) -> None:
    await ctx.sleep("nap", input)
    raise ValueError("no good")


@workflow(name="endless")
async def endless(ctx: Context, input: Any) -> None:
    await ctx.step("begin", effect, "endless")
    await ctx.queue.next("never")


@workflow(name="reader")
async def reader(ctx: Context, count: int) -> list[Any]:
    return [(await ctx.queue.next(f"read-{number}", names=["item"])).body for number in range(count)]


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

    async def test_calls_beside_each_other(self, make_disk: Callable[[], Disk], autojump_clock: MockClock) -> None:
        """S39: a join of calls, one of which fails; the failure is caught and the same."""

        @workflow(name="joiner")
        async def joiner(ctx: Context, input: Any) -> list[Any]:
            async def bad(ctx: Context) -> str:
                try:
                    await ctx.call("bad", failing, 3)
                except ChildFailedError as error:
                    return str(error.error)
                return "no failure"

            async def good(ctx: Context) -> str:
                return await ctx.call("good", child, "a")

            result = await ctx.join("both", {"good": good, "bad": bad})
            return [*result.values(), await ctx.step("last", effect, "last")]

        def check(family: Family) -> None:
            assert family.results["p"] == ["a-more", "ValueError: no good", "last"]
            assert len(family.results) == 3

        await explore(lambda: Family(make_disk(), joiner, child, failing), check, again=False)

    async def test_a_child_whose_branch_lost_is_cancelled_in_the_end(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S29, S39: whatever was written before the death, the loser's child is not left, and no duty is."""

        @workflow(name="racer")
        async def racer(ctx: Context, input: Any) -> Any:
            async def slow(ctx: Context) -> str:
                return await ctx.call("slow", endless, None)

            async def quick(ctx: Context) -> str:
                await ctx.sleep("nap", 3)
                return "quick"

            won = await ctx.race("first", {"slow": slow, "quick": quick})
            await ctx.sleep("rest", 1000)
            return won.value

        def check(family: Family) -> None:
            assert family.results["p"] == "quick"
            # The time in which the process was dead may have decided the race before the child was made.
            assert [value for key, value in family.results.items() if key != "p"] in (["cancelled"], [])

        await explore(lambda: Family(make_disk(), racer, endless, seconds=1500), check, is_same=False)

    async def test_a_parent_that_fails_cancels_what_it_called_and_leaves_what_it_is_to_leave(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39: its end, its duty to cancel, and that of its children, which tell nobody any more."""

        @workflow(name="dying")
        async def dying(ctx: Context, input: Any) -> None:
            async def cancelled(ctx: Context) -> None:
                await ctx.call("cancelled", endless, None, workflow_id="cancelled")

            async def left(ctx: Context) -> None:
                await ctx.call("left", child, "left", workflow_id="left", on_parent_end="leave")

            await ctx.join("both", {"cancelled": cancelled, "left": left})

        class Dying(Family):
            async def live(self) -> None:
                self.is_dead = getattr(self, "is_dead", False)
                if not self.is_dead:
                    async with self.disk.process(*self.workflows, **self.options) as supervisor:
                        handle = await supervisor.spawn(dying, "p", None)
                        made = self.disk.namespaces
                        while any(layout.INPUT_KEY not in made.get(name, ()) for name in ("cancelled", "left")):
                            await trio.sleep(0.1)
                            self.disk.store.check()
                        await handle.cancel()
                    self.is_spawned = self.is_dead = True
                await super().live()

        def check(family: Family) -> None:
            assert family.results == {"p": "cancelled", "cancelled": "cancelled", "left": "left-more"}

        await explore(lambda: Dying(make_disk(), dying, endless, child), check, again=False)

    async def test_a_workflow_that_two_wait_for_tells_both(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S39: one made it, the other joined it; and so does a third once it has ended."""

        @workflow(name="pair")
        async def pair(ctx: Context, input: str | None) -> list[Any]:
            if input is None:

                async def first(ctx: Context) -> Any:
                    return await ctx.call("first", pair, "1")

                async def second(ctx: Context) -> Any:
                    return await ctx.call("second", pair, "2")

                results = await ctx.join("both", {"first": first, "second": second})
                return [*results.values(), await ctx.call("third", pair, "3")]
            return [input, await ctx.call("shared", child, "shared", workflow_id="shared")]

        def check(family: Family) -> None:
            assert family.results["p"] == [[number, "shared-more"] for number in "123"]
            assert len(family.results) == 5

        await explore(lambda: Family(make_disk(), pair, child), check, again=False)

    async def test_a_parent_and_its_child_are_recovered_together(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S36, S39: anywhere between the failure of the child and the end of both."""
        good: set[str] = set()

        async def fail() -> str:
            if "good" not in good:
                raise CriticalError("not yet")
            return await effect("good")

        @workflow(name="shaky")
        async def shaky(ctx: Context, input: Any) -> str:
            await ctx.step("before", effect, "before")
            return await ctx.step("fail", fail)

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> str:
            result = await ctx.call("call", shaky, None)
            return await ctx.step("after", effect, f"after {result}")

        class Recovered(Family):
            is_recovered = False

            async def live(self) -> None:
                if not self.is_recovered:
                    if not self.is_spawned:
                        good.clear()
                    async with self.disk.process(*self.workflows) as supervisor:
                        handle = await supervisor.spawn(calls, "p", None)
                        self.is_spawned = True
                        while await handle.get_state() not in (WorkflowState.FAILED, WorkflowState.COMPLETED):
                            await trio.sleep(1)
                            self.disk.store.check()
                        good.add("good")
                        await handle.recover()
                        self.is_recovered = True
                        await trio.sleep(1)
                        self.disk.store.check()
                await super().live()

        def check(family: Family) -> None:
            assert family.results["p"] == "after good"
            assert len(family.results) == 2

        await explore(lambda: Recovered(make_disk(), calls, shaky), check, again=False)


class TestSend:
    async def test_what_is_sent_arrives_once_and_in_order(
        self, make_disk: Callable[[], Disk], autojump_clock: MockClock
    ) -> None:
        """S27, S39: between the target's batch and the sender's own, and anywhere else."""

        @workflow(name="sender")
        async def sender(ctx: Context, input: Any) -> list[Any]:
            async def read(ctx: Context) -> list[Any]:
                return await ctx.call("reader", reader, 4, workflow_id="reader")

            async def send(ctx: Context) -> None:
                await ctx.sleep("until it is there", 1)
                await ctx.step("begin", effect, "begin")
                for number in range(3):
                    await ctx.send(f"send-{number}", "reader", "item", number)
                await ctx.step("end", effect, "end")
                await ctx.send("last", "reader", "item", "last")

            return (await ctx.join("both", {"read": read, "send": send}))["read"]

        def check(family: Family) -> None:
            assert family.results["p"] == [0, 1, 2, "last"]

        await explore(lambda: Family(make_disk(), sender, reader), check)
