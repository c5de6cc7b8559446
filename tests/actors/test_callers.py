"""S20, S49: what becomes of steps that use other workflows when the supervisor leaves. In virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import Supervisor, SupervisorClosedError, open_supervisor
from perdure.storage import MemoryStore
from perdure.workflow import (
    Branch,
    Context,
    RollbackContext,
    StepError,
    WorkflowFailedError,
    WorkflowSuspendedError,
    workflow,
)

Ask = Callable[[Supervisor], Awaitable[Any]]

holder: list[Supervisor] = []
effects: list[str] = []
asks: dict[str, Ask] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    holder.clear()
    effects.clear()


@workflow(name="waiter")
async def waiter(ctx: Context, _: None) -> Any:
    message = await ctx.queue.next("go", completable=True)
    await message.complete(message.body)
    return message.body


@workflow(name="asker")
async def asker(ctx: Context, given: dict[str, Any]) -> Any:
    async def ask() -> Any:
        effects.append("begun")
        if len(effects) == 1:
            await trio.sleep(given["pause"])
        return await asks[given["ask"]](holder[-1])

    return await ctx.step("ask", ask, timeout=given.get("timeout", 0), max_retries=0)


@workflow(name="once")
async def once(ctx: Context, _: None) -> str:
    async def ask() -> Any:
        effects.append("begun")
        return await asks["result"](holder[-1])

    try:
        return str(await ctx.step("ask", ask, timeout=0, at_most_once=True))
    except StepError as error:
        return error.kind


async def work(seconds: float) -> str:
    await trio.sleep(seconds)
    effects.append("worked")
    return "worked"


@workflow(name="joiner")
async def joiner(ctx: Context, given: dict[str, Any]) -> Any:
    async def ask_it() -> Any:
        effects.append("begun")
        return await asks[given["ask"]](holder[-1])

    async def ask(ctx: Context) -> Any:
        return await ctx.step("ask", ask_it, timeout=given["timeout"], max_retries=0)

    async def busy(ctx: Context) -> Any:
        worked = await ctx.step("work", work, 5, timeout=0)
        await ctx.step("next", work, 0)
        return worked

    asking, working = Branch("ask", ask), Branch("busy", busy)
    done = await ctx.join("both", [asking, working])
    return [done[asking], done[working]]


async def _result(supervisor: Supervisor) -> Any:
    return await (await supervisor.get("waiter-1")).result()


async def _both(supervisor: Supervisor) -> Any:
    """Two tasks of one step: they are one lane that rests."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_result, supervisor)
        return await _result(supervisor)


async def _message(supervisor: Supervisor) -> Any:
    await (await supervisor.get("waiter-1")).message("go", 7, id="m")
    return 7


async def _nowait(supervisor: Supervisor) -> Any:
    await (await supervisor.get("waiter-1")).message_nowait("go", 7, id="m")
    return 7


async def _request(supervisor: Supervisor) -> Any:
    return await (await supervisor.get("waiter-1")).request("go", 7, timeout=None, id="m")


async def _unread(supervisor: Supervisor) -> Any:
    """A request to which nobody replies before the shutdown."""
    return await (await supervisor.get("sleeper-1")).request("go", 7, timeout=None, id="m")


async def _spawn(supervisor: Supervisor) -> Any:
    await supervisor.spawn(waiter, "made")
    return 7


async def _get(supervisor: Supervisor) -> Any:
    await supervisor.get("waiter-1")
    return 7


async def _state(supervisor: Supervisor) -> Any:
    await (await supervisor.get("waiter-1")).get_state()
    return 7


async def _count(supervisor: Supervisor) -> Any:
    await supervisor.count()
    return 7


async def _impatient(supervisor: Supervisor) -> Any:
    with trio.fail_after(2):
        return await _result(supervisor)


asks.update(
    result=_result,
    both=_both,
    message=_message,
    nowait=_nowait,
    request=_request,
    unread=_unread,
    spawn=_spawn,
    get=_get,
    state=_state,
    count=_count,
    impatient=_impatient,
)


@workflow(name="sleeper")
async def sleeper(ctx: Context, _: None) -> None:
    await ctx.sleep("sleep", 50)
    message = await ctx.queue.next("go", completable=True)
    await message.complete(message.body)


WORKFLOWS = (waiter, asker, once, joiner, sleeper)


@pytest.mark.parametrize("pause", [0, 3])
@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize(
    "ask", ["result", "both", "message", "nowait", "request", "unread", "spawn", "get", "state", "count"]
)
async def test_a_step_that_asks_a_supervisor_that_leaves_has_not_failed(
    disk: Disk, ask: str, drains: bool, pause: float, autojump_clock: MockClock
) -> None:
    """S20, S49: without retries; the block is left as soon as the step asks, and the next start finishes the workflow."""
    is_over = pause == 0 and ask not in ("result", "both", "unread")
    async with disk.process(*WORKFLOWS, grace=1000) as supervisor:
        holder.append(supervisor)
        await supervisor.spawn(waiter, "waiter-1")
        await supervisor.spawn(sleeper, "sleeper-1")
        await supervisor.spawn(asker, "asker-1", {"ask": ask, "pause": pause})
        await trio.sleep(1)
        left_at = trio.current_time()
        if drains:
            await supervisor.drain()
    assert trio.current_time() - left_at == pytest.approx(max(pause - 1, 0), abs=0.1)
    assert disk.rows["asker-1"].state == ("completed" if is_over else "running")
    assert disk.rows["waiter-1"].state in ("sleeping", "completed")
    async with disk.process(*WORKFLOWS) as supervisor:
        holder.append(supervisor)
        await trio.sleep(1)
        if ask in ("result", "both"):
            await (await supervisor.get("waiter-1")).message("go", 7)
        with trio.fail_after(1000):
            assert await (await supervisor.get("asker-1")).result() == 7
    assert effects == ["begun"] * (1 if is_over else 2)


async def test_the_outcome_of_an_at_most_once_step_is_unknown_then(disk: Disk, autojump_clock: MockClock) -> None:
    """S22: it was begun, and what it did before it asked is not known."""
    async with disk.process(*WORKFLOWS, grace=1000) as supervisor:
        holder.append(supervisor)
        await supervisor.spawn(waiter, "waiter-1")
        await supervisor.spawn(once, "once-1")
        await trio.sleep(1)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 0.1
    assert disk.rows["once-1"].state == "running"
    async with disk.process(*WORKFLOWS) as supervisor:
        assert await (await supervisor.get("once-1")).result() == "interrupted"
    assert effects == ["begun"]


@pytest.mark.parametrize(("ask", "timeout"), [("result", 0), ("both", 0), ("both", 3), ("impatient", 0)])
async def test_beside_a_running_step_it_rests_until_that_has_ended(
    disk: Disk, ask: str, timeout: float, autojump_clock: MockClock
) -> None:
    """S20: nor does a timeout count, the step's or its code's own, that comes meanwhile."""
    async with disk.process(*WORKFLOWS, grace=1000) as supervisor:
        holder.append(supervisor)
        await supervisor.spawn(waiter, "waiter-1")
        await supervisor.spawn(joiner, "joiner-1", {"ask": ask, "timeout": timeout})
        await trio.sleep(1)
        left_at = trio.current_time()
    assert trio.current_time() - left_at == pytest.approx(4, abs=0.1)
    assert effects == ["begun", "worked"]
    assert disk.rows["joiner-1"].state == "running"
    async with disk.process(*WORKFLOWS) as supervisor:
        holder.append(supervisor)
        await (await supervisor.get("waiter-1")).message("go", 7)
        assert await (await supervisor.get("joiner-1")).result() == [7, "worked"]
    assert sorted(effects) == ["begun", "begun", "worked", "worked"]


async def test_from_a_worker_thread_it_is_the_same(disk: Disk, autojump_clock: MockClock) -> None:
    """S20, S49: a plain function that calls back into Trio."""

    has_asked = trio.Event()

    async def ask() -> Any:
        has_asked.set()
        return await _result(holder[-1])

    @workflow(name="threader")
    async def threader(ctx: Context, _: None) -> Any:
        return await ctx.step("ask", lambda: trio.from_thread.run(ask), timeout=0, max_retries=0)

    async with disk.process(*WORKFLOWS, threader, grace=1000) as supervisor:
        holder.append(supervisor)
        await supervisor.spawn(waiter, "waiter-1")
        await supervisor.spawn(threader, "threader-1")
        await has_asked.wait()
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 1
    assert disk.rows["threader-1"].state == "running"
    async with disk.process(*WORKFLOWS, threader) as supervisor:
        holder.append(supervisor)
        await (await supervisor.get("waiter-1")).message("go", 7)
        assert await (await supervisor.get("threader-1")).result() == 7


async def test_who_asks_from_outside_is_told(disk: Disk, autojump_clock: MockClock) -> None:
    """S51: also a task that a step has left behind, which is none of the workflow's any more, and does not count as it."""
    told: list[str] = []

    async def ask(supervisor: Supervisor) -> None:
        try:
            await _result(supervisor)
        except WorkflowSuspendedError:
            told.append("result")
        try:
            await _message(supervisor)
        except SupervisorClosedError:
            told.append("message")

    @workflow(name="leaver")
    async def leaver(ctx: Context, _: None) -> None:
        async def leave_behind() -> None:
            nursery.start_soon(ask, holder[-1])

        await ctx.step("leave", leave_behind)
        await ctx.step("work", work, 5, timeout=0)

    async with trio.open_nursery() as nursery, disk.process(*WORKFLOWS, leaver, grace=1000) as supervisor:
        holder.append(supervisor)
        await supervisor.spawn(waiter, "waiter-1")
        await supervisor.spawn(leaver, "leaver-1")
        nursery.start_soon(ask, supervisor)
        await trio.sleep(1)
        nursery.start_soon(supervisor.drain)
        await wait_all_tasks_blocked()
        assert sorted(told) == ["message", "message", "result", "result"]
    assert effects == ["worked"]


async def test_of_another_supervisor_it_is_told(disk: Disk, autojump_clock: MockClock) -> None:
    """S49: one that leaves alone takes no workflow of another with it; what their steps make of that is theirs."""
    async with disk.process(*WORKFLOWS) as supervisor:
        async with open_supervisor(MemoryStore(), WORKFLOWS) as other:
            await other.spawn(waiter, "waiter-1")
            holder.append(other)
            handle = await supervisor.spawn(asker, "asker-1", {"ask": "result", "pause": 0})
            await trio.sleep(1)
        with pytest.raises(WorkflowFailedError, match="left its block"):
            await handle.result()


@workflow(name="flaky")
async def flaky(ctx: Context, backoff: float) -> str:
    async def fail_once() -> str:
        effects.append("begun")
        await trio.sleep(3)
        if len(effects) == 1:
            raise ValueError("not yet")
        return "done"

    return await ctx.step("ask", fail_once, timeout=0, max_retries=1, retry_backoff_base=backoff)


@workflow(name="undoer")
async def undoer(ctx: Context, backoff: float) -> None:
    async def undo(ctx: RollbackContext, output: Any) -> None:
        effects.append("undoing")
        await trio.sleep(3)
        if len(effects) == 1:
            raise ValueError("not yet")

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    await ctx.rollback_checkpoint("start")
    await ctx.step("done", nothing, rollback=undo, max_retries=1, retry_backoff_base=backoff)
    raise RuntimeError("undo it")


@pytest.mark.parametrize("backoff", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("which", [flaky, undoer])
async def test_no_attempt_begins_while_the_supervisor_leaves(
    disk: Disk, which: Any, backoff: float, autojump_clock: MockClock
) -> None:
    """S20, S49: the one that runs may finish; its failure is durable, and the retry is for the next start."""
    async with disk.process(flaky, undoer, grace=1000) as supervisor:
        await supervisor.spawn(which, "w", backoff)
        await trio.sleep(1)
        left_at = trio.current_time()
    assert trio.current_time() - left_at == pytest.approx(2, abs=0.1)
    assert len(effects) == 1
    async with disk.process(flaky, undoer) as supervisor:
        handle = await supervisor.get("w")
        with trio.fail_after(1000):
            if which is flaky:
                assert await handle.result() == "done"
            else:
                with pytest.raises(WorkflowFailedError, match="undo it"):
                    await handle.result()
                error = await handle.get_error()
                assert error is not None
                assert "rollback_error" not in error.metadata
    assert len(effects) == 2
