"""`to_asyncio` under a supervisor: one loop for all its workflows, that lasts as long as the supervisor and no longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import trio
from portals import no_thread_left

from perdure.actors import open_supervisor
from perdure.actors.portal import open_portal
from perdure.storage import MemoryStore
from perdure.workflow import (
    Context,
    CriticalError,
    RollbackContext,
    WorkflowErrorEvent,
    WorkflowFailedError,
    WorkflowState,
    to_asyncio,
    workflow,
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


loops: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    loops.clear()


async def note() -> None:
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())


async def note_in_asyncio() -> None:
    await to_asyncio(note)


@workflow(name="noter")
async def noter(ctx: Context, _: None) -> None:
    await ctx.step("note", note_in_asyncio)
    await ctx.step("note-again", note_in_asyncio)


async def test_the_steps_of_all_workflows_share_one_loop_which_ends_with_the_supervisor() -> None:
    async with open_supervisor(MemoryStore(), [noter]) as supervisor:
        for number in range(3):
            await supervisor.spawn(noter, f"noter-{number}")
        for number in range(3):
            await (await supervisor.get(f"noter-{number}")).result()
        assert len(loops) == 6
        assert not loops[0].is_closed()
    assert len(set(loops)) == 1
    assert loops[0].is_closed()
    async with open_supervisor(MemoryStore(), [noter]) as supervisor:
        await (await supervisor.spawn(noter, "noter-1")).result()
    assert len(set(loops)) == 2


async def test_two_supervisors_have_two_loops() -> None:
    async with open_supervisor(MemoryStore(), [noter]) as one, open_supervisor(MemoryStore(), [noter]) as other:
        await (await one.spawn(noter, "noter-1")).result()
        await (await other.spawn(noter, "noter-1")).result()
    assert [loops[0] is loops[1], loops[1] is loops[2], loops[2] is loops[3]] == [True, False, True]


async def test_who_does_not_need_a_loop_has_none() -> None:
    @workflow(name="plain")
    async def plain(ctx: Context, _: None) -> int:
        return await ctx.step("count", len, "text")

    before = threading.active_count()
    async with open_supervisor(MemoryStore(), [plain]) as supervisor:
        assert await (await supervisor.spawn(plain, "plain-1")).result() == 4
        assert "perdure-asyncio" not in {thread.name for thread in threading.enumerate()}
    assert threading.active_count() <= before + 1, "Trio's worker"


async def test_handlers_of_rollback_and_hooks_use_the_same_loop() -> None:
    async def undo(ctx: RollbackContext, output: Any) -> None:
        await to_asyncio(note)

    async def on_error(event: Any) -> None:
        if isinstance(event, WorkflowErrorEvent):
            await to_asyncio(note)

    async def refuse() -> NoReturn:
        raise CriticalError("no")

    @workflow(name="undone")
    async def undone(ctx: Context, _: None) -> None:
        await ctx.rollback_checkpoint("start")
        await ctx.step("note", note_in_asyncio, rollback=undo)
        await ctx.step("refuse", refuse)

    async with open_supervisor(MemoryStore(), [undone], on_error=on_error) as supervisor:
        with pytest.raises(WorkflowFailedError):
            await (await supervisor.spawn(undone, "undone-1")).result()
    assert len(loops) == 3
    assert len(set(loops)) == 1


async def test_what_was_made_in_the_loop_by_one_step_is_used_by_the_next() -> None:
    """A lock of asyncio belongs to the loop in which it was first contended."""
    locks: list[asyncio.Lock] = []

    async def use() -> str:
        if not locks:
            locks.append(asyncio.Lock())

        async def hold() -> None:
            async with locks[0]:
                await asyncio.sleep(0.001)

        await asyncio.gather(hold(), hold())
        return "used"

    async def use_in_asyncio() -> str:
        return await to_asyncio(use)

    @workflow(name="user")
    async def user(ctx: Context, _: None) -> str:
        await ctx.step("one", use_in_asyncio)
        return await ctx.step("other", use_in_asyncio)

    async with open_supervisor(MemoryStore(), [user]) as supervisor:
        assert await (await supervisor.spawn(user, "user-1")).result() == "used"


class _Slow:
    """A workflow whose step takes its time under asyncio."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.effects: list[str] = []
        self.begun = threading.Event()

        async def work() -> str:
            self.effects.append("begun")
            self.begun.set()
            try:
                await asyncio.sleep(self.seconds)
                self.effects.append("done")
            finally:
                await asyncio.sleep(0.001)
                self.effects.append("unwound")
            return "worked"

        async def work_in_asyncio() -> str:
            return await to_asyncio(work)

        @workflow(name="slow")
        async def slow(ctx: Context, _: None) -> str:
            return await ctx.step("work", work_in_asyncio, timeout=0)

        self.workflow = slow


async def test_an_eviction_cancels_it_and_waits_and_it_runs_again_later() -> None:
    """S33."""
    slow = _Slow(1000)
    async with open_supervisor(MemoryStore(), [slow.workflow]) as supervisor:
        handle = await supervisor.spawn(slow.workflow, "slow-1")
        await trio.to_thread.run_sync(slow.begun.wait)
        await handle.evict()
        assert slow.effects == ["begun", "unwound"]
        slow.seconds = 0
        await handle.wake()
        assert await handle.result() == "worked"


@pytest.mark.parametrize("grace", [0, 30])
async def test_at_the_end_it_has_its_grace_and_the_loop_is_closed_after_it(grace: float) -> None:
    """S49."""
    slow, store = _Slow(0.05 if grace else 1000), MemoryStore()
    async with open_supervisor(store, [slow.workflow], grace=grace) as supervisor:
        await supervisor.spawn(slow.workflow, "slow-1")
        await trio.to_thread.run_sync(slow.begun.wait)
    assert slow.effects == (["begun", "done", "unwound"] if grace else ["begun", "unwound"])
    slow.seconds = 0
    async with open_supervisor(store.restart(), [slow.workflow]) as supervisor:
        assert await (await supervisor.get("slow-1")).result() == "worked"
    assert slow.effects.count("done") == 1


async def test_a_race_cancels_it_when_it_loses() -> None:
    """S29."""
    slow = _Slow(1000)

    @workflow(name="race")
    async def race(ctx: Context, _: None) -> str:
        async def lose(ctx: Context) -> str:
            return await slow.workflow.function(ctx, None)

        async def win(ctx: Context) -> str:
            await ctx.step("wait", slow.begun.wait)
            return "won"

        return (await ctx.race("race", {"slow": lose, "fast": win})).value

    async with open_supervisor(MemoryStore(), [race]) as supervisor:
        handle = await supervisor.spawn(race, "race-1")
        assert await handle.result() == "won"
        assert await handle.get_state() is WorkflowState.COMPLETED
    assert slow.effects == ["begun", "unwound"]


def test_it_works_under_a_portal_too() -> None:
    with open_portal(MemoryStore(), [noter]) as supervisor:
        supervisor.spawn(noter, "noter-1").result(timeout=20)
    assert len(set(loops)) == 1
    assert loops[0].is_closed()
