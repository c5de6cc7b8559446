"""`wake()`: ends sleeps and retry backoffs at once and durably, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from harness import Host, MovableClock, Namespace, SlowDriver, host
from trio.testing import MockClock

from perdure.workflow import (
    Break,
    Context,
    Continue,
    QueueTimeoutError,
    RunMode,
    WorkflowFailedError,
    current_step,
    start_workflow,
)

YEAR_S = 365 * 86_400.0


async def alarm(namespace: Namespace) -> int | None:
    return await (await namespace.driver()).get_alarm("workflow-1")


async def napper(ctx: Context, seconds: float) -> str:
    return (await ctx.sleep("nap", seconds)).value


async def test_wake_ends_a_sleep_at_once_and_durably(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: what it returns is `interrupted`, on every later run too; the next sleep is not touched."""
    outcomes: list[str] = []

    async def workflow(ctx: Context, _: None) -> str:
        outcomes.append((await ctx.sleep("first", 1000)).value)
        outcomes.append((await ctx.sleep("second", 1000)).value)
        return outcomes[-1]

    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        await process.stop(workflow)
        await process.advance(10)
        await process.control("wake")
        assert (await namespace.entries())[("first",)].data["state"] == "interrupted"
        if mode == "yield":
            assert await alarm(namespace) == process.clock.now_ms()
        stopped = await process.stop(workflow)
        assert trio.current_time() - begun_s == 10
        assert stopped.sleep_until == process.clock.now_ms() / 1000 + 1000
        assert outcomes == ["interrupted"]
        await process.restart()
        assert await process.finish(workflow) == "completed"
    assert outcomes[1:] == (
        ["interrupted", "interrupted", "completed"] if mode == "yield" else ["interrupted", "completed"]
    )


async def test_a_wake_that_returned_survives_a_crash(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the process dies right after wake() in a sleep; the next one goes on at once, as interrupted."""
    async with host(namespace, mode) as process:
        await process.stop(napper, YEAR_S)
        woken_s = trio.current_time()
        await process.control("wake")
        (await namespace.driver()).die()
        await process.restart()
        assert (await process.stop(napper, YEAR_S)).output == "interrupted"
        assert trio.current_time() == woken_s


async def test_wake_ends_a_retry_backoff_at_once_and_durably(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the attempt is made now, also by the process after a crash; attempts are counted as ever, later pauses kept."""
    begun_s: list[float] = []
    attempts: list[int] = []

    async def failing() -> str:
        begun_s.append(trio.current_time())
        attempts.append(current_step().attempt)
        if len(attempts) < 4:
            raise ConnectionError("refused")
        return "through"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("failing", failing, retry_backoff_base=100.0, retry_backoff_max=1000.0)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.advance(5)
        await process.control("wake")
        await process.stop(workflow)
        await process.advance(5)
        await process.control("wake")
        (await namespace.driver()).die()
        await process.restart()
        await process.stop(workflow)
        assert await process.finish(workflow) == "through"
    assert attempts == [1, 2, 3, 4]
    assert [round(at - begun_s[0]) for at in begun_s] == [0, 5, 10, 810]


async def test_wake_reaches_a_sleep_inside_a_loop(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: and only the iteration that sleeps."""

    async def body(ctx: Context, seen: list[str]) -> Continue[list[str]] | Break[list[str]]:
        seen = [*seen, (await ctx.sleep("nap", 100)).value]
        return Continue(seen) if len(seen) < 3 else Break(seen)

    async def workflow(ctx: Context, _: None) -> list[str]:
        return await ctx.loop("turns", body, [])

    async with host(namespace, mode) as process:
        stopped = await process.stop(workflow)
        assert stopped.sleep_until is not None
        await process.advance(stopped.sleep_until - process.clock.now_ms() / 1000)
        await process.stop(workflow)
        await process.control("wake")
        await process.restart()
        assert await process.finish(workflow) == ["completed", "interrupted", "completed"]


async def test_wake_of_a_workflow_that_does_not_sleep_is_harmless(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: before its first run, while a step runs, while it waits for a message, after its end: nothing changes."""
    in_step = trio.Event()
    leave_step = trio.Event()

    async def work() -> str:
        in_step.set()
        await leave_step.wait()
        return "worked"

    async def workflow(ctx: Context, _: None) -> list[Any]:
        output = await ctx.step("work", work, timeout=0)
        message = await ctx.queue.next("wait")
        return [output, message.body]

    async with host(namespace, mode) as process:
        await process.control("wake")
        assert await namespace.dump() == {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.stop, workflow)
            await in_step.wait()
            if process.handle is not None:
                before = await namespace.dump()
                await process.control("wake")
                assert await namespace.dump() == before
            leave_step.set()
        stopped = await process.stop(workflow)
        assert stopped.waiting_for_messages == ("*",)
        before = await namespace.dump()
        await process.control("wake")
        assert await namespace.dump() == before
        assert (await process.stop(workflow)).waiting_for_messages == ("*",)
        await process.send("go", "went")
        assert await process.finish(workflow) == ["worked", "went"]
        before = await namespace.dump()
        await process.control("wake")
        assert await namespace.dump() == before


async def test_wake_of_a_failed_workflow_is_harmless(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: its exhausted step is no retry that waits."""
    calls: list[int] = []

    async def failing() -> None:
        calls.append(1)
        raise ConnectionError("refused")

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("failing", failing, max_retries=0)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError):
                await process.finish(workflow)
            before = await namespace.dump()
            await process.control("wake")
            assert await namespace.dump() == before
    assert calls == [1]


async def test_wake_twice_is_wake_once(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S24: the second one finds nothing that sleeps, and changes nothing."""
    async with host(namespace, mode) as process:
        await process.stop(napper, 1000)
        await process.control("wake")
        await process.control("wake")
        assert (await process.stop(napper, 1000)).output == "interrupted"


async def test_wake_leaves_the_deadlines_of_queue_reads_alone(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: a read with a timeout waits its time out, also beside a user's sleep whose name looks like its deadline's."""
    log: list[str] = []

    async def note(text: str) -> None:
        log.append(text)

    async def workflow(ctx: Context, _: None) -> None:
        outcome = await ctx.sleep("x:deadline", 100)
        await ctx.step("note sleep", note, outcome.value)
        try:
            await ctx.queue.next("q", timeout=50)
        except QueueTimeoutError:
            await ctx.step("note timeout", note, f"timeout at {trio.current_time() - begun_s:g}")
        assert await ctx.queue.next_batch("r", timeout=50) == []
        await ctx.step("note batch", note, f"nothing at {trio.current_time() - begun_s:g}")

    async with host(namespace, mode) as process:
        begun_s = trio.current_time()
        await process.stop(workflow)
        await process.advance(10)
        await process.restart()
        await process.stop(workflow)
        await process.control("wake")
        await process.stop(workflow)
        assert log == ["interrupted"]
        for _ in range(3):
            await process.control("wake")
            assert (await namespace.entries())[("q:deadline",)].data["state"] == "pending"
            stopped = await process.stop(workflow)
            assert stopped.sleep_until == (await namespace.entries())[("q:deadline",)].data["deadline_ms"] / 1000
            await process.restart()
            await process.stop(workflow)
        await process.finish(workflow)
    assert log == ["interrupted", "timeout at 60", "nothing at 110"]


async def test_a_read_with_a_timeout_beside_a_sleep_named_like_its_deadline_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: which of them a stored entry is, is stored: in another scope the very same name is a sleep that wake() ends."""

    async def body(ctx: Context, turn: int) -> Continue[int] | Break[str]:
        if turn == 0:
            await ctx.queue.next_batch("x", timeout=30)
            return Continue(1)
        return Break((await ctx.sleep("x:deadline", 1000)).value)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.loop("turns", body, 0)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.stop(workflow)
        await process.control("wake")
        assert (await namespace.entries())[
            (
                "turns",
                0,
                "x:deadline",
            )
        ].data["state"] == "pending"
        await process.advance(30)
        await process.stop(workflow)
        await process.restart()
        await process.control("wake")
        assert (await process.stop(workflow)).output == "interrupted"


async def test_a_sleep_whose_wake_is_on_its_way_to_the_disk_returns_once_it_is_there(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the deadline comes while wake() is being written; what the workflow is told is what a later run will be told."""
    told: list[tuple[str, str]] = []

    async def workflow(ctx: Context, _: None) -> str:
        outcome = await ctx.sleep("nap", 10)
        told.append((outcome.value, (await namespace.entries())[("nap",)].data["state"]))
        return outcome.value

    async def wake_just_before(process: Host, deadline_s: float) -> None:
        await process.advance(deadline_s - 0.5 - process.clock.now_ms() / 1000)
        await process.control("wake")

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        driver.inner = SlowDriver(driver.inner)  # type: ignore[assignment]
        stopped = await process.stop(workflow)
        while stopped.sleep_until is None:
            await process.advance(1)
            stopped = await process.stop(workflow)
        await wake_just_before(process, stopped.sleep_until)
        output = await process.finish(workflow)
        assert output == "interrupted"
        assert told == [(output, output)]
        await process.restart()
        assert (await namespace.entries())[("nap",)].data["state"] == output


async def test_a_sleep_that_wake_ended_before_it_was_replayed_returns_once_that_is_durable(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S24: wake() comes between the loading of the workflow and its replay, and takes its time."""
    told: list[tuple[str, str]] = []

    async def workflow(ctx: Context, _: None) -> str:
        outcome = await ctx.sleep("nap", 10)
        told.append((outcome.value, (await namespace.entries())[("nap",)].data["state"]))
        return outcome.value

    async with host(namespace, "live") as process:
        await process.stop(workflow)
    driver = await namespace.restart()
    driver.inner = SlowDriver(driver.inner)  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "workflow-1", workflow, None, driver, clock=MovableClock())
        await handle.wake()
        assert await handle.result() == "interrupted"
    assert told == [("interrupted", "interrupted")]
