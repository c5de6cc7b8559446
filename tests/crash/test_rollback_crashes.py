"""A process that dies while it rolls back or recovers, and again while it makes up for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Host, Namespace, SimulatedCrashError, host, scheduled
from trio.testing import MockClock

from perdure.storage import layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    RollbackContext,
    RunMode,
    WorkflowFailedError,
)

UNDONE = ["race", "loop 1", "loop 0", "join"]


class World:
    """A trip that fails once and is undone, is recovered, and goes well; over as many lives as it takes."""

    def __init__(self, mode: RunMode) -> None:
        self.mode: RunMode = mode
        self.log: list[tuple[str, str]] = []
        self.is_mended = False

    async def book(self, name: str) -> str:
        self.log.append(("do", name))
        return name

    async def undo(self, ctx: RollbackContext, output: str) -> None:
        if output == "loop 0" and ctx.attempt == 1:
            raise ConnectionError("not now")
        self.log.append(("undo", output))

    async def pay(self) -> str:
        if not self.is_mended:
            raise CriticalError("no money")
        return "paid"

    async def trip(self, ctx: Context, _: object) -> str:
        async def branch(inner: Context) -> None:
            await inner.step("book", self.book, "join", rollback=self.undo)

        async def body(inner: Context, number: int) -> Continue[int] | Break[None]:
            await inner.step("book", self.book, f"loop {number}", rollback=self.undo)
            return Break(None) if number else Continue(number + 1)

        async def quick(inner: Context) -> None:
            await inner.step("book", self.book, "race", rollback=self.undo)

        async def slow(inner: Context) -> None:
            await inner.sleep("rest", 1000)

        await ctx.rollback_checkpoint("trip")
        await ctx.join("join", {"branch": branch})
        await ctx.loop("loop", body, 0)
        await ctx.race("race", {"quick": quick, "slow": slow})
        return await ctx.step("pay", self.pay)

    async def live_on(self, namespace: Namespace) -> Any:
        """One life of the process, to the workflow's end."""
        async with host(namespace, self.mode) as process:
            # Whoever recovers looks first, and does not do it twice.
            if layout.PASSABLE_KEY not in await namespace.dump():
                self.is_mended = False
                await self._until_failed(process)
                await process.restart()
                await process.control("recover")
                await process.restart()
            self.is_mended = True
            return await process.ended(self.trip)

    async def _until_failed(self, process: Host) -> None:
        while True:
            try:
                result = await process.stop(self.trip)
            except WorkflowFailedError as error:
                if (error.name, dict(error.metadata)) == ("CriticalError", {}):
                    return
                raise
            pause_s = 0.001
            if result.sleep_until is not None:
                pause_s = max(pause_s, result.sleep_until - process.clock.now_ms() / 1000)
            await process.advance(pause_s)

    async def check_end(self, output: Any, namespace: Namespace, crashes: int) -> None:
        assert output == "paid"
        undone = [name for what, name in self.log if what == "undo"]
        in_order = [name for index, name in enumerate(undone) if index == 0 or undone[index - 1] != name]
        assert in_order == UNDONE, "last completed first; only the one that a crash met is undone again, at once"
        assert len(undone) <= len(UNDONE) + crashes
        for name in UNDONE:
            times = self.log.count(("do", name))
            assert 2 <= times <= 2 + crashes, f"{name} is done, undone, and done once more"
            last_undone = max(index for index, entry in enumerate(self.log) if entry == ("undo", name))
            assert ("do", name) in self.log[last_undone:]
        entries = await namespace.entries()
        assert not any(e.metadata.rollback_completed_at_ms for e in entries.values() if e.metadata is not None)


async def test_two_crashes_at_any_writes_end_like_a_run_without_them(
    tmp_path: Path, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35, S36, S39: the second at every write of what follows the first; in memory, since there are hundreds."""
    explored = 0
    first = 0
    while True:
        second = 0
        while True:
            namespace, world = Namespace("memory", tmp_path), World(mode)
            deaths = 0
            with scheduled(1):
                for write in (first, second):
                    await namespace.die_at(write, "after")
                    deaths += await dies(world, namespace)
                namespace.spare()
                await namespace.restart()
                await world.check_end(await world.live_on(namespace), namespace, deaths)
            await namespace.close()
            explored += 1
            if deaths < 2:
                break
            second += 1
        if second == 0:
            break
        first += 1
    assert first >= 15
    assert explored >= 100


async def dies(world: World, namespace: Namespace) -> bool:
    """Whether the process died before the workflow ended."""
    try:
        await world.live_on(namespace)
    except SimulatedCrashError:
        return True
    return False
